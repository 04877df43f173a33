"""Quantised checkpoints: the logits are those of the dequantised weights, and what is not supported is refused.

Promise: in float32, within 1e-4 of `transformers` on the weights that the stored integers stand for. Parts of a weight
are the parts of the whole one.
"""

from __future__ import annotations

import copy
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_models import FORMATS, quantise
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB, reference_logits, run_cuts, write_model

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weights import WeightFiles
from engine.errors import ConfigError
from engine.model.load import load_model
from engine.model.runner import ModelRunner
from engine.quantization.config import Quantization

TOLERANCE = 1e-4
MODULE = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "llama"
    # 16 does not divide 72, so the last group and the last block are partly filled.
    return write_model(folder, "llama", intermediate_size=72)


def logits_of(folder: Path, prompt: list[int]) -> torch.Tensor:
    runner = ModelRunner(load_model(folder, dtype=torch.float32), num_blocks=20, block_size=8)
    return run_cuts(runner, [prompt], [[len(prompt)]])[0]


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_dequantised_weights(plain: Path, tmp_path: Path, name: str) -> None:
    quantised, dequantised = quantise(plain, tmp_path, FORMATS[name])
    rng = random.Random(1)
    prompt = [rng.randrange(VOCAB) for _ in range(40)]
    expected = reference_logits(dequantised, [prompt])[0]
    assert (logits_of(quantised, prompt) - expected).abs().max().item() < TOLERANCE
    assert (logits_of(plain, prompt) - expected).abs().max().item() > 10 * TOLERANCE, "nothing was quantised"


@pytest.mark.parametrize("name", FORMATS)
def test_a_part_is_the_part_of_the_whole(plain: Path, tmp_path: Path, name: str) -> None:
    quantised, dequantised = quantise(plain, tmp_path, FORMATS[name])
    files = WeightFiles(quantised, ModelConfig.load(quantised).quantization)
    expected = load_file(dequantised / "model.safetensors")[MODULE + ".weight"]
    shape = tuple(expected.shape)
    torch.testing.assert_close(files.read_float(MODULE + ".weight", shape), expected)
    rng = random.Random(2)
    for _ in range(10):
        rows, cols = (slice(*sorted(rng.sample(range(size + 1), 2))) for size in shape)
        part = files.read_float(MODULE + ".weight", shape, rows=rows, cols=cols)
        torch.testing.assert_close(part, expected[rows, cols])


def test_a_large_weight_is_dequantised_in_pieces(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantised, dequantised = quantise(plain, tmp_path, FORMATS["AWQ, 4-bit"])
    monkeypatch.setattr("engine.checkpoint.weights._CHUNK_ELEMENTS", 72 * 7)
    files = WeightFiles(quantised, ModelConfig.load(quantised).quantization)
    expected = load_file(dequantised / "model.safetensors")[MODULE + ".weight"]
    found = files.read_float(MODULE + ".weight", (48, 72), rows=slice(3, 48), dtype=torch.bfloat16)
    assert torch.equal(found, expected[3:].bfloat16())


def test_the_load_says_what_it_does_and_what_memory_it_takes(
    plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantised, _ = quantise(plain, tmp_path, FORMATS["compressed-tensors, int8 (W8A8), per channel"])
    with caplog.at_level("INFO"):
        load_model(quantised)
    (line,) = [record.getMessage() for record in caplog.records if "quantised" in record.getMessage()]
    assert re.fullmatch(
        r"quantised weights \(compressed-tensors 8-bit integers\), 0\.\d{3} GB in the files, are dequantised once to "
        r"bfloat16: 0\.\d{3} GB in memory; activations stay unquantised, and the KV cache is as kv_cache_dtype says",
        line,
    )


def changed(folder: Path, target: Path, **tensors: torch.Tensor | None) -> Path:
    """A copy with tensors of MODULE replaced, or dropped where None."""
    shutil.copytree(folder, target)
    stored = load_file(folder / "model.safetensors")
    for key, tensor in tensors.items():
        if tensor is None:
            del stored[f"{MODULE}.{key}"]
        else:
            stored[f"{MODULE}.{key}"] = tensor
    save_file(stored, target / "model.safetensors")
    return target


@pytest.mark.parametrize(
    ("name", "tensors", "message"),
    [
        ("AWQ, 4-bit", {"scales": None}, r"lacks tensor .*down_proj\.scales of shape \[5, 48\]"),
        ("AWQ, 4-bit", {"scales": torch.ones(5, 48, dtype=torch.int8)}, r"scales is of type torch\.int8"),
        ("AWQ, 4-bit", {"scales": torch.full((5, 48), float("nan"))}, r"scales is damaged: .* not finite"),
        ("FP8, per tensor", {"weight_scale": torch.tensor([float("inf")])}, r"weight_scale is damaged"),
        ("AWQ, 4-bit", {"qweight": torch.zeros(72, 6)}, r"qweight is of type torch\.float32; allowed: torch\.int32"),
        ("GPTQ, 4-bit, groups", {"qzeros": torch.zeros(2, 6, dtype=torch.int32)}, r"qzeros has shape \[2, 6\]"),
        ("GPTQ, 4-bit, act order", {"g_idx": torch.full((72,), 9).int()}, r"g_idx must hold .* within \[0, 5\)"),
        (
            "compressed-tensors, 4-bit (W4A16), groups",
            {"weight_scale": torch.ones(48, 3)},
            r"weight_scale has shape \[48, 3\] for a weight of \[48, 72\]; .* implies \[48, 5\]",
        ),
        (
            "compressed-tensors, 4-bit (W4A16), groups",
            {"weight_shape": torch.tensor([48, 71])},
            r"weight_shape holds \[48, 71\], but config\.json implies \[48, 72\]",
        ),
        (
            "compressed-tensors, int8, per channel, zero points",
            {"weight_zero_point": torch.zeros(3, 1, dtype=torch.int8)},
            r"weight_zero_point has shape \[3, 1\]",
        ),
        (
            "FP8, per tensor",
            {"weight": torch.zeros(48, 72, dtype=torch.int8)},
            r"weight is of type torch\.int8; quantization_config implies torch\.float8_e4m3fn",
        ),
        (
            "GPTQ, 4-bit, groups",
            {"bias": torch.ones(48)},
            r"1 tensors that config\.json does not imply: .*down_proj\.b",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    plain: Path, tmp_path: Path, name: str, tensors: dict[str, Any], message: str
) -> None:
    quantised, _ = quantise(plain, tmp_path / "a", FORMATS[name])
    with pytest.raises(ConfigError, match=message):
        load_model(changed(quantised, tmp_path / "b", **tensors))


def test_a_bias_of_zeros_that_a_quantiser_wrote_is_no_error(plain: Path, tmp_path: Path) -> None:
    quantised, _ = quantise(plain, tmp_path / "a", FORMATS["GPTQ, 4-bit, groups"])
    load_model(changed(quantised, tmp_path / "b", bias=torch.zeros(48), input_scale=torch.ones(1)))


def test_quantised_tensors_without_a_config_are_refused(plain: Path, tmp_path: Path) -> None:
    quantised, _ = quantise(plain, tmp_path / "a", FORMATS["FP8, per tensor"])
    shutil.copy(plain / "config.json", quantised / "config.json")
    with pytest.raises(ConfigError, match=r"is of type torch\.float8_e4m3fn; allowed: float32"):
        load_model(quantised)


COMPRESSED = FORMATS["compressed-tensors, 4-bit (W4A16), groups"].config
GPTQ, AWQ, FP8 = (FORMATS[name].config for name in ("GPTQ, 4-bit, groups", "AWQ, 4-bit", "FP8, per tensor"))


def with_weights(**changes: Any) -> dict[str, Any]:
    config = copy.deepcopy(COMPRESSED)
    config["config_groups"]["group_0"]["weights"] |= changes
    return config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("awq", r"quantization_config: 'awq' is not an object"),
        ({}, r"quant_method: None is not supported; allowed: compressed-tensors, fp8, gptq, awq; use the unquantised"),
        ({"quant_method": "bitsandbytes"}, r"quant_method: 'bitsandbytes' is not supported"),
        (
            GPTQ | {"checkpoint_format": "marlin"},
            r"checkpoint_format: 'marlin' is not supported; allowed: gptq, gptq_v2",
        ),
        (GPTQ | {"is_marlin_format": True}, r"is_marlin_format: True"),
        (GPTQ | {"bits": 3}, r"bits: 3 is not supported; allowed: 4, 8"),
        (GPTQ | {"bits": True}, r"bits: True"),
        (GPTQ | {"group_size": 0}, r"group_size: 0 is not a whole number above 0"),
        (GPTQ | {"dynamic": {"-:x": {}}}, r"dynamic: settings per module"),
        (AWQ | {"version": "gemv"}, r"version: 'gemv' is not supported; allowed: gemm"),
        (AWQ | {"bits": 8}, r"bits: 8 is not supported; allowed: 4"),
        (AWQ | {"zero_point": False}, r"zero_point: False"),
        (FP8 | {"fmt": "e5m2"}, r"fmt: 'e5m2' is not supported; allowed: e4m3"),
        (FP8 | {"scale_fmt": "ue8m0"}, r"scale_fmt: 'ue8m0'"),
        (FP8 | {"weight_block_size": [128]}, r"weight_block_size: \[128\] is not a list of two"),
        (FP8 | {"activation_scheme": "other"}, r"activation_scheme: 'other'"),
        (COMPRESSED | {"format": "marlin-24"}, r"format: 'marlin-24' is not supported; allowed: dense"),
        (COMPRESSED | {"quantization_status": "frozen"}, r"quantization_status: 'frozen'"),
        (COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, r"sparsity_config: "),
        (COMPRESSED | {"transform_config": {"config_groups": {"u": {}}}}, r"transform_config: "),
        (COMPRESSED | {"config_groups": {}}, r"config_groups: \{\} is not an object with at least one"),
        (COMPRESSED | {"config_groups": {"a": {"weights": None}}}, r"config_groups\.'a'\.weights: not an object"),
        (with_weights(num_bits=3), r"weights\.num_bits: 3 is not supported; allowed: 4, 8"),
        (with_weights(type="float", num_bits=4), r"weights\.num_bits: 4 is not supported; allowed: 8"),
        (with_weights(strategy="token"), r"weights\.strategy: 'token'"),
        (with_weights(group_size="many"), r"weights\.group_size: 'many'"),
        (with_weights(strategy="block", block_structure=[0, 1]), r"block_structure: 0 is not"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Quantization.parse(config)


def test_several_schemes_are_told_apart_by_their_scales(plain: Path, tmp_path: Path) -> None:
    quantised, dequantised = quantise(plain, tmp_path, FORMATS["compressed-tensors, 4-bit (W4A16), groups"])
    config = json.loads((quantised / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    groups["other"] = copy.deepcopy(groups["group_0"])
    groups["other"]["weights"] |= {"group_size": None, "strategy": "channel", "num_bits": 8}
    (quantised / "config.json").write_text(json.dumps(config))
    prompt = list(range(20))
    expected = reference_logits(dequantised, [prompt])[0]
    assert (logits_of(quantised, prompt) - expected).abs().max().item() < TOLERANCE
    groups["other"]["weights"] |= {"group_size": 17, "strategy": "group"}  # Five groups of columns as well.
    (quantised / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="which is ambiguous"):
        load_model(quantised)
