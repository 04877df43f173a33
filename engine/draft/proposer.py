"""The draft's own work: keep up with committed tokens, then run ahead of them.

Owns the sequences the target has told it about, their KV blocks, and how tokens are chosen. Knows orders and answers,
not how they travel, nor what the model is (`engine.draft.architectures`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.core.block_pool import BlockPool
from engine.core.packing import SpanRows, pack_spans
from engine.draft.architectures import Architecture, Outputs
from engine.draft.messages import DraftRequestRow, DraftResponseRow
from engine.draft.sequence import Drafting, DraftSequence
from engine.errors import InvalidRequest
from engine.sampling.distribution import Purpose, draw, gumbel, most_likely, stream_seed, warp
from engine.sampling.grammar import Grammars, Matcher
from engine.sampling.logits_processor import BatchLogitsProcessor, Columns, LogitsProcessor
from engine.sampling.staging import to_host


class DraftModel:
    """Answers orders with a model.

    Args:
        architecture: the model over its own cache.
        pool: blocks of that cache.
        vocab: [draft_vocab] int64 target ids of the logit columns, or None when column i is token i.
        max_model_len: longest sequence the draft can hold.
        grammars: compiles what answers must match; None drafts nothing for such requests.
    """

    def __init__(
        self,
        architecture: Architecture,
        pool: BlockPool,
        *,
        vocab: torch.Tensor | None,
        max_model_len: int,
        grammars: Grammars | None = None,
    ) -> None:
        self._architecture = architecture
        self._pool = pool
        self._vocab = vocab
        self._columns = Columns(vocab) if vocab is not None else None
        self._grammars = grammars
        self._max_model_len = max_model_len
        self._sequences: dict[int, DraftSequence] = {}

    @torch.inference_mode()
    def answer(
        self,
        rows: Sequence[DraftRequestRow],
        released: Sequence[int],
        probs: torch.Tensor,
        features: torch.Tensor | None = None,
    ) -> tuple[DraftResponseRow, ...]:
        """Read what is fed, draft what is asked for.

        Args:
            probs: [max_rows, max_k, draft_vocab] float32, where q is written for rows that need it.
            features: [rows of the ring, width] of the target, for an architecture that reads them.

        Returns:
            One row per order row.
        """
        for key in released:
            self._drop(key)
        answers = [DraftResponseRow()] * len(rows)
        drafting: list[Drafting] = []
        for place, order in enumerate(rows):
            try:
                row = self._take(place, order)
            except InvalidRequest:
                self._drop(order.key)
                answers[place] = DraftResponseRow(reason="options")
                continue
            if row is None:
                answers[place] = DraftResponseRow(reason="memory")
            else:
                drafting.append(row)
        outputs = self._read(drafting, features)
        self._run_ahead([row for row in drafting if row.k > 0], outputs, probs)
        for row in drafting:
            answers[row.place] = DraftResponseRow(
                tuple(row.token_ids), tuple(row.confidences), row.samples_from_q, row.reason
            )
        return tuple(answers)

    def _take(self, place: int, order: DraftRequestRow) -> Drafting | None:
        """Bring the order's sequence to its committed tokens and see what can be done; None when there is no memory.

        Raises:
            InvalidRequest: its grammar cannot be followed here.
        """
        sequence = self._follow(order)
        if sequence is None:
            return None
        unread, places = self._unread(order, sequence)
        num_cells = len(sequence.positions) + len(unread) + max(0, order.k - 1)
        num_tokens = len(sequence.tokens) + max(0, order.k - 1)
        if num_tokens > self._max_model_len or not self._pool.reserve(sequence, num_cells):
            self._drop(order.key)
            return None
        row = Drafting(place, order, sequence, order.sampling, order.k, unread, places)
        if not self._is_ready(sequence):
            row.k = 0
            row.reason = "catch_up" if sequence.logits_processor is None else "plan"
        if not unread or unread[-1] != len(sequence.tokens) - 1:  # no features there: nothing to go on from
            row.k, row.reason = 0, "catch_up"
        return row

    def _is_ready(self, sequence: DraftSequence) -> bool:
        """Whether it can be drafted for now; its rules stand at its last token then.

        Raises:
            InvalidRequest: its grammar cannot be followed here.
        """
        options = sequence.options
        if options is None:
            return True
        if sequence.logits_processor is None:
            matcher = None
            if options.grammar is not None:
                if self._grammars is None:
                    raise InvalidRequest("grammar: this draft has no tokenizer to compile it with")
                compiled = self._grammars.poll(options.grammar)
                if compiled is None:
                    return False
                matcher = Matcher(compiled, options.stop_token_ids)
            sequence.logits_processor = LogitsProcessor(options, matcher)
        sequence.logits_processor.follow(sequence.tokens)
        return sequence.logits_processor.num_tokens == len(sequence.tokens)

    def _follow(self, order: DraftRequestRow) -> DraftSequence | None:
        """The order's sequence with its committed tokens, rolled back to what stays; None when it is not known."""
        keeps_agreed = not self._architecture.reads_features
        if order.start == 0:
            self._drop(order.key)
            first = 0 if keeps_agreed else 1
            self._sequences[order.key] = DraftSequence(order.key, first, options=order.options)
        sequence = self._sequences.get(order.key)
        if sequence is None:
            return None  # told to go on with something it does not have; it will be told from the start
        sequence.follow(order.start, order.new_tokens, keeps_agreed=keeps_agreed)
        if order.start == 0:
            num_found = self._pool.attach_prefix(sequence)
            sequence.positions = list(range(sequence.first, sequence.first + num_found))
        return sequence

    def _unread(self, order: DraftRequestRow, sequence: DraftSequence) -> tuple[Sequence[int], Sequence[int]]:
        """Positions that are to get a cell, and where the features before each are."""
        unread = sequence.unread()
        if not self._architecture.reads_features:
            return unread, ()
        found = [
            (position, place)
            for position, place in enumerate(order.feature_rows, order.start)
            if place >= 0 and position in unread
        ]
        return [position for position, _ in found], [place for _, place in found]

    def _drop(self, key: int) -> None:
        sequence = self._sequences.pop(key, None)
        if sequence is not None:
            self._pool.release(sequence)

    def _read(self, drafting: Sequence[Drafting], features: torch.Tensor | None) -> Outputs | None:
        """One forward over all committed tokens without a cell; outputs of the last of each row that drafts."""
        spans = []
        places: list[int] = []
        for row in drafting:
            if row.unread:
                token_ids = [row.sequence.tokens[position] for position in row.unread]
                spans.append(self._cells(row.sequence, token_ids, row.unread, num_logits=1 if row.k > 0 else 0))
                places += row.places
        if not spans:
            return None
        gathered = None
        if features is not None and self._architecture.reads_features:
            gathered = features.index_select(0, torch.tensor(places, device=features.device))
        outputs = self._architecture.read(pack_spans(spans, self._pool.block_size), gathered)
        for row in drafting:
            if row.sequence.has_no_gap:
                self._pool.register(row.sequence)
        return outputs

    def _cells(
        self, sequence: DraftSequence, token_ids: Sequence[int], positions: Sequence[int], *, num_logits: int
    ) -> SpanRows:
        """The next cells of a sequence, for these tokens."""
        start = len(sequence.positions)
        sequence.positions += positions
        return SpanRows(token_ids, start, sequence.block_ids, num_logits, positions)

    def _run_ahead(self, active: list[Drafting], outputs: Outputs | None, probs: torch.Tensor) -> None:
        """Draft one token per row and pass, each row up to its own K or floor."""
        while active and outputs is not None:
            batch_processor = BatchLogitsProcessor(self._columns)
            for index, row in enumerate(active):
                if row.sequence.logits_processor is not None:
                    batch_processor.add(index, row.sequence.logits_processor)
            batch_processor.apply(outputs.logits)
            if (
                batch_processor.can_exclude_all
            ):  # rows for which the draft knows no token that the rules allow have ended
                possible = torch.isfinite(outputs.logits.amax(dim=-1)).tolist()
                active, outputs = _kept(active, outputs, possible)
            if active:
                self._choose(active, outputs.logits, probs)
            active, outputs = _kept(active, outputs, [row.goes_on for row in active])
            if active:
                outputs = self._go_on(active, outputs.previous_hidden)

    def _go_on(self, active: Sequence[Drafting], previous_hidden: torch.Tensor | None) -> Outputs:
        """One forward over the token that each row drafted last."""
        spans = []
        for row in active:
            tokens = row.sequence.tokens
            spans.append(self._cells(row.sequence, tokens[-1:], (len(tokens) - 1,), num_logits=1))
        return self._architecture.extend(pack_spans(spans, self._pool.block_size), previous_hidden)

    def _choose(self, active: Sequence[Drafting], logits: torch.Tensor, probs: torch.Tensor) -> None:
        """Append one drafted token to each row.

        Args:
            logits: [len(active), draft_vocab] float32.
        """
        columns = most_likely(logits)
        most_confident = logits.softmax(dim=-1).amax(dim=-1)
        sampled = [index for index, row in enumerate(active) if not row.sampling.greedy]
        if sampled:
            q = warp(logits[sampled], [active[index].sampling for index in sampled])
            for index, sampling in zip(sampled, q, strict=True):
                if active[index].samples_from_q:
                    probs[active[index].place, len(active[index].token_ids)].copy_(sampling)
            ids = self._vocab if self._vocab is not None else torch.arange(logits.shape[-1], device=logits.device)
            noise = gumbel([self._seed(active[index]) for index in sampled], ids)
            columns[sampled] = draw(q, noise)
        token_ids = columns if self._vocab is None else self._vocab[columns]
        chosen, confidences = to_host([token_ids, most_confident])
        for row, token, confidence in zip(active, chosen.tolist(), confidences.tolist(), strict=True):
            row.token_ids.append(token)
            row.confidences.append(confidence)
            row.cumulative_confidence *= confidence
            row.sequence.tokens.append(token)
            logits_processor = row.sequence.logits_processor
            if logits_processor is not None and (not logits_processor.push(token) or logits_processor.has_ended):
                row.k = len(row.token_ids)

    def _seed(self, row: Drafting) -> int:
        purpose = Purpose.TOKEN if row.sampling.coupled else Purpose.DRAFT
        return stream_seed(row.sampling.stream_key, len(row.sequence.tokens), purpose, row.sampling.attempt)


def _kept(active: list[Drafting], outputs: Outputs, keep: list[bool]) -> tuple[list[Drafting], Outputs]:
    """The rows to keep, and their outputs."""
    if all(keep):
        return active, outputs
    indices = [index for index, wanted in enumerate(keep) if wanted]
    return [active[index] for index in indices], outputs.of(indices)
