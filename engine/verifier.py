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
from msgspec import Struct
from msgspec.structs import replace

from engine.logprobs import prompt_rows, score
from engine.packing import Forward, plan_forward
from engine.request import EmittedKind
from engine.rules import Shaper
from engine.sampling import Law, Purpose, draw, gumbel, most_likely, stream_seed, uniform, warp
from engine.step import Batch, Draft, DraftRow, RowVerdict, Span, Verdict


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
        logits = self._forward(plan_forward(batch, draft, self._block_size))
        forwarded = time.perf_counter()
        rows = judge(logits, batch.spans, draft)
        return Verdict(rows, verify_s=forwarded - begin, sample_s=time.perf_counter() - forwarded)


class _Job(Struct, frozen=True, gc=False):
    """One span that yields tokens."""

    index: int
    """Of the span."""
    span: Span
    drafted: DraftRow
    rows: range
    """Its logit rows: one per draft token, then one."""
    law: Law

    @property
    def by_choice(self) -> bool:
        """Whether the target's token is a function of context and stream, so that drafts need only be compared."""
        return self.law.greedy or self.law.coupled


@torch.inference_mode()
def judge(logits: torch.Tensor, spans: Sequence[Span], draft: Draft) -> tuple[RowVerdict, ...]:
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
            jobs.append(_Job(index, span, draft.rows[index], rows, Law.of(span.request)))
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
    shaper = Shaper()
    for job in jobs:
        rules = job.span.request.rules
        if rules is None:
            continue
        rules.follow(job.span.request.tokens)
        num_tokens = rules.num_tokens
        shaper.add(job.rows.start, rules)
        for row, token in zip(job.rows[1:], job.drafted.token_ids, strict=True):
            if not rules.push(token):
                break  # it will be rejected, so what follows is never reached
            shaper.add(row, rules)
        rules.rewind(num_tokens)
    shaper.apply(logits)


def _target_choices(logits: torch.Tensor, jobs: Sequence[_Job]) -> list[int]:
    """The target's token for each row of greedy and coupled spans, one after the other."""
    if not jobs:
        return []
    every = [row for job in jobs for row in job.rows]
    own = logits if len(every) == len(logits) else logits[every]
    choices = most_likely(own)
    sampled: list[int] = []  # indices into `every`
    laws: list[Law] = []
    seeds: list[int] = []
    offset = 0
    for job in jobs:
        if not job.law.greedy:
            sampled += range(offset, offset + len(job.rows))
            laws += [job.law] * len(job.rows)
            seeds += _seeds(job, Purpose.TOKEN)
        offset += len(job.rows)
    if sampled:
        probs = warp(own if len(sampled) == len(own) else own[sampled], laws)
        noise = gumbel(seeds, torch.arange(probs.shape[-1], device=probs.device))
        choices[sampled] = draw(probs, noise)
    result: list[int] = choices.tolist()
    return result


def _seeds(job: _Job, purpose: Purpose) -> list[int]:
    begin = len(job.span.request.tokens)
    return [stream_seed(job.law.stream_key, begin + j, purpose, job.law.attempt) for j in range(len(job.rows))]


def _compare(drafted: Sequence[int], choices: Sequence[int]) -> RowVerdict:
    """Drafts stand as long as they are what the target chose."""
    num_accepted = 0
    while num_accepted < len(drafted) and drafted[num_accepted] == choices[num_accepted]:
        num_accepted += 1
    return RowVerdict(tuple(choices[: num_accepted + 1]), num_accepted, _last_kind(len(drafted), num_accepted))


def _with_prompt(verdict: RowVerdict, before: RowVerdict) -> RowVerdict:
    """With what has been said about the prompt."""
    return replace(verdict, prompt_logprobs=before.prompt_logprobs) if before.prompt_logprobs else verdict


def _last_kind(num_drafted: int, num_accepted: int) -> EmittedKind:
    if num_drafted == 0:
        return "plain"
    return "bonus" if num_accepted == num_drafted else "recovered"


def _reject_all(
    logits: torch.Tensor, jobs: Sequence[_Job], vocab: torch.Tensor | None, verdicts: list[RowVerdict]
) -> None:
    """Rejection sampling over every span that asks for it."""
    if not jobs:
        return
    every = [row for job in jobs for row in job.rows]
    laws = [job.law for job in jobs for _ in job.rows]
    probs = warp(logits if len(every) == len(logits) else logits[every], laws)
    for job in jobs:
        own, probs = probs[: len(job.rows)], probs[len(job.rows) :]
        verdict = _reject(own, len(job.span.request.tokens), job.law, job.drafted, vocab)
        verdicts[job.index] = _with_prompt(verdict, verdicts[job.index])


def _reject(
    target_probs: torch.Tensor, position: int, law: Law, drafted: DraftRow, vocab: torch.Tensor | None
) -> RowVerdict:
    """Rejection sampling over one span.

    Args:
        target_probs: [k + 1, V] p, warped.
        position: where the first draft token stands.
        drafted: tokens and the laws q they were drawn from.
        vocab: target ids of q's columns.
    """
    k = len(drafted.token_ids)
    tokens: list[int] = []
    for j, token in enumerate(drafted.token_ids):
        q = _draft_probs(drafted, j, vocab, target_probs[j])
        accept = uniform(stream_seed(law.stream_key, position + j, Purpose.ACCEPT, law.attempt))
        if accept * float(q[token]) < float(target_probs[j, token]):
            tokens.append(token)
            continue
        residual = (target_probs[j] - q).clamp_(min=0.0)
        if not residual.any():  # p equals q but for rounding
            residual = target_probs[j]
        tokens.append(_draw_one(residual, position + j, Purpose.RECOVER, law))
        return RowVerdict(tuple(tokens), j, "recovered")
    tokens.append(_draw_one(target_probs[k], position + k, Purpose.TOKEN, law))
    return RowVerdict(tuple(tokens), k, _last_kind(k, k))


def _draft_probs(drafted: DraftRow, j: int, vocab: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """q over the target's vocabulary, [V] float32."""
    q = torch.zeros_like(like)
    if drafted.probs is None:
        q[drafted.token_ids[j]] = 1.0
    elif vocab is None:
        q[: drafted.probs.shape[-1]] = drafted.probs[j, : len(q)]
    else:
        q[vocab] = drafted.probs[j]
    return q


def _draw_one(weights: torch.Tensor, position: int, purpose: Purpose, law: Law) -> int:
    seed = stream_seed(law.stream_key, position, purpose, law.attempt)
    noise = gumbel([seed], torch.arange(len(weights), device=weights.device))
    return int(draw(weights.unsqueeze(0), noise))


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
