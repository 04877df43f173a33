"""What one step did, counted once, for the pacer, the controller and the metrics."""

from __future__ import annotations

from collections.abc import Sequence

from engine.request import Delta
from engine.step import Batch, Draft, DraftRow, RowOutcome, RowVerdict, Span, StepStats, Verdict


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
    k_by_reason: dict[str, int] = {}
    outcomes: list[RowOutcome] = []
    accepted_means = []
    for span, drafted, row in zip(batch.spans, draft.rows, verdict.rows, strict=True):
        if span.samples:
            k_by_reason[drafted.reason] = k_by_reason.get(drafted.reason, 0) + 1
        if drafted.token_ids:
            outcomes.append(_outcome(span, drafted, row))
        request = span.request
        if request.finish_reason is not None and request.num_draft_steps:
            accepted_means.append(request.num_accepted / request.num_draft_steps)
    return StepStats(
        step_id=batch.step_id,
        num_decodes=sum(span.num_tokens == 1 for span in batch.spans),
        num_prefill_tokens=sum(span.num_tokens for span in batch.spans if span.num_tokens > 1),
        num_waiting=batch.num_waiting,
        num_rows=sum(span.num_tokens for span in batch.spans) + sum(len(row.token_ids) for row in draft.rows),
        context_len=sum(span.start for span in batch.spans),
        num_drafted=sum(len(row.token_ids) for row in draft.rows),
        num_accepted=sum(row.num_accepted for row in verdict.rows),
        num_emitted=sum(len(delta.token_ids) for delta in deltas),
        accepted_by_position=accepted,
        drafted_by_position=reached,
        depth=len(reached),
        k_by_reason=k_by_reason,
        outcomes=tuple(outcomes),
        num_fed=draft.num_fed,
        ended=(*aborted, *(span.request.key for span in batch.spans if span.request.finish_reason is not None)),
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
        num_asked=span.k if span.floor > 0 and drafted.confidences else 0,
        confidences=drafted.confidences,
    )
