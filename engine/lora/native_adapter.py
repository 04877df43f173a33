"""An adapter as the native kernel reads it: for each layer the matrices A and B of its seven products.

Owns the matrices, [rank, inputs] and [rank, outputs] in float32. The kernel adds B A x in float32 to the rows of the
adapter, one row at a time, so a row does not depend on others. Knows no files.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from engine.checkpoint.model_config import ModelConfig
from engine.lora.layers import LowRank, OutputPart
from engine.model.native.library import LayerAdapter, NativeLowRank


class NativeAdapter:
    """One adapter.

    Args:
        config: of the target.
        layers: in order; for each layer the adapter's part in gate, up, down, fused q, k and v, and o. None where it
            leaves the product as it is.
    """

    def __init__(self, config: ModelConfig, layers: Sequence[Sequence[LowRank | None]]) -> None:
        num_q, num_kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self._starts = (0, num_q, num_q + num_kv)
        self._matrices: list[torch.Tensor] = []
        self._layers = (LayerAdapter * len(layers))(*(self._layer(*products) for products in layers))

    @property
    def address(self) -> int:
        """Address of the first layer."""
        return ctypes.addressof(self._layers)

    def _layer(self, *products: LowRank | None) -> LayerAdapter:
        gate, up, down, qkv, o = products
        attention = (self._low_rank(qkv, start) for start in self._starts)
        return LayerAdapter(*attention, *(self._low_rank(product) for product in (o, gate, up, down)))

    def _low_rank(self, product: LowRank | None, start: int = 0) -> NativeLowRank:
        """The part of a product whose outputs begin at `start`."""
        parts: Sequence[OutputPart] = () if product is None else product.parts
        for part in parts:
            if product is not None and part.columns.start == start:
                a, b = product.a[part.ranks].float().contiguous(), part.b.float().T.contiguous()
                self._matrices += [a, b]
                return NativeLowRank(a=a.data_ptr(), b=b.data_ptr(), rank=len(a))
        return NativeLowRank(a=None, b=None, rank=0)
