"""One target forward over committed and drafted tokens, and which of the drafted ones stand.

Owns the acceptance rules and the integers of the forward. The forward itself is injected, so the same code verifies
with a sharded model or with a law of ten tokens in a test. Three rules, all exact:

    greedy      the target's most likely token is a function of the context; a draft token stands if it is that token
    coupled     seeded requests: the target's token is a function of (context, stream, position), drawn by Gumbel noise
                that the draft shares (Daliri, Musco, Suresh 2024); a draft token stands if it is that token. The output
                cannot depend on the draft at all, which is why equal seeds give equal text at every K.
    rejection   accept with probability min(1, p/q), else draw from max(p - q, 0) (Leviathan et al. 2023, alg. 1)
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from msgspec.structs import replace

from engine.core.acceptance import _compare, _Job, _reject_all, _target_choices, _with_prompt
from engine.core.packing import Forward, pack_step, prompt_rows
from engine.core.step import Batch, Draft, Features, RowVerdict, Span, Verdict
from engine.sampling.logits_processor import BatchLogitsProcessor
from engine.sampling.logprobs import score


class Verifier:
    """Phase three of the step.

    Args:
        forward: the target.
        block_size: tokens per KV block.
    """

    def __init__(self, forward: Forward, *, block_size: int) -> None:
        self._forward = forward
        self._block_size = block_size

    def verify(self, batch: Batch, draft: Draft) -> Verdict:
        """Run the target once and judge every draft.

        Raises:
            ShardDown: when a target shard does not answer.
        """
        begin = time.perf_counter()
        forward_input = pack_step(batch, draft, self._block_size)
        result = self._forward(forward_input)
        forwarded = time.perf_counter()
        rows = accept_or_reject(result.require_logits(), batch.spans, draft)
        features = Features(result.hidden, forward_input.q_lens) if result.hidden is not None else None
        sample_s = time.perf_counter() - forwarded
        return Verdict(rows, verify_s=forwarded - begin, sample_s=sample_s, features=features)


@torch.inference_mode()
def accept_or_reject(logits: torch.Tensor, spans: Sequence[Span], draft: Draft) -> tuple[RowVerdict, ...]:
    """Apply each request's rules and its acceptance rule to its rows.

    Args:
        logits: [R, V] float32, changed in place; for each span the rows that score its prompt, then, if it samples,
            len(draft) + 1 rows.
    """
    jobs: list[_Job] = []
    prompts: list[tuple[int, range]] = []  # span index, its logit rows
    first = 0
    for index, span in enumerate(spans):
        scored = range(first, first + len(prompt_rows(span)))
        first = scored.stop
        if scored:
            prompts.append((index, scored))
        if span.samples:
            rows = range(first, first + len(draft.rows[index].token_ids) + 1)
            jobs.append(_Job(index, span, draft.rows[index], rows, span.request.row_sampling))
            first = rows.stop
    verdicts = _score_prompts(logits, spans, prompts)
    reported = [job for job in jobs if job.span.request.submit.sampling.num_logprobs is not None]
    own = logits[[row for job in reported for row in job.rows]] if reported else logits[:0]
    _shape(logits, jobs)
    by_choice = [job for job in jobs if job.by_choice]
    tokens = _target_choices(logits, by_choice)
    for job in by_choice:
        verdict = _compare(job.drafted.token_ids, tokens[: len(job.rows)])
        verdicts[job.index] = _with_prompt(verdict, verdicts[job.index])
        tokens = tokens[len(job.rows) :]
    _reject_all(logits, [job for job in jobs if not job.by_choice], draft.vocab, verdicts)
    _report(own, reported, verdicts)
    return tuple(verdicts)


def _shape(logits: torch.Tensor, jobs: Sequence[_Job]) -> None:
    """Penalties and grammar at every position, as they would be if the drafts before it stood."""
    batch_processor = BatchLogitsProcessor()
    for job in jobs:
        logits_processor = job.span.request.logits_processor
        if logits_processor is None:
            continue
        logits_processor.follow(job.span.request.tokens)
        num_tokens = logits_processor.num_tokens
        batch_processor.add(job.rows.start, logits_processor)
        for row, token in zip(job.rows[1:], job.drafted.token_ids, strict=True):
            if not logits_processor.push(token):
                break  # it will be rejected, so what follows is never reached
            batch_processor.add(row, logits_processor)
        logits_processor.rewind(num_tokens)
    batch_processor.apply(logits)


def _score_prompts(
    logits: torch.Tensor, spans: Sequence[Span], prompts: Sequence[tuple[int, range]]
) -> list[RowVerdict]:
    """Empty verdicts that carry what was asked about the prompts."""
    verdicts = [RowVerdict()] * len(spans)
    rows = [row for _, scored in prompts for row in scored]
    tokens: list[int] = []
    num_top: list[int] = []
    for index, scored in prompts:
        request = spans[index].request
        first = prompt_rows(spans[index]).start + 1
        tokens += request.submit.prompt[first : first + len(scored)]
        num_top += [request.submit.sampling.num_prompt_logprobs or 0] * len(scored)
    logprobs = score(logits, rows, tokens, num_top)
    for index, scored in prompts:
        verdicts[index] = RowVerdict(prompt_logprobs=tuple(logprobs[: len(scored)]))
        logprobs = logprobs[len(scored) :]
    return verdicts


def _report(logits: torch.Tensor, jobs: Sequence[_Job], verdicts: list[RowVerdict]) -> None:
    """Add log-probabilities of the emitted tokens.

    Args:
        logits: the rows of these jobs, one after the other, as the model gave them.
    """
    rows: list[int] = []
    tokens: list[int] = []
    num_top: list[int] = []
    first = 0
    for job in jobs:
        emitted = verdicts[job.index].token_ids
        rows += range(first, first + len(emitted))
        tokens += emitted
        num_top += [job.span.request.submit.sampling.num_logprobs or 0] * len(emitted)
        first += len(job.rows)
    logprobs = score(logits, rows, tokens, num_top)
    for job in jobs:
        num = len(verdicts[job.index].token_ids)
        verdicts[job.index] = replace(verdicts[job.index], logprobs=tuple(logprobs[:num]))
        logprobs = logprobs[num:]
