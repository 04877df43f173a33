"""The native decoder against its slow twin and against itself.

Promise: as close to float32 as PyTorch's bfloat16, for every family that it computes. The bits of a row do not depend
on the other rows of the forward, on chunks or on the number of threads, so verifying several drafted tokens at once
gives exactly the logits of one at a time.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from native_library import needs_library
from tiny_models import (
    FAMILIES,
    VOCAB,
    TokenRange,
    forward_input_of,
    random_cuts,
    reference_logits,
    run_cuts,
    write_model,
)

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model.load import load_model
from engine.model.native import NativeUnavailable, library, load_library
from engine.model.native.decoder import NativeDecoder
from engine.model.runner import ModelRunner

SIZES = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 64, "num_attention_heads": 6}
NUM_BLOCKS = 120
BEYOND_LLAMA = {
    "mistral-window": "sliding windows",
    "qwen3-window": "sliding windows",
    "gemma3_text": "sliding windows",
    "phi3": "sliding windows",
    "mixtral": "experts",
    "qwen3_moe": "experts",
}
"""Families that only the PyTorch kernels compute, and the first reason."""


def native_runner(
    folder: Path, *, threads: int = 2, kv_dtype: torch.dtype | None = None, **options: object
) -> ModelRunner:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = load_model(folder, kernel="native", **options)  # type: ignore[arg-type]
    finally:
        torch.set_num_threads(before)
    assert isinstance(model, NativeDecoder)
    return ModelRunner(model, num_blocks=NUM_BLOCKS, block_size=16, kv_dtype=kv_dtype)


@needs_library
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in BEYOND_LLAMA])
def test_is_as_close_to_float32_as_the_slow_twin(tmp_path: Path, family: str) -> None:
    folder = write_model(tmp_path, family, **{**SIZES, "head_dim": 128 if family == "mistral" else 64})
    rng = random.Random(family)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (1, 15, 16, 17, 130, 260)]
    exact = reference_logits(folder, prompts)
    cuts = [random_cuts(rng, len(prompt), 150) for prompt in prompts]
    slow = run_cuts(
        ModelRunner(load_model(folder, kernel="torch"), num_blocks=NUM_BLOCKS, block_size=16), prompts, cuts
    )
    ours = run_cuts(native_runner(folder), prompts, cuts)
    for mine, theirs, right in zip(ours, slow, exact, strict=True):
        assert mine.shape == right.shape
        assert (mine - right).abs().mean() < 1.1 * (theirs - right).abs().mean()


@pytest.mark.parametrize("family", BEYOND_LLAMA)
def test_a_family_that_it_does_not_compute_is_refused_by_name(tmp_path: Path, family: str) -> None:
    folder = write_model(tmp_path, family, **SIZES)
    with pytest.raises(ConfigError, match=f"kernel: native given, but it does not compute {BEYOND_LLAMA[family]}"):
        load_model(folder, kernel="native")
    assert not isinstance(load_model(folder), NativeDecoder)


@needs_library
@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=["bfloat16", "int8"])
def test_a_row_does_not_depend_on_its_neighbours_cuts_or_threads(tmp_path: Path, kv_dtype: torch.dtype | None) -> None:
    folder = write_model(tmp_path, "qwen3", **SIZES)
    rng = random.Random(5)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (40, 90, 90, 230)]
    alone = [run_cuts(native_runner(folder, kv_dtype=kv_dtype), [prompt], [[1] * len(prompt)])[0] for prompt in prompts]
    for threads in (1, 2, 3, 5):
        runner = native_runner(folder, threads=threads, kv_dtype=kv_dtype)
        for longest in (7, 200):
            together = run_cuts(runner, prompts, [random_cuts(rng, len(prompt), longest) for prompt in prompts])
            for mine, expected in zip(together, alone, strict=True):
                assert torch.equal(mine, expected)


@needs_library
def test_features_are_those_of_the_slow_twin(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "llama", **SIZES)
    forward_input = forward_input_of([TokenRange(range(30), 0, 30, [3, 1])], block_size=16)
    runner = native_runner(folder, feature_layers=(0, 2))
    slow = ModelRunner(
        load_model(folder, kernel="torch", dtype=torch.float32, feature_layers=(0, 2)), num_blocks=4, block_size=16
    )
    found, expected = runner.forward(forward_input).hidden, slow.forward(forward_input).hidden
    assert found is not None
    assert expected is not None
    assert found.shape == expected.shape
    assert torch.allclose(found.float(), expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))


@needs_library
def test_no_logit_rows_gives_an_empty_result(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "llama", **SIZES)
    forward_input = forward_input_of([TokenRange([5, 6, 7], 0, 3, [0])], block_size=16)
    result = native_runner(folder).forward(replace(forward_input, logit_rows=forward_input.logit_rows[:0]))
    assert result.require_logits().shape == (0, VOCAB)


@needs_library
def test_idle_threads_use_no_cpu_time(tmp_path: Path) -> None:
    runner = native_runner(write_model(tmp_path, "llama", **SIZES), threads=4)
    forward_input = forward_input_of([TokenRange([5, 6, 7], 0, 3, [0])], block_size=16)
    for _ in range(3):  # also: they wake up again
        runner.forward(forward_input)
        time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1


@pytest.mark.parametrize(
    ("sizes", "options", "reason"),
    [
        (SIZES, {"dtype": torch.float32}, "float32"),
        ({**SIZES, "head_dim": 32}, {}, "head_dim is 32"),
        ({**SIZES, "hidden_size": 72}, {}, "hidden_size is 72"),
        ({**SIZES, "intermediate_size": 80}, {}, "intermediate_size is 80"),
    ],
)
def test_an_unsupported_model_or_machine_is_named(
    tmp_path: Path, sizes: dict[str, int], options: dict[str, object], reason: str
) -> None:
    folder = write_model(tmp_path, "llama", **sizes)
    with pytest.raises(ConfigError, match=reason):
        load_model(folder, kernel="native", **options)  # type: ignore[arg-type]
    assert not isinstance(load_model(folder, **options), NativeDecoder)  # type: ignore[arg-type]


def test_a_machine_without_a_compiler_uses_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    load_library.cache_clear()
    try:
        with pytest.raises(NativeUnavailable, match=r"compiler|lacks|needs Linux"):
            load_library()
        assert not isinstance(load_model(write_model(tmp_path / "model", "llama", **SIZES)), NativeDecoder)
    finally:
        load_library.cache_clear()


def test_a_failing_compiler_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/bin/false")
    with pytest.raises(NativeUnavailable, match="/bin/false failed"):
        library.build()


def test_block_size_must_hold_whole_tiles() -> None:
    with pytest.raises(ConfigError, match="block_size: 8 given; kernel native takes multiples of 16"):
        EngineConfig.parse({"model": "smollm2", "block_size": 8, "kernel": "native"})
    assert EngineConfig.parse({"model": "smollm2", "block_size": 8}).forward_kernel == "torch"
