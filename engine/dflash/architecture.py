"""Drafting with a DFlash draft: what the proposer computes of it.

Owns the places of texts and blocks in a forward. The slot of position p of the draft's cache has the keys and values of
the target's hidden states at p - 1, which are known once token p is. A block begins at the last known token. It always
has all of its positions, as in training; the first K masked ones have logits.

    span        c c c c | a m m m       c: positions of the text, a: the last token, m: masked; B = 4
    logits            |     0 1         of the K = 2 drafted tokens, all from one forward
    KV slots    kept  | not kept        the next forward of the sequence overwrites those of the block
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.core.step import ForwardInput, TreeMask
from engine.dflash.decoder import DFlashDecoder, Rows
from engine.draft.architectures import Ahead, Outputs, token_ids_of
from engine.errors import EngineError
from engine.model.decoder import LayerCache
from engine.sampling.staging import to_device


class DFlashArchitecture:
    """A DFlash draft with its KV cache.

    Args:
        decoder: computes the logits.
        caches: KV cache of each of its layers.
    """

    reads_features = True

    def __init__(self, decoder: DFlashDecoder, caches: list[LayerCache]) -> None:
        self._decoder = decoder
        self._caches = caches
        self.block_rows = decoder.block_size
        self.positions_per_pass = decoder.block_size - 1

    def compute_committed(
        self, forward_input: ForwardInput, features: torch.Tensor | None, num_masked: Sequence[int] = ()
    ) -> Outputs:
        if features is None:
            raise EngineError("a DFlash draft needs features for committed tokens")
        q_lens = forward_input.q_lens.astype(np.int64)
        counts = np.array(num_masked, dtype=np.int64) if len(num_masked) else np.zeros_like(q_lens)
        spans, size = np.flatnonzero(counts), self.block_rows
        first_rows = (np.cumsum(q_lens) - counts)[spans]  # of each block
        in_blocks = (first_rows[:, None] + np.arange(size)).reshape(-1)
        is_block = np.zeros(int(q_lens.sum()), dtype=np.bool_)
        is_block[in_blocks] = True
        order = np.concatenate((np.flatnonzero(~is_block), in_blocks))
        owners = np.repeat(np.arange(len(q_lens)), q_lens)
        num_drafted = np.bincount(owners[forward_input.logit_rows], minlength=len(q_lens))[spans]
        firsts = np.cumsum(num_drafted) - num_drafted
        ahead = np.arange(num_drafted.sum()) - np.repeat(firsts, num_drafted)
        logit_rows = np.repeat(np.arange(len(spans)) * size + 1, num_drafted) + ahead
        arrays = [forward_input.positions[order] - 1, forward_input.slots[order], first_rows - 1, logit_rows, firsts]
        positions, slots, lasts, logit_index, first_index = to_device(
            [array.astype(np.int64) for array in arrays], self._decoder.device
        )
        anchors = token_ids_of(forward_input, self._decoder.device).index_select(0, lasts)
        blocks = _blocks(forward_input, spans, in_blocks, size) if len(spans) else None
        logits = self._decoder.draft(features, Rows(positions, slots, anchors, logit_index, blocks), self._caches)
        return Outputs(logits.index_select(0, first_index), None, Ahead(logits, firsts + 1))

    def compute_drafted(self, forward_input: ForwardInput, previous_hidden: torch.Tensor | None) -> Outputs:
        """Not called: K is at most the number of masked positions."""
        del forward_input, previous_hidden
        raise EngineError("a DFlash draft has no forward over drafted tokens")


def _blocks(
    forward_input: ForwardInput, spans: npt.NDArray[np.int64], rows: npt.NDArray[np.int64], size: int
) -> ForwardInput:
    """The rows of the blocks alone. Each sees the whole text and its whole block."""
    everyone = np.uint64(2**size - 1)
    return ForwardInput(
        token_ids=forward_input.token_ids[rows],
        positions=forward_input.positions[rows],
        slots=forward_input.slots[rows],
        q_lens=np.full(len(spans), size, dtype=np.int32),
        kv_lens=forward_input.kv_lens[spans],
        block_tables=forward_input.block_tables[spans],
        logit_rows=np.zeros(0, dtype=np.int32),
        tree=TreeMask(np.full(len(spans), size, dtype=np.int32), np.full(len(rows), everyone, dtype=np.uint64)),
    )
