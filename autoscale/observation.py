"""What many steps of one engine add up to: the message that a shard sends to the controller.

Owns sums only, never ratios, so observations of several engines can be added. No torch, no Ray.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from engine.step import StepStats


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


class Aggregator:
    """Collects step stats between two reports. `add` and `take` may run in different threads."""

    def __init__(self) -> None:
        self._stats: deque[StepStats] = deque()

    def add(self, stats: StepStats) -> None:
        self._stats.append(stats)

    def take(self) -> Observation:
        """Everything since the last call."""
        taken = []
        while self._stats:
            taken.append(self._stats.popleft())
        return summarise(taken)


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
