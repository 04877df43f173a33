"""Decoders of published shapes on a fake CUDA device: real code, no values, a few layers.

Use them inside `fake_cuda.fake_cuda()`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from fake_cuda import CUDA

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weights import WHOLE, ShardSpec
from engine.config import CUDA_PAGE
from engine.medusa.heads import MedusaHeads
from engine.model.attention import make_attention
from engine.model.collectives import Collectives, Solo
from engine.model.decoder import Decoder, LayerCache
from engine.model.device import Compute
from engine.model.eagle_head import EagleHead
from engine.model.fused_decoder import FusedDecoder, InvariantDecoder
from engine.model.layers import RmsNorm, make_linear
from engine.model.shard_weights import Loader
from engine.quantization.kv_cache import FP8, record_len

NUM_BLOCKS = 40


class ShapeFiles:
    """Files that hold every tensor, of any shape asked for."""

    folder = "shapes"

    def __contains__(self, name: str) -> bool:
        return True

    def read_float(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: slice | None = None,
        cols: slice | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        whole = slice(None)
        return tensor[rows or whole] if len(shape) == 1 else tensor[rows or whole, cols or whole]

    def check_all_read(self, ignore: Any = ()) -> None:
        pass


def fake_decoder(
    shape: dict[str, Any],
    *,
    num_layers: int,
    collectives: Collectives | None = None,
    feature_layers: tuple[int, ...] = (),
    fused: bool = False,
    invariant: bool = False,
    fp8_cache: bool = False,
) -> tuple[Decoder, list[LayerCache]]:
    """A decoder with `num_layers` layers of this shape, and its cache."""
    config = ModelConfig.parse(shape | {"num_hidden_layers": num_layers})
    compute = Compute(torch.bfloat16, CUDA, "auto")
    group = collectives or Solo()
    shard = ShardSpec(group.rank, group.size) if group.size > 1 else WHOLE
    files: Any = ShapeFiles()
    weights = Loader(config, files, compute, shard=shard, linear="auto").decoder(None)
    fold = config.num_heads // config.num_kv_heads
    attention = make_attention(
        "invariant" if invariant else "triton" if fused else "auto",
        group_size=fold,
        dtype=torch.bfloat16,
        device=CUDA,
        fp8_cache=fp8_cache,
    )
    decoder = (InvariantDecoder if invariant else FusedDecoder if fused else Decoder)(
        config, weights, compute, collectives=group, attention={0: attention}, feature_layers=feature_layers
    )
    kv_dtype = FP8 if fp8_cache else torch.bfloat16
    size = (NUM_BLOCKS, CUDA_PAGE, decoder.num_kv_heads, record_len(config.head_dim, kv_dtype))
    caches = [
        LayerCache(*(torch.zeros(size, dtype=kv_dtype, device=CUDA) for _ in range(2))) for _ in range(num_layers)
    ]
    return decoder, caches


def fake_eagle(shape: dict[str, Any], *, is_parallel: bool = False) -> tuple[EagleHead, Decoder, list[LayerCache]]:
    """An eagle draft of one layer for a target of this shape."""
    decoder, caches = fake_decoder(shape, num_layers=1, feature_layers=(0,))
    hidden, eps = shape["hidden_size"], 1e-5

    def weight(*size: int) -> torch.Tensor:
        return torch.empty(*size, dtype=torch.bfloat16, device=CUDA)

    square = [make_linear(weight(hidden, hidden)) for _ in range(2)]
    head = EagleHead(
        feature_norm=weight(3, hidden),
        fuse=make_linear(weight(hidden, 3 * hidden)),
        token_norm=RmsNorm(weight(hidden), eps),
        token=square[0],
        carry_norm=RmsNorm(weight(hidden), eps),
        carry=square[1],
        eps=eps,
        mask=weight(hidden) if is_parallel else None,
    )
    return head, decoder, caches


def fake_medusa(shape: dict[str, Any], *, num_heads: int) -> MedusaHeads:
    """Medusa heads with an output layer each, for a target of this shape."""
    hidden, vocab = shape["hidden_size"], shape["vocab_size"]

    def weight(*size: int) -> torch.Tensor:
        return torch.empty(*size, dtype=torch.bfloat16, device=CUDA)

    return MedusaHeads(
        config=dataclasses.replace(
            ModelConfig.parse({"medusa_num_heads": num_heads, "hidden_size": hidden, "vocab_size": vocab}),
            max_model_len=4096,
        ),
        norm=RmsNorm(weight(hidden), 1e-5),
        blocks=tuple((make_linear(weight(hidden, hidden), weight(hidden)),) for _ in range(num_heads)),
        outputs=tuple(make_linear(weight(vocab, hidden)) for _ in range(num_heads)),
        draft_vocab=None,
        device=CUDA,
        num_bytes=0,
    )
