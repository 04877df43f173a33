"""What one step did, counted once, for the pacer, the controller and the metrics."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from engine.core.step import Batch, Draft, DraftRow, DraftSource, RowVerdict, Span, Verdict
from engine.messages import Delta, WorkloadClass


def step_stats(
    batch: Batch,
    draft: Draft,
    verdict: Verdict,
    deltas: Sequence[Delta],
    *,
    aborted: Sequence[int] = (),
    schedule_s: float,
    step_s: float,
) -> StepStats:
    """Count what a step did. Positions after a rejection were never reached and count as neither.

    Args:
        aborted: keys of requests that were aborted since the step before.
    """
    accepted, reached = _by_position(draft, verdict)
    num_decodes = num_prompt = context_len = num_drafted = num_accepted = 0
    k_by_reason: dict[str, int] = {}
    outcomes: list[RowOutcome] = []
    accepted_means: list[float] = []
    ended = list(aborted)
    for span, drafted, row in zip(batch.spans, draft.rows, verdict.rows, strict=True):
        request, length = span.request, len(drafted.token_ids)
        if span.num_tokens == 1:
            num_decodes += 1
        else:
            num_prompt += span.num_tokens
        context_len += span.start
        if span.samples:
            k_by_reason[drafted.reason] = k_by_reason.get(drafted.reason, 0) + 1
        if length:
            num_drafted += length
            num_accepted += row.num_accepted
            outcomes.append(_outcome(span, drafted, row))
        if request.finish_reason is not None:
            ended.append(request.key)
            if request.num_draft_steps:
                accepted_means.append(request.num_accepted / request.num_draft_steps)
    return StepStats(
        step_id=batch.step_id,
        num_decodes=num_decodes,
        num_prefill_tokens=num_prompt,
        num_waiting=batch.num_waiting,
        num_rows=num_decodes + num_prompt + num_drafted,
        context_len=context_len,
        num_drafted=num_drafted,
        num_accepted=num_accepted,
        num_emitted=sum(len(delta.token_ids) for delta in deltas),
        accepted_by_position=accepted,
        drafted_by_position=reached,
        depth=len(reached),
        k_by_reason=k_by_reason,
        outcomes=tuple(outcomes),
        num_caught_up=draft.num_caught_up,
        ended=tuple(ended),
        accepted_per_finished=tuple(accepted_means),
        schedule_s=schedule_s,
        draft_s=draft.draft_s,
        handoff_s=draft.handoff_s,
        verify_s=verdict.verify_s,
        sample_s=verdict.sample_s,
        step_s=step_s,
    )


def _by_position(draft: Draft, verdict: Verdict) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draft tokens accepted, and reached, at each position up to the longest draft."""
    width = max((len(row.token_ids) for row in draft.rows), default=0)
    accepted, reached = [0] * width, [0] * width
    for drafted, row in zip(draft.rows, verdict.rows, strict=True):
        for j in range(min(row.num_accepted + 1, len(drafted.token_ids))):
            reached[j] += 1
            accepted[j] += j < row.num_accepted
    return tuple(accepted), tuple(reached)


def _outcome(span: Span, drafted: DraftRow, row: RowVerdict) -> RowOutcome:
    request = span.request
    return RowOutcome(
        request.key,
        num_drafted=len(drafted.token_ids),
        num_accepted=row.num_accepted,
        num_tokens=len(request.tokens),
        workload=request.submit.sampling.workload,
        source=drafted.source,
        match_len=drafted.match_len,
        num_asked=span.k if span.exit_threshold > 0 and drafted.confidences else 0,
        confidences=drafted.confidences,
    )


class RowOutcome(Struct, frozen=True, gc=False):
    """What became of one request's draft."""

    key: int
    num_drafted: int
    num_accepted: int
    num_tokens: int
    """Committed tokens of the request after the step."""
    workload: WorkloadClass = "greedy"
    num_asked: int = 0
    """Draft tokens that were asked for where the draft could stop before, as `exit_threshold` says; else 0."""
    confidences: tuple[float, ...] = ()
    """Of the drafted tokens, as in DraftRow."""
    source: DraftSource = "method"
    match_len: int = 0
    """As in DraftRow."""


class StepStats(Struct, frozen=True, kw_only=True, gc=False):
    """What one step did and cost. Filled by the engine, read by the controller and the metrics."""

    step_id: int
    num_decodes: int
    num_prefill_tokens: int
    num_waiting: int
    num_rows: int
    context_len: int
    """Sum over spans of cached tokens."""
    num_drafted: int
    num_accepted: int
    num_emitted: int
    accepted_by_position: tuple[int, ...]
    drafted_by_position: tuple[int, ...]
    """Positions that were reached: those after a rejection are not counted."""
    depth: int
    """Longest draft of the step."""
    k_by_reason: dict[str, int]
    """Spans that sample, by the reason of their K."""
    outcomes: tuple[RowOutcome, ...]
    """Of every request that was drafted for."""
    num_caught_up: int
    """Committed tokens the draft had to read."""
    ended: tuple[int, ...]
    """Keys of requests that finished in this step, or were aborted since the one before."""
    accepted_per_finished: tuple[float, ...]
    """Of each request that finished in this step and was drafted for: accepted tokens per step that drafted."""
    schedule_s: float
    draft_s: float
    """Computing in the draft; 0 when it was not asked."""
    handoff_s: float
    verify_s: float
    sample_s: float
    step_s: float
