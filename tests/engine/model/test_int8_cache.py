"""An int8 KV cache: one scale per token and KV head.

Promise: a value is off by at most half a step of its scale. Attention is that of the dequantised cache within rounding.
Logits are close to those of a float cache, for every family and on both kernels. The bits of a row do not depend on
other rows; for the native kernel, `test_native_decoder.py` and `test_trees.py` prove that.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from native_library import needs_library
from tiny_models import (
    FAMILIES,
    VOCAB,
    TokenRange,
    forward_input_of,
    random_cuts,
    run_cuts,
    scattered_blocks,
    write_model,
)

from engine.checkpoint.model_config import ModelConfig
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model.attention import ReferenceAttention, make_attention
from engine.model.device import pick_kv_dtype
from engine.model.load import load_model
from engine.model.runner import ModelRunner, kv_bytes_per_token, num_kv_blocks
from engine.quantization.kv_cache import SCALE_BYTES, dequantised, quantised

CPU = torch.device("cpu")
SIZES = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 64, "num_attention_heads": 6}
CLOSE = 0.15
"""Bound of the relative error of logits, in the 2-norm over all rows, of tiny random models."""


def test_a_value_is_off_by_half_a_step_at_most() -> None:
    values = (
        torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 6, 50)[:, None, None]
    )
    values[7] = 0
    records = quantised(values)
    assert records.shape == (50, 3, 64 + SCALE_BYTES)
    step = values.abs().amax(-1, keepdim=True) / 127
    assert ((dequantised(records, torch.float32) - values).abs() <= 0.5001 * step).all()
    assert not dequantised(records, torch.float32)[7].any()


def test_a_record_depends_on_its_own_row_only() -> None:
    values = torch.randn(40, 2, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    assert torch.equal(quantised(values)[11], quantised(values[11:12])[0])


@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_that_of_the_dequantised_cache(window: int, dtype: torch.dtype) -> None:
    lengths = [1, 16, 40, 130]
    blocks = scattered_blocks(lengths, num_blocks=16, block_size=16)
    spans = [TokenRange([0] * n, max(0, n - 5), n, own) for n, own in zip(lengths, blocks, strict=True)]
    forward_input = forward_input_of(spans, block_size=16)
    generator = torch.Generator().manual_seed(3)
    caches = [quantised(torch.randn(16, 16, 2, 32, generator=generator)) for _ in range(2)]
    floats = [dequantised(cache, dtype) for cache in caches]
    query = torch.randn(len(forward_input.token_ids), 6, 32, generator=generator).to(dtype)
    for attention in (
        make_attention("padded", group_size=3, dtype=dtype, device=CPU, window=window),
        ReferenceAttention(window=window),
    ):
        prepared = attention.prepare(forward_input, block_size=16)
        found, expected = (attention.attend(query, *pair, prepared) for pair in (caches, floats))
        bound = 1e-5 if dtype is torch.float32 else 0.02
        assert (found.float() - expected.float()).abs().max().item() < bound


def logits(folder: Path, kv_dtype: torch.dtype | None, **options: Any) -> torch.Tensor:
    """Logits of several prompts, computed in random chunks."""
    rng = random.Random(4)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (1, 16, 40, 90)]
    cuts = [random_cuts(rng, len(prompt), 30) for prompt in prompts]
    runner = ModelRunner(load_model(folder, **options), num_blocks=20, block_size=16, kv_dtype=kv_dtype)
    return torch.cat(run_cuts(runner, prompts, cuts))


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_close_to_those_of_a_float_cache(tmp_path: Path, family: str) -> None:
    folder = write_model(tmp_path, family)
    options: dict[str, Any] = {"dtype": torch.float32, "kernel": "torch"}
    off = distance(logits(folder, torch.int8, **options), logits(folder, None, **options))
    assert 0 < off < CLOSE


@needs_library
def test_the_native_kernel_is_as_close_as_pytorch_s_operators(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "qwen3", **SIZES)
    exact = logits(folder, None, dtype=torch.float32, kernel="torch")
    slow = distance(logits(folder, torch.int8, kernel="torch"), exact)
    assert distance(logits(folder, torch.int8, kernel="native"), exact) < 1.1 * slow


def test_settings_and_memory() -> None:
    config = EngineConfig.parse({"model": "m", "kv_cache_dtype": "int8", "device": "cpu"})
    assert pick_kv_dtype(config, torch.bfloat16) is torch.int8
    assert pick_kv_dtype(EngineConfig.parse({"model": "m"}), torch.bfloat16) is torch.bfloat16
    with pytest.raises(ConfigError, match="kv_cache_dtype: int8 given, but device is cuda"):
        EngineConfig.parse({"model": "m", "kv_cache_dtype": "int8", "device": "cuda"})
    model = ModelConfig.parse({"model_type": "llama", "vocab_size": 8, **SIZES, "num_hidden_layers": 3})
    assert kv_bytes_per_token(model, dtype=torch.int8) == 2 * 3 * model.num_kv_heads * (64 + SCALE_BYTES)
    blocks = [
        num_kv_blocks(model, block_size=16, dtype=dtype, device=CPU, memory_bytes=1 << 24)
        for dtype in (torch.bfloat16, torch.int8)
    ]
    assert blocks[1] / blocks[0] == pytest.approx(128 / 68, rel=0.01)
