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

from engine.packing import Forward, plan_forward
from engine.sampling import Law, Purpose, draw, gumbel, stream_seed, uniform, warp
from engine.step import Batch, Draft, DraftRow, EmittedKind, RowVerdict, Span, Verdict


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


def judge(logits: torch.Tensor, spans: Sequence[Span], draft: Draft) -> tuple[RowVerdict, ...]:
    """Apply each request's rule to its rows.

    Args:
        logits: [R, V] float32; for each sampling span len(draft) + 1 rows, in order.
    """
    verdicts: list[RowVerdict] = [RowVerdict()] * len(spans)
    chosen: list[tuple[int, range, Law]] = []  # span index, its logit rows, its law
    first = 0
    for index, span in enumerate(spans):
        if span.samples:
            rows = range(first, first + len(draft.rows[index].token_ids) + 1)
            chosen.append((index, rows, Law.of(span.request)))
            first = rows.stop
    by_choice = [entry for entry in chosen if entry[2].greedy or entry[2].coupled]
    tokens = _target_choices(logits, [(spans[i], rows, law) for i, rows, law in by_choice])
    for index, rows, _ in by_choice:
        verdicts[index] = _compare(draft.rows[index].token_ids, tokens[: len(rows)])
        tokens = tokens[len(rows) :]
    for index, rows, law in chosen:
        if not (law.greedy or law.coupled):
            probs = warp(logits[rows.start : rows.stop], [law] * len(rows))
            verdicts[index] = _reject(probs, len(spans[index].request.tokens), law, draft.rows[index], draft.vocab)
    return tuple(verdicts)


def _target_choices(logits: torch.Tensor, entries: Sequence[tuple[Span, range, Law]]) -> list[int]:
    """The target's token for each row of greedy and coupled spans, one after the other."""
    if not entries:
        return []
    every = [row for _, rows, _ in entries for row in rows]
    own = logits if len(every) == len(logits) else logits[every]
    choices = own.argmax(dim=-1)
    sampled: list[int] = []  # indices into `every`
    laws: list[Law] = []
    seeds: list[int] = []
    offset = 0
    for span, rows, law in entries:
        if not law.greedy:
            begin = len(span.request.tokens)
            sampled += range(offset, offset + len(rows))
            laws += [law] * len(rows)
            seeds += [stream_seed(law.stream_key, begin + j, Purpose.TOKEN, law.attempt) for j in range(len(rows))]
        offset += len(rows)
    if sampled:
        probs = warp(own if len(sampled) == len(own) else own[sampled], laws)
        noise = gumbel(seeds, torch.arange(probs.shape[-1], device=probs.device))
        choices[sampled] = draw(probs, noise)
    result: list[int] = choices.tolist()
    return result


def _compare(drafted: Sequence[int], choices: Sequence[int]) -> RowVerdict:
    """Drafts stand as long as they are what the target chose."""
    num_accepted = 0
    while num_accepted < len(drafted) and drafted[num_accepted] == choices[num_accepted]:
        num_accepted += 1
    return RowVerdict(tuple(choices[: num_accepted + 1]), num_accepted, _last_kind(len(drafted), num_accepted))


def _last_kind(num_drafted: int, num_accepted: int) -> EmittedKind:
    if num_drafted == 0:
        return "plain"
    return "bonus" if num_accepted == num_drafted else "recovered"


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
