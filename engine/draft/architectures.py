"""How a draft model reads committed tokens and goes on from its own: what differs between the architectures.

Owns which tokens have a cell in the draft's cache and what enters the model there. Sequences, blocks and the choice of
tokens are the same for all, in `engine.draft.proposer`.

    draft_model   cell of token p: the token.                   A cell that was drafted and accepted stays.
    eagle         cell of token p: the token, and the target's features at p - 1; token 0 has none.
                  Drafted cells hold the head's own output in their place, so they are always computed again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from engine.core.packing import Forward
from engine.core.step import ForwardInput
from engine.errors import EngineError
from engine.model.decoder import LayerCache
from engine.model.eagle_head import EagleHead
from engine.model.load import Model

_TABLE_ROWS = 4096
"""Tokens computed at once for the table of an eagle draft."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a forward leaves at the rows that draft on."""

    logits: torch.Tensor
    """[R, draft_vocab] float32."""
    previous_hidden: torch.Tensor | None = None
    """[R, hidden_size] what the next drafted row of each takes along, where the architecture has that."""

    def of(self, rows: list[int]) -> Outputs:
        """Those of some rows."""
        if len(rows) == len(self.logits):
            return self
        return Outputs(self.logits[rows], None if self.previous_hidden is None else self.previous_hidden[rows])


class Architecture(Protocol):
    """The model behind a draft, over its cache."""

    reads_features: bool
    """Whether a committed token has a cell only together with the target's features at the position before it."""

    def read(self, forward_input: ForwardInput, features: torch.Tensor | None) -> Outputs:
        """Compute the cells of committed tokens.

        Args:
            features: [N, width] of the position before each row, where `reads_features`.
        """
        ...

    def extend(self, forward_input: ForwardInput, previous_hidden: torch.Tensor | None) -> Outputs:
        """Compute one cell per span, of the token drafted last, with what its last row carried."""
        ...


class PlainArchitecture:
    """A model of its own.

    Args:
        forward: one forward of the model; its logits are [R, draft_vocab] float32.
    """

    reads_features = False

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    def read(self, forward_input: ForwardInput, features: torch.Tensor | None) -> Outputs:
        del features
        return Outputs(self._forward(forward_input).require_logits())

    def extend(self, forward_input: ForwardInput, previous_hidden: torch.Tensor | None) -> Outputs:
        del previous_hidden
        return Outputs(self._forward(forward_input).require_logits())


class EagleArchitecture:
    """A head on the target's hidden states.

    Args:
        head: makes what enters the decoder.
        decoder: yields logits, and the output of its last layer as hidden.
        caches: of its layers.
    """

    reads_features = True

    def __init__(self, head: EagleHead, decoder: Model, caches: list[LayerCache]) -> None:
        self._head = head
        self._decoder = decoder
        self._caches = caches
        self._table = self._token_table() if decoder.device.type == "cpu" else None

    def read(self, forward_input: ForwardInput, features: torch.Tensor | None) -> Outputs:
        if features is None:
            raise EngineError("an eagle draft reads committed tokens with features only")
        return self._forward(forward_input, self._head.committed(self._tokens(forward_input), features))

    def extend(self, forward_input: ForwardInput, previous_hidden: torch.Tensor | None) -> Outputs:
        if previous_hidden is None:
            raise EngineError("an eagle draft goes on from its own output only")
        return self._forward(forward_input, self._head.drafted(self._tokens(forward_input), previous_hidden))

    def _tokens(self, forward_input: ForwardInput) -> torch.Tensor:
        ids = self._index(forward_input.token_ids)
        if self._table is not None:
            return F.embedding(ids, self._table)
        return self._head.tokens(F.embedding(ids, self._decoder.embedding))

    @torch.inference_mode()
    def _token_table(self) -> torch.Tensor:
        """[vocab, H] what each token brings along: as large as the embedding, and a tenth of a step saved."""
        parts = torch.split(self._decoder.embedding, _TABLE_ROWS)
        return torch.cat([self._head.tokens(part) for part in parts])

    def _forward(self, forward_input: ForwardInput, entering: torch.Tensor) -> Outputs:
        result = self._decoder.forward(forward_input, self._caches, entering)
        if result.logits is None or result.hidden is None:
            raise EngineError("the draft got no logits")
        hidden = result.hidden
        if len(forward_input.logit_rows) < len(forward_input.token_ids):
            hidden = hidden.index_select(0, self._index(forward_input.logit_rows))
        return Outputs(result.logits, hidden)

    def _index(self, values: np.ndarray[tuple[int], np.dtype[np.int32]]) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._decoder.device)
