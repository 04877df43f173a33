"""Small random checkpoints in each quantised format, and the plain checkpoint of the same, dequantised weights.

The packers follow the formats' public definitions; `engine.quantization.dequantize` names them. Each returns the stored
tensors and the float32 weight that they stand for, computed from the integers before packing.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
_LINEAR = re.compile(r"model\.layers\..*_proj\.weight|.*\.experts\.\d+\.w[123]\.weight")
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column, within eight, of each 4-bit element of an int32, low bits first."""


@dataclass(frozen=True)
class Packed:
    """A weight in stored form and what it stands for."""

    tensors: Tensors
    """Stored tensors by what follows the module's name."""
    weight: torch.Tensor
    """[out, in] float32."""


def pack_words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned elements [N, W] in int32 words, low bits first; the last word is filled with zeros."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(values.long(), (0, -values.shape[1] % per_word))
    shifts = torch.arange(0, 32, bits)
    words = (padded.view(len(values), -1, per_word) << shifts).sum(-1)
    return (words - (words >= 1 << 31).long() * (1 << 32)).int()


def spread(grid: torch.Tensor, shape: torch.Size, block: tuple[int, int]) -> torch.Tensor:
    """The value of each element's block."""
    tall = grid.repeat_interleave(block[0], 0)[: shape[0]]
    return tall.repeat_interleave(block[1], 1)[:, : shape[1]]


def blocks_of(shape: torch.Size, block: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def random_scales(shape: tuple[int, ...], top: float) -> torch.Tensor:
    """Scales of float16 values, so that every format stores them exactly."""
    return (torch.rand(shape) * 0.5 + 0.5).mul(0.4 / top).half().float()


def float8(weight: torch.Tensor, block: tuple[int, int], *, suffix: str) -> Packed:
    """float8_e4m3fn elements with one scale per block."""
    grid = blocks_of(weight.shape, block)
    scales = random_scales(grid, 64.0)
    stored = (weight / spread(scales, weight.shape, block)).to(torch.float8_e4m3fn)
    whole = {"weight": stored, suffix: scales.flatten() if grid == (1, 1) else scales}
    return Packed(whole, stored.float() * spread(scales, weight.shape, block))


def int8(weight: torch.Tensor, block: tuple[int, int], *, zeros: bool) -> Packed:
    """Signed bytes with one scale per block, and a zero point if asked for."""
    grid = blocks_of(weight.shape, block)
    scales = random_scales(grid, 60.0)
    points = torch.randint(-9, 9, grid, dtype=torch.int8) if zeros else torch.zeros(grid, dtype=torch.int8)
    spread_points = spread(points, weight.shape, block).float()
    spread_scales = spread(scales, weight.shape, block)
    stored = (weight / spread_scales + spread_points).round().clamp(-128, 127).to(torch.int8)
    tensors = {"weight": stored, "weight_scale": scales} | ({"weight_zero_point": points} if zeros else {})
    return Packed(tensors, (stored.float() - spread_points) * spread_scales)


def packed(weight: torch.Tensor, group: int, *, bits: int, zeros: bool, order: bool = False) -> Packed:
    """compressed-tensors' packed integers. With `order`, columns belong to groups in no order (`weight_g_idx`)."""
    out, width = weight.shape
    grid = blocks_of(weight.shape, (1, group))
    low = -(1 << (bits - 1))
    scales = random_scales(grid, 0.8 * -low)
    points = torch.randint(low, -low, grid) if zeros else torch.zeros(grid, dtype=torch.long)
    groups = torch.arange(width) // group
    if order:
        groups = groups[torch.randperm(width)]
    stored = (weight / scales[:, groups] + points[:, groups]).round().clamp(low, -low - 1)
    tensors = {
        "weight_packed": pack_words(stored - low, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor([out, width]),
    }
    if zeros:
        tensors["weight_zero_point"] = pack_words((points - low).t(), bits).t().contiguous()
    if order:
        tensors["weight_g_idx"] = groups.int()
    return Packed(tensors, (stored - points[:, groups]) * scales[:, groups])


def gptq(weight: torch.Tensor, group: int, *, bits: int, order: bool, zero_offset: int = 1) -> Packed:
    """GPTQ: words along the input dimension; zero points are stored less one."""
    out, width = weight.shape
    num_groups, top = -(-width // group), 1 << bits
    groups = torch.arange(width) // group
    if order:
        groups = groups[torch.randperm(width)]
    scales = random_scales((num_groups, out), 0.4 * top)
    zeros = torch.randint(0, top, (num_groups, out)) + zero_offset
    stored = (weight.t() / scales[groups] + zeros[groups]).round().clamp(0, top - 1)
    tensors = {
        "qweight": pack_words(stored.t(), bits).t().contiguous(),
        "qzeros": pack_words(zeros - zero_offset, bits),
        "scales": scales.half(),
        "g_idx": groups.int(),
    }
    return Packed(tensors, ((stored - zeros[groups]) * scales[groups]).t().contiguous())


def awq(weight: torch.Tensor, group: int) -> Packed:
    """AWQ's GEMM layout: eight output columns per word, interleaved."""
    out, width = weight.shape
    groups, order = torch.arange(width) // group, torch.tensor(_AWQ_COLUMNS)
    num_groups = -(-width // group)
    scales = random_scales((num_groups, out), 6.0)
    zeros = torch.randint(0, 16, (num_groups, out))
    stored = (weight.t() / scales[groups] + zeros[groups]).round().clamp(0, 15).long()

    def interleaved(values: torch.Tensor) -> torch.Tensor:
        return pack_words(values.view(len(values), -1, 8)[:, :, order].flatten(1), 4)

    tensors = {"qweight": interleaved(stored), "qzeros": interleaved(zeros), "scales": scales.half()}
    return Packed(tensors, ((stored - zeros[groups]) * scales[groups]).t().contiguous())


def compressed_config(form: str, *, activations: bool = False, **weights: Any) -> dict[str, Any]:
    """A `quantization_config` of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8} if activations else None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


@dataclass(frozen=True)
class Format:
    """One way to store the linear layers of a model."""

    config: dict[str, Any]
    """Its `quantization_config`."""
    pack: Callable[[torch.Tensor], Packed]


BLOCK, WIDE = (16, 32), (1, 1 << 40)
FORMATS: dict[str, Format] = {
    "compressed-tensors, float8, per tensor": Format(
        compressed_config("float-quantized", activations=True, num_bits=8, type="float", strategy="tensor"),
        lambda weight: float8(weight, tuple(weight.shape), suffix="weight_scale"),  # type: ignore[arg-type]
    ),
    "compressed-tensors, float8, per channel": Format(
        compressed_config("float-quantized", activations=True, num_bits=8, type="float", strategy="channel"),
        lambda weight: float8(weight, (1, weight.shape[1]), suffix="weight_scale"),
    ),
    "compressed-tensors, float8, blocks": Format(
        compressed_config(
            "float-quantized", activations=True, num_bits=8, type="float", strategy="block", block_structure=[16, 32]
        ),
        lambda weight: float8(weight, BLOCK, suffix="weight_scale"),
    ),
    "compressed-tensors, int8 (W8A8), per channel": Format(
        compressed_config("int-quantized", activations=True, num_bits=8, type="int", strategy="channel"),
        lambda weight: int8(weight, (1, weight.shape[1]), zeros=False),
    ),
    "compressed-tensors, int8, per channel, zero points": Format(
        compressed_config("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=False),
        lambda weight: int8(weight, (1, weight.shape[1]), zeros=True),
    ),
    "compressed-tensors, 4-bit (W4A16), groups": Format(
        compressed_config("pack-quantized", num_bits=4, type="int", strategy="group", group_size=16),
        lambda weight: packed(weight, 16, bits=4, zeros=False),
    ),
    "compressed-tensors, 4-bit, groups, zero points": Format(
        compressed_config("pack-quantized", num_bits=4, type="int", strategy="group", group_size=16, symmetric=False),
        lambda weight: packed(weight, 16, bits=4, zeros=True),
    ),
    "compressed-tensors, 4-bit, groups, act order": Format(
        compressed_config("pack-quantized", num_bits=4, type="int", strategy="group", group_size=16, actorder="group"),
        lambda weight: packed(weight, 16, bits=4, zeros=False, order=True),
    ),
    "compressed-tensors, 8-bit (W8A16), per channel": Format(
        compressed_config("pack-quantized", num_bits=8, type="int", strategy="channel"),
        lambda weight: packed(weight, weight.shape[1], bits=8, zeros=False),
    ),
    "GPTQ, 4-bit, groups": Format(
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": True},
        lambda weight: gptq(weight, 16, bits=4, order=False),
    ),
    "GPTQ, 4-bit, act order": Format(
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True, "sym": False},
        lambda weight: gptq(weight, 16, bits=4, order=True),
    ),
    "GPTQ, 8-bit, one group": Format(
        {"quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": False},
        lambda weight: gptq(weight, weight.shape[1], bits=8, order=False),
    ),
    "GPTQ v2, 4-bit": Format(
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "checkpoint_format": "gptq_v2"},
        lambda weight: gptq(weight, 16, bits=4, order=False, zero_offset=0),
    ),
    "AWQ, 4-bit": Format(
        {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True},
        lambda weight: awq(weight, 16),
    ),
    "FP8 (Qwen3, DeepSeek), blocks": Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [16, 32]},
        lambda weight: float8(weight, BLOCK, suffix="weight_scale_inv"),
    ),
    "FP8, per tensor": Format(
        {"quant_method": "fp8", "activation_scheme": "static"},
        lambda weight: float8(weight, tuple(weight.shape), suffix="weight_scale"),  # type: ignore[arg-type]
    ),
}
"""Formats by the name of their row in docs/models.md."""


def quantise(plain: Path, folder: Path, form: Format, *, seed: int = 0) -> tuple[Path, Path]:
    """Store a plain checkpoint in a format.

    Returns:
        The quantised folder, and a plain one with the weights that it stands for.
    """
    torch.manual_seed(seed)
    quantised, dequantised = folder / "quantised", folder / "dequantised"
    stored: Tensors = {}
    meant: Tensors = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if not _LINEAR.fullmatch(name):
            stored[name] = meant[name] = tensor
            continue
        result = form.pack(tensor.float())
        meant[name] = result.weight
        stored |= {name.removesuffix("weight") + key: value.contiguous() for key, value in result.tensors.items()}
    config = json.loads((plain / "config.json").read_text())
    for target, tensors, extra in (
        (quantised, stored, {"quantization_config": form.config}),
        (dequantised, meant, {}),
    ):
        shutil.copytree(plain, target)
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        (target / "config.json").write_text(json.dumps(config | extra))
    return quantised, dequantised
