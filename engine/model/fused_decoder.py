"""The decoder with fused Triton kernels: at most 11 launches per layer of the Llama family.

Owns the order of operations that the fusion needs: every shard keeps the residual and adds the sum over shards to it
together with the next norm. `engine.model.decoder` is its slow twin. Owns also which products a batch-invariant decoder
replaces.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from engine.checkpoint.model_config import ModelConfig
from engine.core.step import ForwardResult
from engine.kernels.elementwise import add_rms_norm, silu_mul
from engine.kernels.linear import linear
from engine.kernels.rope_cache import rope_cache
from engine.model.decoder import Decoder, DecoderWeights, Inputs, Layer, LayerCache, dense_mlp
from engine.model.device import Compute
from engine.model.layers import GatedMlp, Linear, PlainLinear
from engine.model.rope import Rotation


class FusedDecoder(Decoder):
    """One shard of a model on a GPU. Same arguments and results as `Decoder`."""

    def compute(self, inputs: Inputs, caches: list[LayerCache], embedded: torch.Tensor | None = None) -> ForwardResult:
        """As `Decoder.compute`."""
        layers, eps = self._weights.layers, self.config.rms_norm_eps
        hidden = F.embedding(inputs.token_ids, self.embedding) if embedded is None else embedded.clone()
        rotation = self._rope.at(inputs.positions)
        norms = [layer.input_norm for layer in layers[1:]] + [self._weights.final_norm]
        normed = layers[0].input_norm(hidden)
        kept = []
        for index, (layer, cache, next_norm) in enumerate(zip(layers, caches, norms, strict=True)):
            delta = self._attention_delta(layer, normed, rotation, cache, inputs)
            normed = add_rms_norm(hidden, delta, layer.mlp_norm.weight, eps)
            normed = add_rms_norm(hidden, self._mlp_delta(layer, normed), next_norm.weight, eps)
            if index in self.feature_layers:
                kept.append(hidden.clone())  # The next layer changes it in place.
        return ForwardResult(
            logits=self._logits_of_normed(normed, inputs.logit_rows),
            hidden=torch.cat(kept, dim=1) if kept else None,
        )

    def _attention_delta(
        self, layer: Layer, normed: torch.Tensor, rotation: Rotation, cache: LayerCache, inputs: Inputs
    ) -> torch.Tensor:
        """What attention adds to the residual, summed over the shards."""
        heads, kv_heads = self._num_heads, self.num_kv_heads
        qkv = layer.qkv(normed).view(-1, heads + 2 * kv_heads, self.config.head_dim)
        q_weight = None if layer.q_norm is None else layer.q_norm.weight
        k_weight = None if layer.k_norm is None else layer.k_norm.weight
        rope_cache(
            *(qkv, rotation.cos, rotation.sin, inputs.slots, cache.keys, cache.values),
            *(q_weight, k_weight, self.config.rms_norm_eps),
        )
        context = self._context(layer, qkv[:, :heads], cache, inputs)
        return self._summed(layer.o(context))

    def _mlp_delta(self, layer: Layer, normed: torch.Tensor) -> torch.Tensor:
        """What the MLP adds to the residual, summed over the shards."""
        mlp = dense_mlp(layer)
        gate = mlp.gate(normed)
        silu_mul(gate, mlp.up(normed))
        return self._summed(mlp.down(gate))

    def _summed(self, out: torch.Tensor) -> torch.Tensor:
        self._collectives.all_reduce(out)
        return out


class InvariantDecoder(FusedDecoder):
    """A whole model whose rows do not depend on the other rows of a forward: norms, rotations and activations are
    computed row by row, products and attention by kernels that never choose their sums by the batch.

    The arguments are those of `Decoder`, with attention of the kind `invariant`.
    """

    def __init__(self, config: ModelConfig, weights: DecoderWeights, compute: Compute, **options: Any) -> None:
        layers = tuple(_invariant(layer) for layer in weights.layers)
        super().__init__(config, replace(weights, layers=layers, head=_product(weights.head)), compute, **options)


class InvariantLinear(PlainLinear):
    """A linear layer in one kernel, for any number of rows."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = linear(x.contiguous(), self.weight, self.bias)
        return out


def _invariant(layer: Layer) -> Layer:
    mlp = dense_mlp(layer)
    parts = [_product(part) for part in (mlp.gate, mlp.up, mlp.down)]
    return replace(layer, qkv=_product(layer.qkv), o=_product(layer.o), mlp=GatedMlp(*parts))


def _product(part: Linear) -> InvariantLinear:
    if not isinstance(part, PlainLinear):
        raise TypeError(f"{type(part).__name__} has no batch-invariant twin")
    return InvariantLinear(part.weight.contiguous(), part.bias)
