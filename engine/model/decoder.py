"""The decoder of all model families, in one forward pass.

Owns the order of operations in a layer and in the whole model, for one tensor-parallel shard. The families differ in
which weights are present (biases, norms, experts) and in the windows and rotations of their layers. Knows nothing of
files, blocks or requests: the forward input says where K and V go, and `engine.model.attention` computes attention.

Shapes: N rows, R logit rows; H query heads, G KV heads and D head_dim of this shard.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from engine.model.attention_varlen import VarlenAttention
from engine.model.collectives import Collectives
from engine.model.device import Compute
from engine.model.layers import Block, GatedMlp, Linear, RmsNorm
from engine.model.native.matrices import PackedWeights
from engine.model.rope import Rope, Rotation
from engine.quantization.kv_cache import RECORDS, quantised
from engine.quantization.weight import Quantised
from engine.sampling.staging import to_device, with_device_tokens


@dataclass(frozen=True, slots=True)
class LayerCache:
    """KV cache of one layer. Keys and values are [num_blocks, block_size, G, D] each. In int8 and FP8 the last
    dimension is a record of D + 4 elements, see `engine.quantization.kv_cache`."""

    keys: torch.Tensor
    values: torch.Tensor

    def write(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write rows.

        Args:
            slots: [N] int64 KV slot of each row.
            keys, values: [N, G, D].
        """
        for cache, rows in ((self.keys, keys), (self.values, values)):
            records = quantised(rows, cache.dtype) if cache.dtype in RECORDS else rows
            cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, records)


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
    attention: dict[int, Any]
    """Results of `Attention.prepare`, by window."""


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
    mlp: Block
    o_norm: RmsNorm | None = None
    """Norm of the output of attention; None if it has none."""
    output_norm: RmsNorm | None = None
    """Norm of the output of the MLP; None if it has none."""
    window: int = 0
    """Tokens that a row attends to, its own included; 0 means all."""
    is_local: bool = False
    """Whether it has the rotation of the local layers."""


def dense_mlp(layer: Layer) -> GatedMlp:
    """The MLP of a layer without experts.

    Raises:
        TypeError: it has experts.
    """
    if not isinstance(layer.mlp, GatedMlp):
        raise TypeError("a layer of experts has no dense MLP")
    return layer.mlp


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of one shard."""

    embedding: torch.Tensor | Quantised
    """[vocab_size, hidden_size], the whole table on each shard. Quantised for the native kernels only."""
    layers: tuple[Layer, ...]
    final_norm: RmsNorm
    head: Linear
    """hidden -> this shard's part of the logit columns."""
    draft_vocab: torch.Tensor | None
    """[draft_vocab_size] int64 target token id of each logit column; None when column i is token i."""


class Decoder:
    """One shard of a model. `engine.model.load.load_model` makes it.

    Args:
        config: of the model.
        weights: of this shard.
        compute: device and dtype.
        collectives: connects the shards.
        attention: computes attention over the KV cache, for each window of a layer.
        feature_layers: layers whose outputs a forward also returns, ascending.
    """

    own_threads = False
    """Whether a forward uses threads of its own instead of PyTorch's."""
    packed = PackedWeights()
    """What stays quantised: nothing."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        compute: Compute,
        *,
        collectives: Collectives,
        attention: Mapping[int, Attention],
        feature_layers: tuple[int, ...],
    ) -> None:
        self.config = config
        self.shard = ShardSpec(collectives.rank, collectives.size)
        self.dtype = compute.dtype
        self.device = compute.device
        self.draft_vocab = weights.draft_vocab
        self._attention = attention
        # In the dtype of the model, as `transformers` has it.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=self.dtype, device=self.device)
        self._collectives = collectives
        self.feature_layers = feature_layers
        self._weights = weights
        self._rope = Rope(config, dtype=self.dtype, device=self.device)
        has_local = config.local_rope_theta is not None
        self._local_rope = Rope(config, dtype=self.dtype, device=self.device, is_local=True) if has_local else None
        self._head_columns = self.shard.parts(self.logit_width)
        heads, kv_heads = self.shard.query_heads(config), self.shard.kv_heads(config)
        self.num_kv_heads = kv_heads.stop - kv_heads.start
        self._num_heads = heads.stop - heads.start

    @property
    def embedding(self) -> torch.Tensor:
        """[vocab_size, hidden_size] token embeddings."""
        table = self._weights.embedding
        return table.dequantised() if isinstance(table, Quantised) else table

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
        hidden = self._embed(inputs.token_ids) if embedded is None else embedded
        rotation = self._rope.at(inputs.positions)
        local = rotation if self._local_rope is None else self._local_rope.at(inputs.positions)
        features = []
        for index, (layer, cache) in enumerate(zip(self._weights.layers, caches, strict=True)):
            normed = layer.input_norm(hidden)
            hidden = self._attend(layer, normed, hidden, local if layer.is_local else rotation, cache, inputs)
            hidden = self._residual(layer.mlp, layer.mlp_norm(hidden), hidden, layer.output_norm)
            if index in self.feature_layers:
                features.append(hidden)
        return self._result(hidden, features, inputs)

    def _result(self, hidden: torch.Tensor, features: list[torch.Tensor], inputs: Inputs) -> ForwardResult:
        """The result of a forward from the output of the last layer and those of the feature layers."""
        return ForwardResult(
            logits=self._logits(hidden, inputs.logit_rows),
            hidden=torch.cat(features, dim=1) if features else None,
        )

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        hidden = F.embedding(token_ids, self.embedding)
        return hidden if self.config.embedding_scale == 1.0 else hidden * self._embedding_scale

    def move(self, moves: npt.NDArray[np.int32], caches: list[LayerCache]) -> None:
        """Move the content of KV slots.

        Args:
            moves: [M, 2] KV slots from, to; see `ForwardInput.moves`.
            caches: KV cache of each layer.
        """
        source, target = to_device([moves[:, 0].astype(np.int64), moves[:, 1].astype(np.int64)], self.device)
        for cache in caches:
            for values in (cache.keys, cache.values):
                slots = values.view(-1, values.shape[2] * values.shape[3])
                slots.index_copy_(0, target, slots.index_select(0, source))

    def masks_trees(self, max_q: int) -> bool:
        """Whether its attention on a GPU takes trees of at most `max_q` rows as it takes chains."""
        attention = self._attention.get(0)
        return isinstance(attention, VarlenAttention) and attention.masks_trees(max_q)

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
            attention={
                window: attention.prepare(forward_input, block_size=block_size)
                for window, attention in self._attention.items()
            },
        )

    def _attend(
        self,
        layer: Layer,
        normed: torch.Tensor,
        hidden: torch.Tensor,
        rotation: Rotation,
        cache: LayerCache,
        inputs: Inputs,
    ) -> torch.Tensor:
        """hidden + attention of the normed input."""
        heads, kv_heads, head_dim = self._num_heads, self.num_kv_heads, self.config.head_dim
        qkv = layer.qkv(normed).view(-1, heads + 2 * kv_heads, head_dim)  # [N, H + 2 G, D]
        if layer.q_norm is not None and layer.k_norm is not None:
            query = rotation.apply(layer.q_norm(qkv[:, :heads]))
            key = rotation.apply(layer.k_norm(qkv[:, heads : heads + kv_heads]))
        else:
            rotated = rotation.apply(qkv[:, : heads + kv_heads])
            query, key = rotated[:, :heads], rotated[:, heads:]
        cache.write(inputs.slots, key, qkv[:, heads + kv_heads :])
        context = self._context(layer, query, cache, inputs)
        return self._residual(layer.o, context, hidden, layer.o_norm)

    def _context(self, layer: Layer, query: torch.Tensor, cache: LayerCache, inputs: Inputs) -> torch.Tensor:
        """Attention of a layer, [N, H * D]."""
        window = layer.window
        return self._attention[window].attend(query, cache.keys, cache.values, inputs.attention[window])

    def _residual(self, block: Block, x: torch.Tensor, hidden: torch.Tensor, norm: RmsNorm | None) -> torch.Tensor:
        """hidden + the sum of block(x) over all shards, with its norm. Rank 0 adds the residual and the bias."""
        if norm is not None:
            out = block(x)
            self._collectives.all_reduce(out)
            return hidden + norm(out)
        out = block.plus(x, hidden) if self.shard.rank == 0 else block(x)
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
