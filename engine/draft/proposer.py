"""The draft's computation in one step: compute the committed tokens, then draft up to k tokens per request.

Owns the sequences of all requests and their KV blocks. Knows draft requests and responses, not how they travel, how
draft tokens are chosen (`engine.draft.tree_search`, on a GPU `engine.draft.chain`), nor which model computes the logits
(`engine.draft.architectures`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from engine.core.block_pool import BlockPool
from engine.core.packing import SpanRows, pack_spans
from engine.draft.architectures import Architecture, Outputs
from engine.draft.chain import Chooser, Read, draft_chain, settle
from engine.draft.messages import DraftRequestRow, DraftResponseRow
from engine.draft.parallel import with_masked
from engine.draft.sequence import Drafting, DraftSequence
from engine.draft.tree_search import draft_trees, max_computed, max_levels
from engine.errors import InvalidRequest
from engine.graphs.chain import RecordedChain
from engine.sampling.grammar import Grammars, Matcher
from engine.sampling.logits_processor import Columns, LogitsProcessor
from engine.sampling.staging import to_device


@dataclass(frozen=True, slots=True)
class OnDevice:
    """Where a draft leaves its tokens for the target, and takes committed ones from."""

    token_ids: torch.Tensor
    """[max_rows, max_k] int32, written."""
    confidences: torch.Tensor
    """[max_rows, max_k] float32, written."""
    new_tokens: torch.Tensor
    """[max_request_tokens] int32 committed tokens of the draft request, row after row."""
    read: Read
    """Copies tensors to the host. Called at most once per draft request."""


class Proposer:
    """Turns draft requests into draft tokens with a model.

    Args:
        architecture: the model and its KV cache.
        pool: blocks of that KV cache.
        vocab: [draft_vocab] int64, target token id of each logit column; None when column i is token i.
        max_model_len: longest sequence of the draft, in tokens.
        grammars: compiles grammars; None refuses requests that have one.
        recorded: the chain as CUDA graphs; None launches each operation.
    """

    def __init__(
        self,
        architecture: Architecture,
        pool: BlockPool,
        *,
        vocab: torch.Tensor | None,
        max_model_len: int,
        grammars: Grammars | None = None,
        recorded: RecordedChain | None = None,
    ) -> None:
        self._architecture = architecture
        self._pool = pool
        self._chooser = Chooser(vocab)
        self._columns = Columns(vocab) if vocab is not None else None
        self._grammars = grammars
        self._max_model_len = max_model_len
        self._recorded = recorded
        self._sequences: dict[int, DraftSequence] = {}

    @property
    def architecture(self) -> Architecture:
        """The model that drafts."""
        return self._architecture

    def replace_architecture(self, architecture: Architecture) -> None:
        """Draft with another model from the next call on. It has the cache and the columns of the one before."""
        self._architecture = architecture

    @torch.inference_mode()
    def propose(
        self,
        rows: Sequence[DraftRequestRow],
        released: Sequence[int],
        probs: torch.Tensor,
        features: torch.Tensor | None = None,
        on_device: OnDevice | None = None,
    ) -> tuple[DraftResponseRow, ...]:
        """Compute new committed tokens and draft.

        Args:
            rows: the rows of the draft request.
            released: keys of requests that have ended.
            probs: [max_rows, max_k, draft_vocab] float32. Receives q for the rows that need it.
            features: [ring rows, feature width] of the target, for an architecture that reads features.
            on_device: where the tokens of chains stay on the device; None brings each one to the host before the next.

        Returns:
            One response row per request row.
        """
        for key in released:
            self._drop(key)
        response = [DraftResponseRow()] * len(rows)
        drafting: list[Drafting] = []
        firsts = accumulate((len(row.new_tokens) for row in rows), initial=0)
        for row_index, (request_row, first_new_token) in enumerate(zip(rows, firsts, strict=False)):
            try:
                row = self._prepare(row_index, request_row, first_new_token)
            except InvalidRequest:
                self._drop(request_row.key)
                response[row_index] = DraftResponseRow(reason="options")
                continue
            if row is None:
                response[row_index] = DraftResponseRow(reason="memory")
            else:
                drafting.append(row)
        outputs = self._compute_committed(drafting, features, on_device)
        active = [row for row in drafting if row.k > 0]
        # The levels of a tree follow from the tokens of the level before, which the host therefore reads.
        stays = on_device if all(row.width == 1 for row in rows) else None
        if active and outputs is not None:
            if stays is None:
                draft_trees(
                    *(self._architecture, self._chooser, active, outputs, probs),
                    columns=self._columns,
                    block_size=self._pool.block_size,
                )
            else:
                self._draft_chain(active, outputs, probs, stays)
        for row in drafting:
            response[row.row_index] = _response_row(row, stays is not None)
        return tuple(response)

    def _prepare(self, row_index: int, request_row: DraftRequestRow, first_new_token: int) -> Drafting | None:
        """Bring the sequence to its committed tokens and reserve KV slots; None when memory is short.

        Raises:
            InvalidRequest: this draft cannot compile the grammar.
        """
        sequence = self._follow(request_row)
        if sequence is None:
            return None
        uncomputed, feature_rows = self._uncomputed(request_row, sequence)
        per_pass, width = self._architecture.positions_per_pass, request_row.width
        k = request_row.k if per_pass == 1 else min(request_row.k, per_pass)
        later = max(max_computed(k, width), self._architecture.block_rows)
        num_slots = len(sequence.positions) + len(uncomputed) + later
        num_tokens = len(sequence.tokens) + max(0, max_levels(k, width) - 1)  # the last drafted token needs no slot
        if num_tokens > self._max_model_len or not self._pool.reserve(sequence, num_slots):
            self._drop(request_row.key)
            return None
        row = Drafting(
            *(row_index, request_row, sequence, request_row.sampling, k, uncomputed, feature_rows),
            first_new_token=first_new_token,
        )
        if not self._is_ready(sequence):
            row.k = 0
            row.reason = "catch_up" if sequence.logits_processor is None else "plan"
        if not uncomputed or uncomputed[-1] != len(sequence.tokens) - 1:  # No features at the last token: no logits.
            row.k, row.reason = 0, "catch_up"
        return row

    def _is_ready(self, sequence: DraftSequence) -> bool:
        """Whether the request's options can be applied now. If so, its logits processor is at the last token.

        Raises:
            InvalidRequest: this draft cannot compile the grammar.
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

    def _follow(self, request_row: DraftRequestRow) -> DraftSequence | None:
        """The request's sequence, rolled back to its committed tokens; None when it is unknown here."""
        keeps_agreed = not self._architecture.reads_features
        if request_row.start == 0:
            self._drop(request_row.key)
            first = 0 if keeps_agreed else 1
            self._sequences[request_row.key] = DraftSequence(request_row.key, first, options=request_row.options)
        sequence = self._sequences.get(request_row.key)
        if sequence is None:
            return None  # The reason "memory" makes the target send the request from the start.
        sequence.follow(request_row.start, request_row.new_tokens, keeps_agreed=keeps_agreed)
        if request_row.start == 0:
            num_found = self._pool.attach_prefix(sequence)
            sequence.positions = list(range(sequence.first, sequence.first + num_found))
        return sequence

    def _uncomputed(self, request_row: DraftRequestRow, sequence: DraftSequence) -> tuple[Sequence[int], Sequence[int]]:
        """Positions that get a KV slot now, and the feature row that each of them reads."""
        uncomputed = sequence.uncomputed()
        if not self._architecture.reads_features:
            return uncomputed, ()
        available = [
            (position, feature_row)
            for position, feature_row in enumerate(request_row.feature_rows, request_row.start)
            if feature_row >= 0 and position in uncomputed
        ]
        return [position for position, _ in available], [feature_row for _, feature_row in available]

    def _drop(self, key: int) -> None:
        sequence = self._sequences.pop(key, None)
        if sequence is not None:
            self._pool.release(sequence)

    def _compute_committed(
        self, drafting: Sequence[Drafting], features: torch.Tensor | None, on_device: OnDevice | None
    ) -> Outputs | None:
        """One forward over all committed tokens without a KV slot.

        Returns:
            Outputs at the last token of each row with k > 0; None when there is nothing to compute.
        """
        spans = []
        feature_rows: list[int] = []
        num_masked: list[int] = []
        for row in drafting:
            if row.uncomputed:
                token_ids = [row.sequence.tokens[position] for position in row.uncomputed]
                places = None if on_device is None else _new_token_places(row)
                num_logits = 1 if row.k > 0 else 0
                span = self._extend(row.sequence, token_ids, row.uncomputed, num_logits, places)
                num_masked.append(self._num_masked(row.k))
                spans.append(with_masked(span, num_masked[-1], row.k) if num_masked[-1] else span)
                feature_rows += row.feature_rows
        if not spans:
            return None
        read = None
        if features is not None and self._architecture.reads_features:
            (index,) = to_device([np.array(feature_rows, dtype=np.int64)], features.device)
            read = features.index_select(0, index)
        ids = None if on_device is None else on_device.new_tokens.long()
        outputs = self._architecture.compute_committed(pack_spans(spans, self._pool.block_size, ids), read, num_masked)
        for row in drafting:
            if row.sequence.has_no_gap:
                self._pool.register(row.sequence)
        return outputs

    def _num_masked(self, k: int) -> int:
        """Rows that the span of a request gets for tokens not drafted yet."""
        if k == 0 or self._architecture.positions_per_pass == 1:
            return 0
        return self._architecture.block_rows or k - 1

    def _extend(
        self,
        sequence: DraftSequence,
        token_ids: Sequence[int],
        positions: Sequence[int],
        num_logits: int,
        places: Sequence[int] | None = None,
    ) -> SpanRows:
        """Give the next KV slots of a sequence to these tokens."""
        start = len(sequence.positions)
        sequence.positions += positions
        return SpanRows(token_ids, start, sequence.block_ids, num_logits, positions, places)

    def _draft_chain(
        self, active: Sequence[Drafting], outputs: Outputs, probs: torch.Tensor, on_device: OnDevice
    ) -> None:
        """Draft all positions of all rows on the device, then read the result once."""
        draft_chain(
            *(self._architecture, self._chooser, active, outputs, probs, on_device.token_ids, on_device.confidences),
            columns=self._columns,
            block_size=self._pool.block_size,
            recorded=self._recorded,
        )
        num_rows = max(row.row_index for row in active) + 1
        tokens, confidences = on_device.read([on_device.token_ids[:num_rows], on_device.confidences[:num_rows]])
        for row in active:
            settle(row, tokens[row.row_index].tolist(), confidences[row.row_index].tolist())


def _new_token_places(row: Drafting) -> list[int]:
    """Place of each uncomputed token among the new tokens of the draft request; -1 for earlier tokens."""
    first = row.first_new_token - row.request_row.start
    return [first + position if position >= row.request_row.start else -1 for position in row.uncomputed]


def _response_row(row: Drafting, on_device: bool) -> DraftResponseRow:
    """The response for one row. Tokens on the device are repeated in it only where the target's options need them."""
    token_ids, confidences = tuple(row.token_ids), tuple(row.confidences)
    if not on_device:
        return DraftResponseRow(token_ids, confidences, row.samples_from_q, row.reason, parents=row.parents)
    told = token_ids if row.sequence.options is not None else ()
    return DraftResponseRow(told, (), row.samples_from_q, row.reason, len(token_ids))
