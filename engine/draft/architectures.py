"""What differs between draft architectures: the input of the draft's decoder at committed and at drafted tokens.

Owns which tokens have a KV slot in the draft's cache. Sequences, blocks and the choice of tokens are the same for all
architectures (`engine.draft.proposer`).

    draft_model   input at position p: the token. KV of a drafted token stays valid when the token is accepted.
    eagle         input at position p: the token and the target's features at p - 1; token 0 has no slot.
                  At drafted tokens the head's own output replaces the features, so their KV is always recomputed.

`engine.draft.parallel` has the eagle draft whose forward over committed tokens yields all drafted positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from engine.core.packing import Forward
from engine.core.step import ForwardInput, ForwardResult
from engine.errors import EngineError
from engine.graphs.buckets import Bucket
from engine.graphs.forward import Capture, Embedding, GraphedForward
from engine.model.decoder import LayerCache
from engine.model.eagle_head import Eagle3Head, EagleHead
from engine.model.load import Model
from engine.model.runner import ModelRunner
from engine.sampling.staging import to_device, with_device_tokens

_TABLE_ROWS = 4096
"""Vocabulary rows that are projected at once when the token table of an EAGLE draft is built."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """Result of a forward at the last token of each row that is drafted for."""

    logits: torch.Tensor
    """[R, draft_vocab] float32."""
    previous_hidden: torch.Tensor | None = None
    """[R, hidden_size] hidden states that the next drafted position takes as input; None for a plain draft model."""
    ahead: Ahead | None = None
    """The positions after this one where the same forward computed them; None for a chain."""

    def select(self, rows: list[int]) -> Outputs:
        """The outputs of some rows."""
        if rows == list(range(len(self.logits))):
            return self
        (index,) = to_device([np.array(rows, dtype=np.int64)], self.logits.device)
        hidden, ahead = self.previous_hidden, self.ahead
        return Outputs(
            self.logits.index_select(0, index),
            None if hidden is None else hidden.index_select(0, index),
            None if ahead is None else Ahead(ahead.logits, ahead.rows[rows]),
        )

    def following(self) -> Outputs | None:
        """The next position of all rows, which must have one; None for a chain, which needs a forward for it."""
        return None if self.ahead is None else self.ahead.outputs()


@dataclass(frozen=True, slots=True)
class Ahead:
    """Later positions of rows, from the forward that also computed their first one."""

    logits: torch.Tensor
    """[N, draft_vocab] float32 of all positions of all rows, those of a row one after another."""
    rows: npt.NDArray[np.int64]
    """[R] row of `logits` with the next position of each row."""

    def outputs(self) -> Outputs:
        """The next position of each row."""
        (index,) = to_device([self.rows], self.logits.device)
        return Outputs(self.logits.index_select(0, index), None, Ahead(self.logits, self.rows + 1))


class Architecture(Protocol):
    """A draft model with its KV cache."""

    reads_features: bool
    """Whether a committed token needs the target's features at the position before it to get a KV slot."""
    positions_per_pass: int
    """Tokens that one forward drafts: 1 for a chain. A parallel draft drafts at most this many, with one forward."""
    block_rows: int
    """Masked rows of a span that is drafted for, whatever K; 0 where they are one less than K. Chains have none."""

    def compute_committed(
        self, forward_input: ForwardInput, features: torch.Tensor | None, num_masked: Sequence[int] = ()
    ) -> Outputs:
        """Compute K, V and logits of committed tokens.

        Args:
            forward_input: N rows.
            features: [C, feature width] of the position before each of the C committed rows, where `reads_features`;
                None otherwise.
            num_masked: [spans] rows at the end of each span that stand for tokens not drafted yet; they have logits.
                Empty where there are none. Only for a parallel draft.
        """
        ...

    def compute_drafted(self, forward_input: ForwardInput, previous_hidden: torch.Tensor | None) -> Outputs:
        """Compute K, V and logits of drafted tokens: the one that a span drafted last, or several nodes of a tree.

        Args:
            forward_input: its rows all have logits.
            previous_hidden: per row, `Outputs.previous_hidden` of the token before it.
        """
        ...


def token_ids_of(forward_input: ForwardInput, device: torch.device) -> torch.Tensor:
    """[N] int64 token of each row, of which the host may not know some."""
    told, known = forward_input.token_ids.astype(np.int64), forward_input.device_tokens
    if known is None:
        return to_device([told], device)[0]
    told_ids, places = to_device([told, known.places], device)
    return with_device_tokens(told_ids, known.ids, places)


class PlainArchitecture:
    """A separate small language model.

    Args:
        forward: one forward of the model; its logits are [R, draft_vocab] float32.
    """

    reads_features = False
    positions_per_pass = 1
    block_rows = 0

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    def compute_committed(
        self, forward_input: ForwardInput, features: torch.Tensor | None, num_masked: Sequence[int] = ()
    ) -> Outputs:
        del features, num_masked
        return Outputs(self._forward(forward_input).require_logits())

    def compute_drafted(self, forward_input: ForwardInput, previous_hidden: torch.Tensor | None) -> Outputs:
        del previous_hidden
        return Outputs(self._forward(forward_input).require_logits())


class EagleArchitecture:
    """An EAGLE draft: a small decoder on the target's hidden states.

    Args:
        head: computes the input of the decoder.
        decoder: returns logits, and the output of its last layer as hidden states.
        caches: KV cache of each decoder layer.
    """

    reads_features = True
    positions_per_pass = 1
    block_rows = 0

    def __init__(self, head: EagleHead | Eagle3Head, decoder: Model, caches: list[LayerCache]) -> None:
        self._head = head
        self._decoder = decoder
        self._caches = caches
        has_table = isinstance(head, EagleHead) and decoder.device.type == "cpu"
        self._table = self._token_table() if has_table else None
        self._recorded: GraphedForward | None = None
        self._recorded_committed: GraphedForward | None = None

    def with_weights(self, head: EagleHead, decoder: Model) -> EagleArchitecture:
        """A draft of the same shape with other weights over the same KV cache. Requests keep their KV slots, although
        these were computed with the weights before: that can cost acceptance and never changes the output."""
        return EagleArchitecture(head, decoder, self._caches)

    def record(self, runner: ModelRunner, buckets: Sequence[Bucket], capture: Capture, *, max_kv: int) -> None:
        """Record the forwards of drafted tokens as CUDA graphs.

        Args:
            runner: the decoder with its cache.
            buckets: sizes to record.
            capture: records them.
            max_kv: longest sequence in tokens.
        """
        max_ids = max(bucket.rows for bucket in buckets)
        self._recorded = GraphedForward(
            runner, buckets, capture, max_kv=max_kv, max_ids=max_ids, embedding=self.embedding
        )

    def record_committed(
        self, runner: ModelRunner, buckets: Sequence[Bucket], capture: Capture, *, max_kv: int, max_ids: int
    ) -> None:
        """Record the forwards of committed tokens. The other arguments are those of `record`.

        Args:
            max_ids: most committed tokens of a draft request.
        """
        self._recorded_committed = GraphedForward(
            *(runner, buckets, capture),
            max_kv=max_kv,
            max_ids=max_ids,
            embedding=self._committed_embedding(),
            some_logits=True,
        )

    def _committed_embedding(self) -> Embedding:
        """The decoder's input at committed tokens."""
        return Embedding(
            self._head.feature_width,
            lambda ids, features: self._head.committed_inputs(self._projected(ids), features),
        )

    @property
    def embedding(self) -> Embedding:
        """The decoder's input at drafted tokens."""
        return Embedding(
            self._decoder.config.hidden_size,
            lambda ids, hidden: self._head.drafted_inputs(self._projected(ids), hidden),
        )

    def compute_committed(
        self, forward_input: ForwardInput, features: torch.Tensor | None, num_masked: Sequence[int] = ()
    ) -> Outputs:
        del num_masked
        if features is None:
            raise EngineError("an eagle draft needs features for committed tokens")
        if self._recorded_committed is not None:
            result = self._recorded_committed.embedded(forward_input, features)
            if result is not None:
                return self._outputs(forward_input, result)
        return self._forward(forward_input, self._head.committed_inputs(self._tokens(forward_input), features))

    def compute_drafted(self, forward_input: ForwardInput, previous_hidden: torch.Tensor | None) -> Outputs:
        if previous_hidden is None:
            raise EngineError("an eagle draft needs its previous hidden state for drafted tokens")
        if self._recorded is not None:
            result = self._recorded.embedded(forward_input, previous_hidden)
            if result is not None and result.hidden is not None:
                return Outputs(result.require_logits(), result.hidden)
        return self._forward(forward_input, self._head.drafted_inputs(self._tokens(forward_input), previous_hidden))

    def _tokens(self, forward_input: ForwardInput) -> torch.Tensor:
        return self._projected(token_ids_of(forward_input, self._decoder.device))

    def _projected(self, ids: torch.Tensor) -> torch.Tensor:
        if self._table is not None:
            return F.embedding(ids, self._table)
        return self._head.project_tokens(F.embedding(ids, self._decoder.embedding))

    @torch.inference_mode()
    def _token_table(self) -> torch.Tensor:
        """[vocab, hidden_size] projected embedding of each token. Makes a step about 10% faster."""
        chunks = torch.split(self._decoder.embedding, _TABLE_ROWS)
        return torch.cat([self._head.project_tokens(chunk) for chunk in chunks])

    def _forward(self, forward_input: ForwardInput, inputs: torch.Tensor) -> Outputs:
        return self._outputs(forward_input, self._decoder.forward(forward_input, self._caches, inputs))

    def _outputs(self, forward_input: ForwardInput, result: ForwardResult) -> Outputs:
        if result.logits is None or result.hidden is None:
            raise EngineError("the draft got no logits")
        hidden = result.hidden
        if len(forward_input.logit_rows) < len(forward_input.token_ids):
            hidden = hidden.index_select(0, self._index(forward_input.logit_rows))
        return Outputs(result.logits, hidden)

    def _index(self, values: npt.NDArray[Any]) -> torch.Tensor:
        (index,) = to_device([values.astype(np.int64)], self._decoder.device)
        return index
