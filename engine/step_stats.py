"""What one step did, counted once, for the pacer, the controller and the metrics."""

from __future__ import annotations

from collections.abc import Sequence

from engine.request import Delta
from engine.step import Batch, Draft, RowOutcome, StepStats, Verdict


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
    width = max((len(row.token_ids) for row in draft.rows), default=0)
    accepted, reached = [0] * width, [0] * width
    k_by_reason: dict[str, int] = {}
    accepted_means = []
    outcomes: list[RowOutcome] = []
    num_prefill = 0
    for span, drafted, row in zip(batch.spans, draft.rows, verdict.rows, strict=True):
        num_prefill += span.num_tokens if span.num_tokens > 1 else 0
        for j in range(min(row.num_accepted + 1, len(drafted.token_ids))):
            reached[j] += 1
            accepted[j] += j < row.num_accepted
        if span.samples:
            k_by_reason[drafted.reason] = k_by_reason.get(drafted.reason, 0) + 1
        request = span.request
        if drafted.token_ids:
            outcomes.append(
                RowOutcome(
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
            )
        if request.finish_reason is not None and request.num_draft_steps:
            accepted_means.append(request.num_accepted / request.num_draft_steps)
    return StepStats(
        step_id=batch.step_id,
        num_decodes=sum(span.num_tokens == 1 for span in batch.spans),
        num_prefill_tokens=num_prefill,
        num_waiting=batch.num_waiting,
        num_rows=sum(span.num_tokens for span in batch.spans) + sum(len(row.token_ids) for row in draft.rows),
        context_len=sum(span.start for span in batch.spans),
        num_drafted=sum(len(row.token_ids) for row in draft.rows),
        num_accepted=sum(row.num_accepted for row in verdict.rows),
        num_emitted=sum(len(delta.token_ids) for delta in deltas),
        accepted_by_position=tuple(accepted),
        drafted_by_position=tuple(reached),
        depth=width,
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
