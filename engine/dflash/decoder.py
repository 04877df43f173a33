"""The decoder of a DFlash draft: a block of queries over keys and values of the target's hidden states, in every layer.

Owns the order of operations, after DFlash (Chen et al. 2026) and the code of its authors. The hidden states of the text
get keys and values once; a block attends to all of them and to all of itself. Knows nothing of requests.

    text      hidden_norm(fc f[p])                         -> k, v of layer 1, 2, ..        the same input for each
    block     e(x[n-1]), e(mask), e(mask), ..  at n-1, n, ..  -> layers -> norm -> head: x[n] at n, x[n+1] at n+1, ..
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.checkpoint.model_config import ModelConfig
from engine.core.step import ForwardInput
from engine.model.attention import Attention
from engine.model.collectives import Solo
from engine.model.decoder import Decoder, DecoderWeights, LayerCache
from engine.model.device import Compute
from engine.model.layers import Linear, RmsNorm
from engine.model.rope import Rotation


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one forward: C positions of texts, then S blocks of B positions each."""

    positions: torch.Tensor
    """[C + S * B] int64 position of each row in its text."""
    slots: torch.Tensor
    """[C + S * B] int64 KV slot that each row writes."""
    anchors: torch.Tensor
    """[S] int64 token at the first position of each block."""
    logit_rows: torch.Tensor
    """[R] int64 indices of rows with logits, counted from the first block."""
    blocks: ForwardInput | None
    """The rows of the blocks as attention sees them; None without blocks."""


class DFlashDecoder(Decoder):
    """A DFlash draft, whole on one device. `engine.dflash.load.load_dflash` makes it.

    Args:
        config: of the draft.
        weights: of its layers, its head and its embedding.
        compute: device and dtype.
        attention: see `Decoder`.
        fuse: `fc`, of the target's hidden states.
        feature_norm: norm of its output.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        compute: Compute,
        *,
        attention: Mapping[int, Attention],
        fuse: Linear,
        feature_norm: RmsNorm,
    ) -> None:
        super().__init__(config, weights, compute, collectives=Solo(), attention=attention, feature_layers=())
        if config.dflash is None:
            raise ValueError("dflash: the config is not that of a DFlash draft")
        self.block_size = config.dflash.block_size
        self.feature_width = len(config.feature_layers) * config.hidden_size
        self._mask_token_id = config.dflash.mask_token_id
        self._fuse = fuse
        self._feature_norm = feature_norm

    def draft(self, features: torch.Tensor, rows: Rows, caches: list[LayerCache]) -> torch.Tensor:
        """Write K and V of all rows into the caches, and compute the logits of the blocks.

        Args:
            features: [C, feature_width] hidden states of the target at the positions of the texts.
            rows: C rows of texts, and the blocks.
            caches: KV cache of each layer.

        Returns:
            [R, draft_vocab] float32.
        """
        text = self._feature_norm(self._fuse(features))
        hidden = self._block_inputs(rows.anchors)
        rotation, num_text = self._rope.at(rows.positions), len(text)
        of_block = Rotation(rotation.cos[num_text:], rotation.sin[num_text:])
        heads, kv_heads, head_dim = self._num_heads, self.num_kv_heads, self.config.head_dim
        attention, prepared = self._attention[0], None
        if rows.blocks is not None:
            prepared = attention.prepare(rows.blocks, block_size=caches[0].keys.shape[1])
        for layer, cache in zip(self._weights.layers, caches, strict=True):
            qkv = layer.qkv(torch.cat((text, layer.input_norm(hidden)))).view(-1, heads + 2 * kv_heads, head_dim)
            query, key = qkv[num_text:, :heads], qkv[:, heads : heads + kv_heads]
            if layer.q_norm is not None and layer.k_norm is not None:
                query, key = layer.q_norm(query), layer.k_norm(key)
            cache.keys.view(-1, kv_heads, head_dim).index_copy_(0, rows.slots, rotation.apply(key))
            cache.values.view(-1, kv_heads, head_dim).index_copy_(0, rows.slots, qkv[:, heads + kv_heads :])
            if prepared is not None:
                seen = attention.attend(of_block.apply(query), cache.keys, cache.values, prepared)
                hidden = layer.o.plus(seen, hidden)
                hidden = layer.mlp.plus(layer.mlp_norm(hidden), hidden)
        logits = self._logits(hidden, rows.logit_rows)
        assert logits is not None  # The only rank is rank 0.
        return logits

    def _block_inputs(self, anchors: torch.Tensor) -> torch.Tensor:
        """[S * B, hidden_size] embeddings of the blocks: each has its anchor, then masks."""
        ids = anchors.new_full((len(anchors), self.block_size), self._mask_token_id)
        ids[:, 0] = anchors
        return F.embedding(ids.view(-1), self.embedding)
