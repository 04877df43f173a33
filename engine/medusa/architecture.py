"""Drafting with Medusa heads: what the proposer computes of them.

Owns which hidden state the heads read, the one before the last committed token, and which heads a request needs. There
is no KV cache, and nothing to compute at other tokens: a slot of the proposer's pool says only that a token is known.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.core.step import ForwardInput
from engine.draft.architectures import Ahead, Outputs
from engine.errors import EngineError
from engine.graphs.forward import Capture
from engine.medusa.heads import MedusaHeads
from engine.medusa.recorded import RecordedHeads
from engine.sampling.staging import to_device


class MedusaArchitecture:
    """Medusa heads on the target's last hidden state.

    Args:
        heads: as many as tokens that one forward drafts.
    """

    reads_features = True
    block_rows = 0

    def __init__(self, heads: MedusaHeads) -> None:
        self._heads = heads
        self.positions_per_pass = len(heads.blocks)
        self._recorded: RecordedHeads | None = None

    def record(self, sizes: Sequence[int], capture: Capture) -> None:
        """Record the forward of the heads as CUDA graphs.

        Args:
            sizes: requests to record for.
            capture: records them.
        """
        self._recorded = RecordedHeads(self._heads, sizes, capture)

    def compute_committed(
        self, forward_input: ForwardInput, features: torch.Tensor | None, num_masked: Sequence[int] = ()
    ) -> Outputs:
        """Logits of all drafted positions. Of the features, those of the last row of each drafted span are read."""
        if features is None:
            raise EngineError("Medusa heads need features for committed tokens")
        q_lens = forward_input.q_lens.astype(np.int64)
        later = np.array(num_masked, dtype=np.int64) if len(num_masked) else np.zeros_like(q_lens)
        # A span is drafted for if its last committed row has logits.
        spans = np.flatnonzero(np.isin(np.cumsum(q_lens) - later - 1, forward_input.logit_rows))
        lasts = np.cumsum(q_lens - later)[spans] - 1
        num_heads = later[spans] + 1
        firsts = np.cumsum(num_heads) - num_heads
        index, first_rows = to_device([lasts, firsts], features.device)
        hidden = features.index_select(0, index)
        if self._recorded is not None and 0 < len(hidden) <= self._recorded.max_rows:
            logits, firsts = self._recorded.logits(hidden, int(num_heads.max()))
            return Outputs(logits[firsts[0] :: len(self._heads.blocks)][: len(firsts)], None, Ahead(logits, firsts + 1))
        logits = self._heads.logits(hidden, num_heads)
        return Outputs(logits.index_select(0, first_rows), None, Ahead(logits, firsts + 1))

    def compute_drafted(self, forward_input: ForwardInput, previous_hidden: torch.Tensor | None) -> Outputs:
        """Not called: K is at most the number of heads."""
        del forward_input, previous_hidden
        raise EngineError("Medusa heads have no forward over drafted tokens")
