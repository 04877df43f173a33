"""Builds the statistics of a step for tests."""

from __future__ import annotations

from engine.core.stats import RowOutcome, StepStats


def make_step(outcomes: list[tuple[int, int]], plain: int, reason: str = "plan", step_s: float = 0.03) -> StepStats:
    """A decode step.

    Args:
        outcomes: (drafted, accepted) tokens of each request with a draft.
        plain: number of requests without a draft.
        reason: reason of their K.
        step_s: seconds of the step.
    """
    depth = max((drafted for drafted, _ in outcomes), default=0)
    accepted = [sum(j < a for _, a in outcomes) for j in range(depth)]
    reached = [sum(j < min(a + 1, d) for d, a in outcomes) for j in range(depth)]
    reasons = {"plan": len(outcomes)} if outcomes else {}
    if plain:
        reasons[reason] = reasons.get(reason, 0) + plain
    num_accepted = sum(a for _, a in outcomes)
    return StepStats(
        step_id=1,
        num_decodes=len(outcomes) + plain,
        num_prefill_tokens=0,
        num_waiting=0,
        num_rows=len(outcomes) + plain + sum(d for d, _ in outcomes),
        context_len=100,
        num_drafted=sum(d for d, _ in outcomes),
        num_accepted=num_accepted,
        num_emitted=num_accepted + len(outcomes) + plain,
        accepted_by_position=tuple(accepted),
        drafted_by_position=tuple(reached),
        depth=depth,
        k_by_reason=reasons,
        outcomes=tuple(RowOutcome(key, d, a, 10) for key, (d, a) in enumerate(outcomes)),
        num_caught_up=0,
        ended=(),
        accepted_per_finished=(),
        schedule_s=0.001,
        draft_s=0.002 if outcomes else 0.0,
        handoff_s=0.0005 if outcomes else 0.0,
        verify_s=0.02,
        sample_s=0.001,
        step_s=step_s,
    )
