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
from engine.errors import InvalidRequest
from engine.grammar import Grammars, Matcher
from engine.packing import Forward, SpanRows, pack_spans
from engine.penalties import TokenOptions
from engine.rules import Columns, Rules, Shaper
from engine.sampling import Law, Purpose, draw, gumbel, stream_seed, warp


@dataclass(slots=True, eq=False)
class _Sequence:
    """What the draft knows of one request."""

    key: int
    tokens: list[int] = field(default_factory=list)
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    options: TokenOptions | None = None
    rules: Rules | None = None
    """Of `options`, once its grammar is compiled."""


@dataclass(slots=True, eq=False)
class _Drafting:
    """One order row on its way to an answer."""

    place: int
    order: OrderRow
    sequence: _Sequence
    law: Law
    k: int
    """Tokens to draft; less than the order's when the text ends before."""
    token_ids: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)

    @property
    def waits_for_grammar(self) -> bool:
        return self.sequence.options is not None and self.sequence.rules is None

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
        grammars: compiles what answers must match; None drafts nothing for such requests.
    """

    def __init__(
        self,
        forward: Forward,
        pool: BlockPool,
        *,
        vocab: torch.Tensor | None,
        max_model_len: int,
        grammars: Grammars | None = None,
    ) -> None:
        self._forward = forward
        self._pool = pool
        self._vocab = vocab
        self._columns = Columns(vocab) if vocab is not None else None
        self._grammars = grammars
        self._max_model_len = max_model_len
        self._sequences: dict[int, _Sequence] = {}

    @torch.inference_mode()
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
            try:
                ready = self._is_ready(sequence)
            except InvalidRequest:
                self._drop(order.key)
                answers[place] = AnswerRow(reason="options")
                continue
            drafting.append(_Drafting(place, order, sequence, _law(order), order.k if ready else 0))
        logits = self._extend(drafting)
        for sequence in (row.sequence for row in drafting):
            self._pool.register(sequence)
        self._run_ahead([row for row in drafting if row.k > 0], logits, probs)
        for row in drafting:
            answers[row.place] = AnswerRow(
                tuple(row.token_ids),
                tuple(row.confidences),
                row.samples_from_q,
                "catch_up" if row.waits_for_grammar else "plan",
            )
        return tuple(answers)

    def _is_ready(self, sequence: _Sequence) -> bool:
        """Whether it can be drafted for now; its rules stand at its last token then.

        Raises:
            InvalidRequest: its grammar cannot be followed here.
        """
        options = sequence.options
        if options is None:
            return True
        if sequence.rules is None:
            matcher = None
            if options.grammar is not None:
                if self._grammars is None:
                    raise InvalidRequest("grammar: this draft has no tokenizer to compile it with")
                compiled = self._grammars.poll(options.grammar)
                if compiled is None:
                    return False
                matcher = Matcher(compiled, options.stop_token_ids)
            sequence.rules = Rules(options, matcher)
        sequence.rules.follow(sequence.tokens)
        return sequence.rules.num_tokens == len(sequence.tokens)

    def _follow(self, order: OrderRow) -> _Sequence | None:
        """Bring a sequence to the order's committed tokens and reserve blocks; None when there is no memory."""
        if order.start == 0:
            self._drop(order.key)
        sequence = self._sequences.get(order.key)
        if sequence is None and order.start > 0:
            return None  # told to go on with something it does not have; it will be told from the start
        if sequence is None:
            sequence = self._sequences[order.key] = _Sequence(order.key, options=order.options)
        guessed = sequence.tokens[order.start :]
        agreed = 0
        while agreed < min(len(guessed), len(order.feed)) and guessed[agreed] == order.feed[agreed]:
            agreed += 1
        if sequence.rules is not None:
            sequence.rules.rewind(order.start)
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
            wanted = 1 if row.k > len(row.token_ids) else 0
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
            shaper = Shaper(self._columns)
            for index, row in enumerate(active):
                if row.sequence.rules is not None:
                    shaper.add(index, row.sequence.rules)
            shaper.apply(logits)
            if shaper.can_exclude_all:
                active, logits = _going_on(active, logits)
            if active:
                self._choose(active, logits, probs)
            active = [row for row in active if len(row.token_ids) < row.k]
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
            rules = row.sequence.rules
            if rules is not None and (not rules.push(token) or rules.has_ended):
                row.k = len(row.token_ids)

    def _seed(self, row: _Drafting) -> int:
        purpose = Purpose.TOKEN if row.law.coupled else Purpose.DRAFT
        return stream_seed(row.law.stream_key, len(row.sequence.tokens), purpose, row.law.attempt)


def _going_on(active: list[_Drafting], logits: torch.Tensor) -> tuple[list[_Drafting], torch.Tensor]:
    """The rows for which the draft knows a token that the rules allow; the others have drafted all they can."""
    possible = torch.isfinite(logits.amax(dim=-1)).tolist()
    if all(possible):
        return active, logits
    kept = [index for index, is_possible in enumerate(possible) if is_possible]
    return [active[index] for index in kept], logits[kept]


def _law(order: OrderRow) -> Law:
    return Law(
        *(order.temperature, order.top_p, order.stream_key, order.attempt, order.coupled), order.top_k, order.min_p
    )
