"""Sums over many steps of one engine: the message that a shard sends to the controller.

Owns sums only, never ratios, so that observations of several engines can be added. No torch, no Ray.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from autoscale.control.priors import Counts, DraftClass
from engine.config import Method
from engine.core.pacing import Prediction
from engine.core.stats import RowOutcome, StepStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Sums over `num_steps` steps of one engine."""

    num_steps: int = 0
    num_decodes: int = 0
    num_prefill_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_emitted: int = 0
    num_waiting: int = 0
    """Requests that wait at the last step; not a sum."""
    accepted_by_position: tuple[int, ...] = ()
    """Draft tokens accepted at each position."""
    drafted_by_position: tuple[int, ...] = ()
    """Draft tokens reached at each position. Positions after a rejection are not reached."""
    k_by_reason: dict[str, int] = field(default_factory=dict)
    """Number of choices of K by their reason."""
    schedule_s: float = 0.0
    draft_s: float = 0.0
    handoff_s: float = 0.0
    verify_s: float = 0.0
    sample_s: float = 0.0
    step_s: float = 0.0
    plain_s: float = 0.0
    """Predicted seconds of the same steps without drafts; each would have emitted one token per sampling span."""
    by_draft_class: dict[DraftClass, Counts] = field(default_factory=dict)
    """Positions reached and accepted, by draft class."""


class Aggregator:
    """Collects step stats between two reports. `add` and `take` may run in different threads.

    Args:
        method: the draft method of the engine.
    """

    def __init__(self, method: Method = "none") -> None:
        self._stats: deque[tuple[StepStats, float]] = deque()
        self._method = method

    def add(self, stats: StepStats, prediction: Prediction) -> None:
        """Take a finished step and the pacer's prediction for it."""
        self._stats.append((stats, prediction.plain_s))

    def take(self) -> Observation:
        """The sums over all steps since the last call."""
        taken, plain_s = [], 0.0
        while self._stats:
            stats, seconds = self._stats.popleft()
            taken.append(stats)
            plain_s += seconds
        outcomes = [outcome for stats in taken for outcome in stats.outcomes]
        return replace(summarise(taken), plain_s=plain_s, by_draft_class=_by_draft_class(outcomes, self._method))


_SUMS = tuple(
    field.name
    for field in fields(Observation)
    if field.name not in ("num_waiting", "accepted_by_position", "drafted_by_position", "k_by_reason", "by_draft_class")
)


def combine(observations: Sequence[Observation]) -> Observation:
    """Add up observations, of one engine in order or of several; at least one."""
    reasons: Counter[str] = Counter()
    by_draft_class: dict[DraftClass, Counts] = {}
    for observation in observations:
        reasons.update(observation.k_by_reason)
        for draft_class, counts in observation.by_draft_class.items():
            by_draft_class[draft_class] = by_draft_class.get(draft_class, Counts()) + counts
    return Observation(
        num_waiting=observations[-1].num_waiting,
        accepted_by_position=_add_positions([o.accepted_by_position for o in observations]),
        drafted_by_position=_add_positions([o.drafted_by_position for o in observations]),
        k_by_reason=dict(reasons),
        by_draft_class=by_draft_class,
        **{name: sum(getattr(o, name) for o in observations) for name in _SUMS},
    )


def summarise(stats: list[StepStats]) -> Observation:
    """Add up steps. `plain_s` and `by_draft_class` are left out."""
    reasons: Counter[str] = Counter()
    for step in stats:
        reasons.update(step.k_by_reason)
    return Observation(
        num_steps=len(stats),
        num_decodes=sum(s.num_decodes for s in stats),
        num_prefill_tokens=sum(s.num_prefill_tokens for s in stats),
        num_drafted=sum(s.num_drafted for s in stats),
        num_accepted=sum(s.num_accepted for s in stats),
        num_emitted=sum(s.num_emitted for s in stats),
        num_waiting=stats[-1].num_waiting if stats else 0,
        accepted_by_position=_add_positions([s.accepted_by_position for s in stats]),
        drafted_by_position=_add_positions([s.drafted_by_position for s in stats]),
        k_by_reason=dict(reasons),
        schedule_s=sum(s.schedule_s for s in stats),
        draft_s=sum(s.draft_s for s in stats),
        handoff_s=sum(s.handoff_s for s in stats),
        verify_s=sum(s.verify_s for s in stats),
        sample_s=sum(s.sample_s for s in stats),
        step_s=sum(s.step_s for s in stats),
    )


def _add_positions(rows: list[tuple[int, ...]]) -> tuple[int, ...]:
    width = max((len(row) for row in rows), default=0)
    return tuple(sum(row[i] for row in rows if i < len(row)) for i in range(width))


def _by_draft_class(outcomes: Sequence[RowOutcome], method: Method) -> dict[DraftClass, Counts]:
    """Counts of all drafts but those that a grammar forced, and trees of lookup and model, which belong to neither."""
    lengths: dict[DraftClass, Counter[tuple[Sequence[int], Sequence[int]]]] = {}
    for outcome in outcomes:
        if outcome.source in ("grammar", "merged"):
            continue
        draft_class = DraftClass("ngram" if outcome.source == "lookup" else method, outcome.workload, outcome.adapter)
        num_drafts = lengths.setdefault(draft_class, Counter())
        num_drafts[outcome.reached_nodes, outcome.accepted_nodes] += 1
    return {draft_class: _counts(num_drafts) for draft_class, num_drafts in lengths.items()}


def _counts(num_drafts: Counter[tuple[Sequence[int], Sequence[int]]]) -> Counts:
    """Counts by position.

    Args:
        num_drafts: number of drafts by (places reached, places accepted), both ascending.
    """
    width = 1 + max(reached[-1] for reached, _ in num_drafts)
    return Counts(
        *(
            tuple(sum(n for places, n in num_drafts.items() if position in places[which]) for position in range(width))
            for which in (0, 1)
        )
    )
