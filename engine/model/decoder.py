"""The decoder of Llama, Mistral, Qwen2 and Qwen3 models, in one forward pass.

Owns the order of operations in a layer and in the whole model, for one tensor-parallel shard. The families differ only
in which weights are present (biases, q/k norm). Knows nothing of files, blocks or requests: the forward input says
where K and V go, and `engine.model.attention` computes attention.

Shapes: N rows, R logit rows; H query heads, G KV heads and D head_dim of this shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weights import ShardSpec
from engine.core.step import ForwardInput, ForwardResult
from engine.model.attention import Attention
from engine.model.collectives import Collectives
from engine.model.device import Compute
from engine.model.layers import Linear, RmsNorm
from engine.model.rope import Rope, Rotation
from engine.sampling.staging import to_device


@dataclass(frozen=True, slots=True)
class LayerCache:
    """KV cache of one layer. Keys and values are [num_blocks, block_size, G, D] each."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class Inputs:
    """A forward input as tensors on the device."""

    token_ids: torch.Tensor
    """[N] int64 token ids."""
    positions: torch.Tensor
    """[N] int64 positions in the sequence."""
    slots: torch.Tensor
    """[N] int64 KV slot of each row: block_id * block_size + offset."""
    logit_rows: torch.Tensor
    """[R] int64 indices of the rows with logits."""
    attention: Any
    """Result of `Attention.prepare`."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One shard's weights of a decoder layer."""

    input_norm: RmsNorm
    qkv: Linear
    """hidden -> (H + 2 G) * D: query heads, key heads, value heads."""
    q_norm: RmsNorm | None
    k_norm: RmsNorm | None
    o: Linear
    mlp_norm: RmsNorm
    gate: Linear
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of one shard."""

    embedding: torch.Tensor
    """[vocab_size, hidden_size], the whole table on each shard."""
    layers: tuple[Layer, ...]
    final_norm: RmsNorm
    head: Linear
    """hidden -> this shard's part of the logit columns."""
    draft_vocab: torch.Tensor | None
    """[draft_vocab_size] int64 target token id of each logit column; None when column i is token i."""


def with_device_tokens(token_ids: torch.Tensor, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Token ids of rows, some of which are in device memory.

    Args:
        token_ids: [N] int64, used where `places` is negative.
        ids: [M] int64 ids in device memory.
        places: [N] int64 index into `ids`.
    """
    return torch.where(places >= 0, ids[places.clamp(min=0)], token_ids)


class Decoder:
    """One shard of a model. `engine.model.load.load_model` makes it.

    Args:
        config: of the model.
        weights: of this shard.
        compute: device and dtype.
        collectives: connects the shards.
        attention: computes attention over the KV cache.
        feature_layers: layers whose outputs a forward also returns, ascending.
    """

    own_threads = False
    """Whether a forward uses threads of its own instead of PyTorch's."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        compute: Compute,
        *,
        collectives: Collectives,
        attention: Attention,
        feature_layers: tuple[int, ...],
    ) -> None:
        self.config = config
        self.shard = ShardSpec(collectives.rank, collectives.size)
        self.dtype = compute.dtype
        self.device = compute.device
        self.draft_vocab = weights.draft_vocab
        self._attention = attention
        self._collectives = collectives
        self.feature_layers = feature_layers
        self._weights = weights
        self._rope = Rope(config, dtype=self.dtype, device=self.device)
        self._head_columns = self.shard.parts(self.logit_width)
        heads = self.shard.kv_heads(config)
        self.num_kv_heads = heads.stop - heads.start
        self._num_heads = self.num_kv_heads * (config.num_heads // config.num_kv_heads)

    @property
    def embedding(self) -> torch.Tensor:
        """[vocab_size, hidden_size] token embeddings."""
        return self._weights.embedding

    @property
    def logit_width(self) -> int:
        """Number of logit columns."""
        return self.config.draft_vocab_size or self.config.vocab_size

    def forward(
        self, forward_input: ForwardInput, caches: list[LayerCache], embedded: torch.Tensor | None = None
    ) -> ForwardResult:
        """Write K and V of all rows into the caches, and compute the logits of the logit rows.

        Args:
            forward_input: N rows, R of them with logits.
            caches: KV cache of each layer.
            embedded: [N, hidden_size] input of the first layer; None takes the embeddings of the token ids.

        Raises:
            ShardDown: another shard is gone or hung.
        """
        return self.compute(self._inputs(forward_input, block_size=caches[0].keys.shape[1]), caches, embedded)

    def compute(self, inputs: Inputs, caches: list[LayerCache], embedded: torch.Tensor | None = None) -> ForwardResult:
        """`forward` with inputs that are on the device already. Neither reads nor copies from the host."""
        hidden = F.embedding(inputs.token_ids, self._weights.embedding) if embedded is None else embedded
        rotation = self._rope.at(inputs.positions)
        features = []
        for index, (layer, cache) in enumerate(zip(self._weights.layers, caches, strict=True)):
            hidden = self._attend(layer, hidden, rotation, cache, inputs)
            hidden = self._mlp(layer, hidden)
            if index in self.feature_layers:
                features.append(hidden)
        return ForwardResult(
            logits=self._logits(hidden, inputs.logit_rows),
            hidden=torch.cat(features, dim=1) if features else None,
        )

    def share_tokens(self, token_ids: torch.Tensor) -> None:
        """Give every shard the token ids of rank 0, in place."""
        self._collectives.broadcast(token_ids)

    def _inputs(self, forward_input: ForwardInput, *, block_size: int) -> Inputs:
        source = forward_input
        known = source.device_tokens
        arrays: list[npt.NDArray[Any]] = [source.token_ids, source.positions, source.slots, source.logit_rows]
        arrays += [known.places] if known is not None else []
        token_ids, positions, slots, logit_rows, *places = to_device(
            [array.astype(np.int64, copy=False) for array in arrays], self.device
        )
        if known is not None:
            token_ids = with_device_tokens(token_ids, known.ids, places[0])
        if source.tokens_from_rank_0:
            self.share_tokens(token_ids)
        return Inputs(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            logit_rows=logit_rows,
            attention=self._attention.prepare(forward_input, block_size=block_size),
        )

    def _attend(
        self, layer: Layer, hidden: torch.Tensor, rotation: Rotation, cache: LayerCache, inputs: Inputs
    ) -> torch.Tensor:
        heads, kv_heads, head_dim = self._num_heads, self.num_kv_heads, self.config.head_dim
        qkv = layer.qkv(layer.input_norm(hidden))
        qkv = qkv.view(-1, heads + 2 * kv_heads, head_dim)  # [N, H + 2 G, D]
        if layer.q_norm is not None and layer.k_norm is not None:
            query = rotation.apply(layer.q_norm(qkv[:, :heads]))
            key = rotation.apply(layer.k_norm(qkv[:, heads : heads + kv_heads]))
        else:
            rotated = rotation.apply(qkv[:, : heads + kv_heads])
            query, key = rotated[:, :heads], rotated[:, heads:]
        cache.keys.view(-1, kv_heads, head_dim).index_copy_(0, inputs.slots, key)
        cache.values.view(-1, kv_heads, head_dim).index_copy_(0, inputs.slots, qkv[:, heads + kv_heads :])
        context = self._attention.attend(query, cache.keys, cache.values, inputs.attention)  # [N, H * D]
        return self._residual(layer.o, context, hidden)

    def _mlp(self, layer: Layer, hidden: torch.Tensor) -> torch.Tensor:
        x = layer.mlp_norm(hidden)
        return self._residual(layer.down, layer.up.times(x, layer.gate.silu(x)), hidden)

    def _residual(self, linear: Linear, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """hidden + the sum of linear(x) over all shards. Rank 0 adds the residual and the bias."""
        out = linear.plus(x, hidden) if self.shard.rank == 0 else linear(x)
        self._collectives.all_reduce(out)
        return out

    def _logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor | None:
        """[R, vocab] float32 on rank 0, None elsewhere."""
        if rows.shape[0] == 0:
            empty = torch.empty(0, self.logit_width, dtype=torch.float32, device=self.device)
            return empty if self.shard.rank == 0 else None
        return self._gathered(self._weights.head(self._weights.final_norm(hidden.index_select(0, rows))))

    def _logits_of_normed(self, normed: torch.Tensor, rows: torch.Tensor) -> torch.Tensor | None:
        """As `_logits`, from the output of the final norm."""
        if rows.shape[0] == 0:
            return self._logits(normed, rows)
        return self._gathered(self._weights.head(normed.index_select(0, rows)))

    def _gathered(self, local: torch.Tensor) -> torch.Tensor | None:
        logits = self._collectives.gather_logits(local, self._head_columns)
        return None if logits is None else logits.float()
