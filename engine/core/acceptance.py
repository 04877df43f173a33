"""The acceptance rules: from the target's logits of drafted spans to accepted tokens and the token after them.

Owns the two implementations, which give equal results. `accept_all` treats all spans together on the device of the
logits and reads nothing back; a GPU uses it. `accept_each` decides one span after the other on the host, in the order
of the paper; a CPU uses it. Both take logits that penalties and grammars have changed already. Three exact rules:

    greedy      The target's most likely token is a function of the context. A draft token is accepted if it is that
                token.
    coupled     For seeded requests the target's token is a function of (context, stream, position), drawn with Gumbel
                noise that the draft shares (Daliri, Musco, Suresh 2024). A draft token is accepted if it is that token.
                The output does not depend on the draft, so equal seeds give equal text at every K.
    rejection   A draft token is accepted with probability min(1, p / q). After a rejection the token is drawn from
                max(p - q, 0) (Leviathan et al. 2023, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from msgspec import Struct

from engine.core.step import DeviceDrafts, DraftRow, Span
from engine.sampling.distribution import (
    Purpose,
    draw,
    gumbel,
    gumbel_of_words,
    most_likely,
    seed_words,
    stream_seed,
    uniform,
    warp,
)
from engine.sampling.rejection import DraftProbs, DraftTable, Outcome, compare, reject
from engine.sampling.row_sampling import RowSampling
from engine.sampling.staging import to_device

AcceptanceKind = Literal["auto", "together", "each"]
"""`together`: `accept_all`. `each`: `accept_each`. `auto`: `together` on a GPU, `each` on a CPU."""


class SampledSpan(Struct, frozen=True, gc=False):
    """One span that yields tokens, with its draft and its logit rows."""

    index: int
    """Index of the span in the batch."""
    span: Span
    draft_row: DraftRow
    rows: range
    """Its logit rows: one per draft token, then one more."""
    sampling: RowSampling

    @property
    def by_choice(self) -> bool:
        """Whether the target's token is a function of context and stream, so that drafts are only compared with it."""
        return self.sampling.greedy or self.sampling.coupled

    @property
    def position(self) -> int:
        """Position of the first draft token in the request."""
        return len(self.span.request.tokens)


def draft_table(
    spans: Sequence[SampledSpan], device: torch.device, on_device: DeviceDrafts | None = None
) -> DraftTable:
    """The draft tokens of the spans; `first_rows` counts the rows of these spans only, one span after the other."""
    lengths = np.array([span.draft_row.num_tokens for span in spans], dtype=np.int64)
    token_ids = np.full((len(spans), int(lengths.max(initial=0))), -1, dtype=np.int64)
    first_rows = np.cumsum(lengths + 1) - (lengths + 1)
    for row, span in enumerate(spans):
        if not span.draft_row.num_on_device:
            token_ids[row, : lengths[row]] = span.draft_row.token_ids
    if on_device is None:
        return DraftTable(*to_device([token_ids, lengths, first_rows], device))
    places = np.full(token_ids.shape, -1, dtype=np.int64)
    for row, span in enumerate(spans):
        first = span.draft_row.device_row * on_device.token_ids.shape[1]
        places[row, : span.draft_row.num_on_device] = range(first, first + span.draft_row.num_on_device)
    table, place, *rest = to_device([token_ids, places, lengths, first_rows], device)
    drafted = on_device.token_ids.view(-1)[place.clamp(min=0)]
    return DraftTable(torch.where(place >= 0, drafted, table), *rest)


def accept_all(
    logits: torch.Tensor,
    spans: Sequence[SampledSpan],
    vocab: torch.Tensor | None,
    on_device: DeviceDrafts | None = None,
    found: torch.Tensor | None = None,
) -> Outcome:
    """Apply the rules to all spans together, without a read from the device.

    Args:
        logits: [R, V] float32.
        spans: the spans; those that are `by_choice` come first.
        vocab: [draft_vocab] int64 target token id of each column of the draft's probabilities, or None.
        on_device: the draft tokens that only the device has.
        found: [R] int64 column of the largest logit of each row, if it has been found already.

    Returns:
        The outcome of each span, on the device of the logits.
    """
    num_choices = sum(span.by_choice for span in spans)
    outcomes = []
    if num_choices > 0:
        group = spans[:num_choices]
        choices = _target_choices(_rows_of(logits, group), group, None if found is None else _rows_of(found, group))
        outcomes.append(compare(choices, draft_table(group, logits.device, on_device)))
    if num_choices < len(spans):
        outcomes.append(_reject_all(logits, spans[num_choices:], vocab, on_device))
    if len(outcomes) == 1:
        return outcomes[0]
    return Outcome(
        torch.cat([outcome.num_accepted for outcome in outcomes]),
        torch.cat([outcome.last_token for outcome in outcomes]),
    )


def _rows_of(values: torch.Tensor, spans: Sequence[SampledSpan]) -> torch.Tensor:
    """The values of the logit rows of these spans, one span after the other."""
    rows = [row for span in spans for row in span.rows]
    if rows == list(range(len(values))):
        return values
    (index,) = to_device([np.array(rows, dtype=np.int64)], values.device)
    return values.index_select(0, index)


def _target_choices(
    logits: torch.Tensor, spans: Sequence[SampledSpan], found: torch.Tensor | None = None
) -> torch.Tensor:
    """[R] int64: the target's token of each row of greedy and coupled spans.

    Args:
        logits: [R, V] of these spans.
        spans: greedy and coupled ones.
        found: [R] int64 column of the largest logit of each row; None searches for it.
    """
    coupled: list[int] = []
    samplings: list[RowSampling] = []
    seeds: list[int] = []
    first = 0
    for span in spans:
        if not span.sampling.greedy:
            coupled += range(first, first + len(span.rows))
            samplings += [span.sampling] * len(span.rows)
            seeds += [_seed(span, offset, Purpose.TOKEN) for offset in range(len(span.rows))]
        first += len(span.rows)
    if not coupled:
        return most_likely(logits) if found is None else found
    index, words = to_device([np.array(coupled, dtype=np.int64), seed_words(seeds)], logits.device)
    all_coupled = len(coupled) == len(logits)
    probs = warp(logits if all_coupled else logits.index_select(0, index), samplings)
    drawn = draw(probs, gumbel_of_words(words, torch.arange(probs.shape[-1], device=probs.device)))
    if all_coupled:
        return drawn
    return (most_likely(logits) if found is None else found).index_copy(0, index, drawn)


def _reject_all(
    logits: torch.Tensor, spans: Sequence[SampledSpan], vocab: torch.Tensor | None, on_device: DeviceDrafts | None
) -> Outcome:
    """Rejection sampling over all spans that use it."""
    drafts = draft_table(spans, logits.device, on_device)
    max_k = drafts.token_ids.shape[1]
    uniforms = np.zeros((len(spans), max_k))
    seeds = np.zeros((len(spans), max_k + 1), dtype="<u8")
    rows = np.zeros((len(spans), max_k), dtype=np.int64)
    from_q = np.zeros(len(spans), dtype=bool)
    values: list[torch.Tensor] = []
    num_values = 0
    in_place = on_device is not None and all(
        span.draft_row.num_on_device > 0 for span in spans if span.draft_row.probs is not None
    )
    for index, span in enumerate(spans):
        k = span.draft_row.num_tokens
        for offset in range(k):
            uniforms[index, offset] = uniform(_seed(span, offset, Purpose.ACCEPT))
            seeds[index, offset] = _seed(span, offset, Purpose.RECOVER)
        seeds[index, k] = _seed(span, k, Purpose.TOKEN)
        if span.draft_row.probs is not None and k > 0:
            from_q[index] = True
            if on_device is not None and in_place:
                first = span.draft_row.device_row * on_device.probs.shape[1]
                rows[index, :k] = range(first, first + k)
                continue
            rows[index, :k] = range(num_values, num_values + k)
            values.append(span.draft_row.probs[:k])
            num_values += k
    words = seed_words(seeds.reshape(-1).tolist()).reshape(*seeds.shape, 2)
    uniform_rows, word_rows, q_rows, drafted_from_q = to_device([uniforms, words, rows, from_q], logits.device)
    stacked = None
    if on_device is not None and in_place and from_q.any():
        stacked = on_device.probs.flatten(0, 1)  # q is read where the draft wrote it.
    elif values:
        stacked = values[0] if len(values) == 1 else torch.cat(values)
    target_probs = warp(_rows_of(logits, spans), [span.sampling for span in spans for _ in span.rows])
    return reject(target_probs, drafts, DraftProbs(stacked, q_rows, drafted_from_q, vocab), uniform_rows, word_rows)


def _seed(span: SampledSpan, offset: int, purpose: Purpose) -> int:
    sampling = span.sampling
    return stream_seed(sampling.stream_key, span.position + offset, purpose, sampling.attempt)


def accept_each(logits: torch.Tensor, spans: Sequence[SampledSpan], vocab: torch.Tensor | None) -> Outcome:
    """The twin of `accept_all`, for drafts that the host has: decides one span after the other. Same result.

    It reads the device several times per span, and stops at the first rejection. On a CPU that is faster, because the
    rows of one span stay in the cache of the processor.
    """
    num_choices = sum(span.by_choice for span in spans)
    found: list[tuple[int, int]] = []
    if num_choices > 0:
        group = spans[:num_choices]
        choices = _target_choices(_rows_of(logits, group), group).tolist()
        for span in group:
            found.append(_first_difference(span.draft_row.token_ids, choices))
            choices = choices[len(span.rows) :]
    if num_choices < len(spans):
        group = spans[num_choices:]
        probs = warp(_rows_of(logits, group), [span.sampling for span in group for _ in span.rows])
        for span in group:
            found.append(_reject_one(probs[: len(span.rows)], span, vocab))
            probs = probs[len(span.rows) :]
    num_accepted, last_tokens = zip(*found, strict=True)
    return Outcome(torch.tensor(num_accepted, device=logits.device), torch.tensor(last_tokens, device=logits.device))


def _reject_one(target_probs: torch.Tensor, span: SampledSpan, vocab: torch.Tensor | None) -> tuple[int, int]:
    """Number of accepted draft tokens and the token after them, by rejection sampling.

    Args:
        target_probs: [k + 1, V] p.
        span: the span.
        vocab: target token ids of q's columns.
    """
    drafted = span.draft_row.token_ids
    for j, token in enumerate(drafted):
        p, q = target_probs[j], _draft_probs(span.draft_row, j, vocab, target_probs[j])
        if uniform(_seed(span, j, Purpose.ACCEPT)) * float(q[token]) < float(p[token]):
            continue
        residual = (p - q).clamp_(min=0.0)
        if not residual.any():  # p equals q but for rounding
            residual = p
        return j, _draw(residual, span, j, Purpose.RECOVER)
    return len(drafted), _draw(target_probs[-1], span, len(drafted), Purpose.TOKEN)


def _first_difference(drafted: Sequence[int], choices: Sequence[int]) -> tuple[int, int]:
    """How many draft tokens equal the target's choices, and the choice after them."""
    number = 0
    while number < len(drafted) and drafted[number] == choices[number]:
        number += 1
    return number, choices[number]


def _draft_probs(draft_row: DraftRow, j: int, vocab: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """q of draft token j over the target's vocabulary, [V] float32."""
    q = torch.zeros_like(like)
    if draft_row.probs is None:
        q[draft_row.token_ids[j]] = 1.0
    elif vocab is None:
        q[: draft_row.probs.shape[-1]] = draft_row.probs[j, : len(q)]
    else:
        q[vocab] = draft_row.probs[j]
    return q


def _draw(weights: torch.Tensor, span: SampledSpan, offset: int, purpose: Purpose) -> int:
    """One token from weights [V]."""
    noise = gumbel([_seed(span, offset, purpose)], torch.arange(len(weights), device=weights.device))
    return int(draw(weights.unsqueeze(0), noise))
