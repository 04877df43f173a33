"""Applies verdicts: appends tokens, finishes requests, and gives back the blocks of rejected drafts.

Owns every change of a request's tokens and of the number of its computed tokens. State advances per emitted token, in
order, so that nothing after a stop token reaches tokens, log-probabilities or counts. Knows no logits and no draft
probabilities.
"""

from __future__ import annotations

from collections.abc import Container

from engine.core.block_pool import BlockPool
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.core.step import Batch, Draft, DraftRow, RowVerdict, Span, Verdict
from engine.messages import Delta, FinishReason, VerifiedTree
from engine.tree import branches


class Committer:
    """Phase four of the step.

    Args:
        pool: the target's KV blocks; trimmed to the accepted tokens.
        scheduler: removes requests that finish.
        max_model_len: longest prompt + output, tokens.
    """

    def __init__(self, pool: BlockPool, scheduler: Scheduler, *, max_model_len: int) -> None:
        self._pool = pool
        self._scheduler = scheduler
        self._max_model_len = max_model_len

    def commit(self, batch: Batch, draft: Draft, verdict: Verdict) -> tuple[Delta, ...]:
        """Apply a verdict.

        Returns:
            One delta for each span that samples, in the order of the batch.
        """
        deltas = []
        for span, drafted, row in zip(batch.spans, draft.rows, verdict.rows, strict=True):
            span.request.prompt_logprobs += row.prompt_logprobs
            if not span.samples:
                span.request.num_computed = span.start + span.num_tokens
                self._pool.register(span.request)
                continue
            deltas.append(self._commit_row(span, drafted, row))
        return tuple(deltas)

    def _commit_row(self, span: Span, drafted: DraftRow, row: RowVerdict) -> Delta:
        request, num_drafted = span.request, drafted.num_tokens
        is_first = request.num_generated == 0
        emitted = self._append(request, row)
        num_accepted = min(row.num_accepted, len(emitted))
        # KV is valid for the committed rows and for the accepted drafts; the last emitted token has none yet.
        request.num_computed = min(span.start + span.num_tokens + num_accepted, len(request.tokens) - 1)
        request.num_drafted += num_drafted
        request.num_accepted += num_accepted
        request.num_steps += 1
        request.num_draft_steps += num_drafted > 0
        self._pool.register(request)
        if request.finish_reason is None:
            self._pool.trim(request, len(request.tokens))
        else:
            self._scheduler.remove(request)
        return Delta(
            request_id=request.submit.request_id,
            token_ids=tuple(emitted),
            finish_reason=request.finish_reason,
            error="grammar: no token of the model continues the text" if request.finish_reason == "error" else None,
            logprobs=row.logprobs[: len(emitted)],
            prompt_logprobs=tuple(request.prompt_logprobs) if is_first else (),
            num_cached=request.num_cached,
            num_drafted=request.num_drafted,
            num_accepted=request.num_accepted,
            queue_s=request.queue_s,
            num_accepted_now=num_accepted,
            last=row.last if len(emitted) == len(row.token_ids) else None,
            tree=VerifiedTree(drafted.token_ids, drafted.parents, row.path[:num_accepted])
            if branches(drafted.parents)
            else None,
        )

    def _append(self, request: Request, row: RowVerdict) -> list[int]:
        """Append the verdict's tokens up to the one that finishes the request. Returns the appended tokens."""
        emitted: list[int] = []
        for token in row.token_ids:
            if _ends_too_early(request, token):
                request.finish_reason = "error"
                break
            request.tokens.append(token)
            emitted.append(token)
            request.finish_reason = self._finish_reason(request, token)
            if request.finish_reason is not None:
                break
        return emitted

    def _finish_reason(self, request: Request, token: int) -> FinishReason | None:
        sampling = request.submit.sampling
        if token in _stop_token_ids(request):
            return "stop"
        if request.num_generated >= sampling.max_tokens or len(request.tokens) >= self._max_model_len:
            return "length"
        return None


def _stop_token_ids(request: Request) -> Container[int]:
    """Ids of the tokens that end a request. A grammar always has such tokens, even where the request names none."""
    if request.logits_processor is not None and request.logits_processor.matcher is not None:
        return request.logits_processor.matcher.stop_token_ids
    return request.submit.sampling.stop_token_ids


def _ends_too_early(request: Request, token: int) -> bool:
    """Whether a stop token was sampled before the grammar's text is complete, because no other token was allowed."""
    logits_processor = request.logits_processor
    if (
        logits_processor is None
        or logits_processor.matcher is None
        or token not in logits_processor.matcher.stop_token_ids
    ):
        return False
    logits_processor.follow(request.tokens)
    return not logits_processor.matcher.is_complete
