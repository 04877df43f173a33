"""Builds the statistics of a step for tests."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from engine.core.stats import RowOutcome, StepStats

_PLAIN = StepStats(
    step_id=1,
    num_decodes=1,
    num_prefill_tokens=0,
    num_waiting=0,
    num_rows=1,
    context_len=100,
    num_drafted=0,
    num_accepted=0,
    num_emitted=1,
    accepted_by_position=(),
    drafted_by_position=(),
    depth=0,
    k_by_reason={},
    outcomes=(),
    num_caught_up=0,
    ended=(),
    accepted_per_finished=(),
    schedule_s=0.001,
    draft_s=0.0,
    handoff_s=0.0,
    verify_s=0.02,
    sample_s=0.001,
    step_s=0.03,
)


def step_stats(**changes: Any) -> StepStats:
    """A step that decodes one request without a draft, with these fields changed.

    Raises:
        TypeError: a field does not exist.
    """
    return structs.replace(_PLAIN, **changes)


def make_step(outcomes: list[tuple[int, int]], plain: int, reason: str = "plan", step_s: float = 0.03) -> StepStats:
    """A decode step.

    Args:
        outcomes: (drafted, accepted) tokens of each request with a draft.
        plain: number of requests without a draft.
        reason: reason of their K.
        step_s: seconds of the step.
    """
    depth = max((drafted for drafted, _ in outcomes), default=0)
    reasons = {"plan": len(outcomes)} if outcomes else {}
    if plain:
        reasons[reason] = reasons.get(reason, 0) + plain
    num_drafted, num_accepted = sum(d for d, _ in outcomes), sum(a for _, a in outcomes)
    return step_stats(
        num_decodes=len(outcomes) + plain,
        num_rows=len(outcomes) + plain + num_drafted,
        num_drafted=num_drafted,
        num_accepted=num_accepted,
        num_emitted=num_accepted + len(outcomes) + plain,
        accepted_by_position=tuple(sum(j < a for _, a in outcomes) for j in range(depth)),
        drafted_by_position=tuple(sum(j < min(a + 1, d) for d, a in outcomes) for j in range(depth)),
        depth=depth,
        k_by_reason=reasons,
        outcomes=tuple(RowOutcome(key, d, a, 10) for key, (d, a) in enumerate(outcomes)),
        draft_s=0.002 if outcomes else 0.0,
        handoff_s=0.0005 if outcomes else 0.0,
        step_s=step_s,
    )
