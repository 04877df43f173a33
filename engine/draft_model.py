"""The draft's own work: keep up with committed tokens, then run ahead of them.

Owns one sequence and its KV blocks per request the target has told it about. Knows orders and answers, not how they
travel. What it drafted and the target then committed keeps its KV; the rest is rolled back when the next order shows
other tokens.

    tokens        c c c c c c | d d d d          c committed (told), d drafted by us
    next order    start ^------ c c r            two d's were accepted, r is the target's own token
    num_computed  kept up to where both agree, then extended
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.block_pool import BlockPool
from engine.draft_protocol import AnswerRow, OrderRow
from engine.packing import Forward, SpanRows, pack_spans
from engine.sampling import Law, Purpose, draw, gumbel, stream_seed, warp


@dataclass(slots=True, eq=False)
class _Sequence:
    """What the draft knows of one request."""

    key: int
    tokens: list[int] = field(default_factory=list)
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Drafting:
    """One order row on its way to an answer."""

    place: int
    order: OrderRow
    sequence: _Sequence
    law: Law
    token_ids: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)

    @property
    def samples_from_q(self) -> bool:
        """Whether the target needs q: only under the rejection rule."""
        return not (self.law.greedy or self.law.coupled)


class DraftModel:
    """Answers orders with a model.

    Args:
        forward: the draft model over its own cache; plan in, logits [R, draft_vocab] float32 out.
        pool: blocks of that cache.
        vocab: [draft_vocab] int64 target ids of the logit columns, or None when column i is token i.
        max_model_len: longest sequence the draft can hold.
    """

    def __init__(self, forward: Forward, pool: BlockPool, *, vocab: torch.Tensor | None, max_model_len: int) -> None:
        self._forward = forward
        self._pool = pool
        self._vocab = vocab
        self._max_model_len = max_model_len
        self._sequences: dict[int, _Sequence] = {}

    def answer(self, rows: Sequence[OrderRow], released: Sequence[int], probs: torch.Tensor) -> tuple[AnswerRow, ...]:
        """Read what is fed, draft what is asked for.

        Args:
            probs: [max_rows, max_k, draft_vocab] float32, where q is written for rows that need it.

        Returns:
            One row per order row.
        """
        for key in released:
            self._drop(key)
        answers = [AnswerRow()] * len(rows)
        drafting: list[_Drafting] = []
        for place, order in enumerate(rows):
            sequence = self._follow(order)
            if sequence is None:
                answers[place] = AnswerRow(reason="memory")
                continue
            law = Law(order.temperature, order.top_p, order.stream_key, order.attempt, order.coupled)
            drafting.append(_Drafting(place, order, sequence, law))
        logits = self._extend(drafting)
        for sequence in (row.sequence for row in drafting):
            self._pool.register(sequence)
        self._run_ahead([row for row in drafting if row.order.k > 0], logits, probs)
        for row in drafting:
            answers[row.place] = AnswerRow(tuple(row.token_ids), tuple(row.confidences), row.samples_from_q)
        return tuple(answers)

    def _follow(self, order: OrderRow) -> _Sequence | None:
        """Bring a sequence to the order's committed tokens and reserve blocks; None when there is no memory."""
        if order.start == 0:
            self._drop(order.key)
        sequence = self._sequences.get(order.key)
        if sequence is None and order.start > 0:
            return None  # told to go on with something it does not have; it will be told from the start
        if sequence is None:
            sequence = self._sequences[order.key] = _Sequence(order.key)
        guessed = sequence.tokens[order.start :]
        agreed = 0
        while agreed < min(len(guessed), len(order.feed)) and guessed[agreed] == order.feed[agreed]:
            agreed += 1
        sequence.tokens[order.start :] = order.feed
        sequence.num_computed = min(sequence.num_computed, order.start + agreed, len(sequence.tokens) - 1)
        if order.start == 0:
            sequence.num_computed = self._pool.attach_prefix(sequence)
        needed = len(sequence.tokens) + max(0, order.k - 1)
        if needed > self._max_model_len or not self._pool.reserve(sequence, needed):
            self._drop(order.key)
            return None
        return sequence

    def _drop(self, key: int) -> None:
        sequence = self._sequences.pop(key, None)
        if sequence is not None:
            self._pool.release(sequence)

    def _extend(self, drafting: Sequence[_Drafting]) -> torch.Tensor | None:
        """One forward over everything not computed yet; logits of the last row of each that drafts, in order."""
        spans = []
        for row in drafting:
            sequence = row.sequence
            wanted = 1 if row.order.k > len(row.token_ids) else 0
            spans.append(
                SpanRows(sequence.tokens[sequence.num_computed :], sequence.num_computed, sequence.block_ids, wanted)
            )
            sequence.num_computed = len(sequence.tokens)
        if not spans:
            return None
        return self._forward(pack_spans(spans, self._pool.block_size))

    def _run_ahead(self, active: list[_Drafting], logits: torch.Tensor | None, probs: torch.Tensor) -> None:
        """Draft one token per row and pass, each row up to its own K."""
        while active and logits is not None:
            self._choose(active, logits, probs)
            active = [row for row in active if len(row.token_ids) < row.order.k]
            logits = self._extend(active) if active else None

    def _choose(self, active: Sequence[_Drafting], logits: torch.Tensor, probs: torch.Tensor) -> None:
        """Append one drafted token to each row.

        Args:
            logits: [len(active), draft_vocab] float32.
        """
        columns = logits.argmax(dim=-1)
        confidences = torch.exp(logits.amax(dim=-1) - logits.logsumexp(dim=-1)).tolist()
        sampled = [index for index, row in enumerate(active) if not row.law.greedy]
        if sampled:
            q = warp(logits[sampled], [active[index].law for index in sampled])
            for index, law in zip(sampled, q, strict=True):
                if active[index].samples_from_q:
                    probs[active[index].place, len(active[index].token_ids)].copy_(law)
            ids = self._vocab if self._vocab is not None else torch.arange(logits.shape[-1], device=logits.device)
            noise = gumbel([self._seed(active[index]) for index in sampled], ids)
            columns[sampled] = draw(q, noise)
        chosen: list[int] = (columns if self._vocab is None else self._vocab[columns]).tolist()
        for row, token, confidence in zip(active, chosen, confidences, strict=True):
            row.token_ids.append(token)
            row.confidences.append(confidence)
            row.sequence.tokens.append(token)

    def _seed(self, row: _Drafting) -> int:
        purpose = Purpose.TOKEN if row.law.coupled else Purpose.DRAFT
        return stream_seed(row.law.stream_key, len(row.sequence.tokens), purpose, row.law.attempt)
