"""TODO caption."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec import Struct
from msgspec.structs import replace

from engine.core.step import DraftRow, RowVerdict, Span
from engine.messages import EmittedKind
from engine.sampling.distribution import Purpose, draw, gumbel, most_likely, stream_seed, uniform, warp
from engine.sampling.row_sampling import RowSampling


class _Job(Struct, frozen=True, gc=False):
    """One span that yields tokens."""

    index: int
    """Of the span."""
    span: Span
    drafted: DraftRow
    rows: range
    """Its logit rows: one per draft token, then one."""
    sampling: RowSampling

    @property
    def by_choice(self) -> bool:
        """Whether the target's token is a function of context and stream, so that drafts need only be compared."""
        return self.sampling.greedy or self.sampling.coupled


def _target_choices(logits: torch.Tensor, jobs: Sequence[_Job]) -> list[int]:
    """The target's token for each row of greedy and coupled spans, one after the other."""
    if not jobs:
        return []
    every = [row for job in jobs for row in job.rows]
    own = logits if len(every) == len(logits) else logits[every]
    choices = most_likely(own)
    sampled: list[int] = []  # indices into `every`
    samplings: list[RowSampling] = []
    seeds: list[int] = []
    offset = 0
    for job in jobs:
        if not job.sampling.greedy:
            sampled += range(offset, offset + len(job.rows))
            samplings += [job.sampling] * len(job.rows)
            seeds += _seeds(job, Purpose.TOKEN)
        offset += len(job.rows)
    if sampled:
        probs = warp(own if len(sampled) == len(own) else own[sampled], samplings)
        noise = gumbel(seeds, torch.arange(probs.shape[-1], device=probs.device))
        choices[sampled] = draw(probs, noise)
    result: list[int] = choices.tolist()
    return result


def _seeds(job: _Job, purpose: Purpose) -> list[int]:
    begin = len(job.span.request.tokens)
    return [
        stream_seed(job.sampling.stream_key, begin + j, purpose, job.sampling.attempt) for j in range(len(job.rows))
    ]


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
    samplings = [job.sampling for job in jobs for _ in job.rows]
    probs = warp(logits if len(every) == len(logits) else logits[every], samplings)
    for job in jobs:
        own, probs = probs[: len(job.rows)], probs[len(job.rows) :]
        verdict = _reject(own, len(job.span.request.tokens), job.sampling, job.drafted, vocab)
        verdicts[job.index] = _with_prompt(verdict, verdicts[job.index])


def _reject(
    target_probs: torch.Tensor, position: int, sampling: RowSampling, drafted: DraftRow, vocab: torch.Tensor | None
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
        accept = uniform(stream_seed(sampling.stream_key, position + j, Purpose.ACCEPT, sampling.attempt))
        if accept * float(q[token]) < float(target_probs[j, token]):
            tokens.append(token)
            continue
        residual = (target_probs[j] - q).clamp_(min=0.0)
        if not residual.any():  # p equals q but for rounding
            residual = target_probs[j]
        tokens.append(_draw_one(residual, position + j, Purpose.RECOVER, sampling))
        return RowVerdict(tuple(tokens), j, "recovered")
    tokens.append(_draw_one(target_probs[k], position + k, Purpose.TOKEN, sampling))
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


def _draw_one(weights: torch.Tensor, position: int, purpose: Purpose, sampling: RowSampling) -> int:
    seed = stream_seed(sampling.stream_key, position, purpose, sampling.attempt)
    noise = gumbel([seed], torch.arange(len(weights), device=weights.device))
    return int(draw(weights.unsqueeze(0), noise))
