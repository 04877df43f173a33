"""What many steps of one engine add up to: the message that a shard sends to the controller.

Owns sums only, never ratios, so observations of several engines can be added. No torch, no Ray.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace

from autoscale.control.priors import Counts, Kind
from engine.config import Method
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
    """At the last step, not a sum."""
    accepted_by_position: tuple[int, ...] = ()
    drafted_by_position: tuple[int, ...] = ()
    k_by_reason: dict[str, int] = field(default_factory=dict)
    schedule_s: float = 0.0
    draft_s: float = 0.0
    handoff_s: float = 0.0
    verify_s: float = 0.0
    sample_s: float = 0.0
    step_s: float = 0.0
    plain_s: float = 0.0
    """Predicted seconds of the same steps without drafts; each would have emitted a token per sampling span."""
    by_kind: dict[Kind, Counts] = field(default_factory=dict)
    """Positions reached and accepted."""


class Aggregator:
    """Collects step stats between two reports. `add` and `take` may run in different threads.

    Args:
        plain_s: how long the step added next is predicted to have taken without its drafts, seconds.
        method: of drafting.
    """

    def __init__(self, plain_s: Callable[[], float] | None = None, method: Method = "none") -> None:
        self._stats: deque[tuple[StepStats, float]] = deque()
        self._plain_s = plain_s
        self._method = method

    def add(self, stats: StepStats) -> None:
        self._stats.append((stats, self._plain_s() if self._plain_s is not None else 0.0))

    def take(self) -> Observation:
        """Everything since the last call."""
        taken, plain_s = [], 0.0
        while self._stats:
            stats, seconds = self._stats.popleft()
            taken.append(stats)
            plain_s += seconds
        outcomes = [outcome for stats in taken for outcome in stats.outcomes]
        return replace(summarise(taken), plain_s=plain_s, by_kind=_by_kind(outcomes, self._method))


_SUMS = tuple(
    field.name
    for field in fields(Observation)
    if field.name not in ("num_waiting", "accepted_by_position", "drafted_by_position", "k_by_reason", "by_kind")
)


def combine(observations: Sequence[Observation]) -> Observation:
    """Add up observations, of one engine in order or of several; at least one."""
    reasons: Counter[str] = Counter()
    by_kind: dict[Kind, Counts] = {}
    for observation in observations:
        reasons.update(observation.k_by_reason)
        for kind, counts in observation.by_kind.items():
            by_kind[kind] = by_kind.get(kind, Counts()) + counts
    return Observation(
        num_waiting=observations[-1].num_waiting,
        accepted_by_position=_add_positions([o.accepted_by_position for o in observations]),
        drafted_by_position=_add_positions([o.drafted_by_position for o in observations]),
        k_by_reason=dict(reasons),
        by_kind=by_kind,
        **{name: sum(getattr(o, name) for o in observations) for name in _SUMS},
    )


def summarise(stats: list[StepStats]) -> Observation:
    """Add up steps."""
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


def _by_kind(outcomes: Sequence[RowOutcome], method: Method) -> dict[Kind, Counts]:
    lengths: dict[Kind, Counter[tuple[int, int]]] = {}
    for outcome in outcomes:
        reached = min(outcome.num_accepted + 1, outcome.num_drafted)
        if outcome.source == "grammar":
            continue
        kind = Kind("ngram" if outcome.source == "lookup" else method, outcome.workload)
        seen = lengths.setdefault(kind, Counter())
        seen[reached, outcome.num_accepted] += 1
    return {kind: _counts(seen) for kind, seen in lengths.items()}


def _counts(seen: Counter[tuple[int, int]]) -> Counts:
    width = max(reached for reached, _ in seen)
    return Counts(
        tuple(sum(n for (reached, _), n in seen.items() if reached > position) for position in range(width)),
        tuple(sum(n for (_, accepted), n in seen.items() if accepted > position) for position in range(width)),
    )
