"""Logits of a target with adapters against the model with the same adapter merged into its weights.

Promise: within 1e-4 in float32 for every family, and within the bound of bfloat16. The bits of a row in float32 depend
on its own adapter only.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from native_library import needs_library
from tiny_adapters import write_adapter, write_merged
from tiny_models import (
    FAMILIES,
    VOCAB,
    TokenRange,
    forward_input_of,
    reference_logits,
    scattered_blocks,
    write_model,
)

from engine.checkpoint.model_config import ModelConfig
from engine.errors import EngineError
from engine.lora.adapter_files import read_adapter
from engine.lora.adapter_set import AdapterSet
from engine.model.device import KernelKind
from engine.model.load import load_model
from engine.model.native.decoder import NativeDecoder
from engine.model.runner import ModelRunner

TOLERANCE = 1e-4
BLOCK_SIZE, NUM_BLOCKS = 16, 64
LENGTHS = (33, 1, 7, 21, 2)
NATIVE = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 64, "num_attention_heads": 6}
"""Sizes that the native kernel computes."""
VARIANTS: dict[str, dict[str, Any]] = {
    "all": {},
    "attention": {"targets": ("q_proj", "v_proj", "qkv_proj")},
    "patterns": {"alpha": 3.0, "ranks": {"o_proj": 5, "down_proj": 1}, "alphas": {"o_proj": 1.5}, "use_rslora": True},
}


class Adapted:
    """A target with numbered adapters.

    Args:
        folder: of the target.
        adapters: folders, by number from 1 on.
    """

    def __init__(
        self, folder: Path, *adapters: Path, dtype: torch.dtype = torch.float32, kernel: KernelKind = "torch"
    ) -> None:
        self.adapters = AdapterSet(dtype=dtype, device=torch.device("cpu"))
        self.model = load_model(folder, dtype=dtype, kernel=kernel, adapt=self.adapters.wrap)
        self.adapters.bind(self.model)
        for number, adapter in enumerate(adapters, start=1):
            self.adapters.load(number, read_adapter(adapter, self.model.config, max_rank=8))

    def logits(self, prompts: list[list[int]], numbers: list[int]) -> list[torch.Tensor]:
        """Logits of every row, with adapter `numbers[i]` for prompt i, in one forward over a fresh cache."""
        runner = ModelRunner(self.model, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        lengths = [len(prompt) for prompt in prompts]
        blocks = scattered_blocks(lengths, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        ranges = [TokenRange(p, 0, len(p), owned) for p, owned in zip(prompts, blocks, strict=True)]
        forward_input = forward_input_of(ranges, block_size=BLOCK_SIZE)
        if any(numbers):
            forward_input = replace(forward_input, adapters=np.array(numbers, dtype=np.int32))
        self.adapters.choose(forward_input)
        return list(runner.forward(forward_input).require_logits().split(lengths))


def prompts_of(seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]


def largest_gap(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max((ours - theirs).abs().max().item() for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_equals_the_merged_model(tmp_path: Path, family: str, variant: str) -> None:
    model = write_model(tmp_path / "model", family)
    options = VARIANTS[variant]
    adapter = write_adapter(tmp_path / "adapter", model, **options)
    merged = write_merged(tmp_path / "merged", model, adapter)
    prompts = prompts_of()
    expected, plain = reference_logits(merged, prompts), reference_logits(model, prompts)
    adapted = Adapted(model, adapter)
    assert largest_gap(adapted.logits(prompts, [1] * len(prompts)), expected) < TOLERANCE
    assert largest_gap(adapted.logits(prompts, [0] * len(prompts)), plain) < TOLERANCE
    assert largest_gap(plain, expected) > 0.1, "the adapter changes too little to be noticed"


@pytest.mark.parametrize(
    ("dtype", "kernel"),
    [
        (torch.float32, "torch"),
        (torch.bfloat16, "torch"),
        pytest.param(torch.bfloat16, "native", marks=needs_library),
    ],
)
def test_a_row_of_a_mixed_batch_has_the_bits_of_its_adapter_alone(
    tmp_path: Path, dtype: torch.dtype, kernel: KernelKind
) -> None:
    model = write_model(tmp_path / "model", "qwen2", **NATIVE)
    first = write_adapter(tmp_path / "first", model, rank=4)
    second = write_adapter(tmp_path / "second", model, rank=2, targets=("v_proj", "down_proj"), seed=1)
    adapted = Adapted(model, first, second, dtype=dtype, kernel=kernel)
    prompts = prompts_of()
    mixed = adapted.logits(prompts, [1, 0, 2, 1, 2])
    for number in (0, 1, 2):
        alone = adapted.logits(prompts, [number] * len(prompts))
        for index, chosen in enumerate([1, 0, 2, 1, 2]):
            if chosen == number:
                assert torch.equal(mixed[index], alone[index]), (number, index)
    assert not torch.equal(mixed[0], adapted.logits(prompts, [2] * len(prompts))[0])
    unadapted = Adapted(model, dtype=dtype, kernel=kernel).logits(prompts, [0] * len(prompts))
    assert torch.equal(mixed[1], unadapted[1])


NATIVE_VARIANTS: dict[str, dict[str, Any]] = VARIANTS | {
    "query only": {"targets": ("q_proj",)},
    "value and up": {"targets": ("v_proj", "up_proj")},
}


@needs_library
@pytest.mark.parametrize("variant", NATIVE_VARIANTS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_native_kernel_is_as_close_as_the_merged_model_on_it(tmp_path: Path, family: str, variant: str) -> None:
    """Both round; the adapted model adds in float32, so it may only be closer to float32, or as close by chance."""
    model = write_model(tmp_path / "model", family, **NATIVE)
    adapter = write_adapter(tmp_path / "adapter", model, **({"size": 0.1} | NATIVE_VARIANTS[variant]))
    merged = write_merged(tmp_path / "merged", model, adapter)
    prompts = prompts_of()
    exact, plain = reference_logits(merged, prompts), reference_logits(model, prompts)
    adapted = Adapted(model, adapter, dtype=torch.bfloat16, kernel="native")
    assert isinstance(adapted.model, NativeDecoder)
    found = adapted.logits(prompts, [1] * len(prompts))
    theirs = Adapted(merged, dtype=torch.bfloat16, kernel="native").logits(prompts, [0] * len(prompts))
    assert largest_gap(found, exact) < 2 * largest_gap(theirs, exact)
    assert largest_gap(found, exact) < largest_gap(plain, exact) / 2, "the adapter is not noticed"


@needs_library
def test_a_dropped_adapter_is_gone_on_the_native_kernel_too(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "llama", **NATIVE)
    first, second = (write_adapter(tmp_path / str(seed), model, seed=seed) for seed in (1, 2))
    adapted = Adapted(model, first, second, dtype=torch.bfloat16, kernel="native")
    prompts = prompts_of()
    before = adapted.logits(prompts, [2, 0, 2, 0, 2])
    adapted.adapters.drop(1)
    after = adapted.logits(prompts, [2, 0, 2, 0, 2])
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    with pytest.raises(EngineError, match=r"adapters \[1\] are not loaded"):
        adapted.logits(prompts, [1, 0, 2, 0, 2])
    plain = Adapted(model, dtype=torch.bfloat16, kernel="native").logits(prompts, [0] * len(prompts))
    assert all(torch.equal(a, b) for a, b in zip(adapted.logits(prompts, [0] * len(prompts)), plain, strict=True))


def test_bfloat16_is_as_close_as_the_merged_model_in_bfloat16(tmp_path: Path) -> None:
    """Both round; neither may be much further from float32 than the other."""
    model = write_model(tmp_path / "model", "llama")
    adapter = write_adapter(tmp_path / "adapter", model, size=0.1)
    merged = write_merged(tmp_path / "merged", model, adapter)
    prompts = prompts_of()
    exact = reference_logits(merged, prompts)
    ours = largest_gap(Adapted(model, adapter, dtype=torch.bfloat16).logits(prompts, [1] * len(prompts)), exact)
    theirs = largest_gap(Adapted(merged, dtype=torch.bfloat16).logits(prompts, [0] * len(prompts)), exact)
    assert ours < 2 * theirs


def test_a_dropped_adapter_is_gone_and_the_others_stay(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "llama")
    first = write_adapter(tmp_path / "first", model)
    second = write_adapter(tmp_path / "second", model, seed=1)
    adapted = Adapted(model, first, second)
    prompts = prompts_of()
    before = adapted.logits(prompts, [2, 0, 2, 0, 2])
    adapted.adapters.drop(1)
    adapted.adapters.drop(7)
    after = adapted.logits(prompts, [2, 0, 2, 0, 2])
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    with pytest.raises(EngineError, match=r"adapters \[1\] are not loaded"):
        adapted.logits(prompts, [1, 0, 2, 0, 2])


def test_a_failed_load_leaves_nothing(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "llama")
    adapted = Adapted(model)
    spec = read_adapter(write_adapter(tmp_path / "bad", model, size=float("inf")), ModelConfig.load(model), max_rank=8)
    with pytest.raises(Exception, match="not finite"):
        adapted.adapters.load(1, spec)
    with pytest.raises(EngineError):
        adapted.logits(prompts_of(), [1] * len(LENGTHS))
