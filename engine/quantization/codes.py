"""Quantised weights of Hugging Face checkpoints as codes, for kernels that multiply them as they are.

Owns the conditions under which a layout has that form. `engine.quantization.dequantize` reads the tensors.
"""

from __future__ import annotations

import torch

from engine.gguf.codes import Codes
from engine.quantization.config import Quantization
from engine.quantization.dequantize import Tensors, column_groups, stored_part

CODE_BLOCK = 16
"""Columns with one scale are a multiple of it."""


def has_codes(files: Tensors, quantization: Quantization, name: str, shape: tuple[int, int]) -> bool:
    """Whether `read_codes` can read a quantised weight: integers in groups of consecutive columns. Where there is a
    zero point, products of an integer and the scale must be exact in float32: adding the minimum rounds once more.

    Args:
        files, quantization, name, shape: as in `dequantise`.

    Raises:
        ConfigError: a reason of `dequantise`.
    """
    rows, num_columns = slice(0, shape[0]), shape[1]
    first = stored_part(files, quantization, name, shape, rows, slice(0, 1))
    group = min(first.scheme.block[1], num_columns)
    if first.scheme.is_float or group % CODE_BLOCK or num_columns % group:
        return False
    of_columns = column_groups(files, name.removesuffix(".weight"), first.scheme, shape, slice(0, num_columns))
    if not torch.equal(of_columns.long(), torch.arange(num_columns) // group):
        return False
    return first.zeros is None or bool(((first.zeros == 0) | _exact_products(first.scales, first.scheme.bits)).all())


def _exact_products(scales: torch.Tensor, bits: int) -> torch.Tensor:
    """Whether float32 holds a scale times each integer of magnitude up to 2 ** `bits`, for each scale: it has no more
    significant bits than that leaves, and no product is too large."""
    has_few_bits = scales.view(torch.int32) & ((1 << bits) - 1) == 0
    return torch.logical_and(has_few_bits, (scales * 2**bits).isfinite())


def read_codes(files: Tensors, quantization: Quantization, name: str, shape: tuple[int, int], rows: slice) -> Codes:
    """Rows of a quantised weight for which `has_codes` holds, as they are.

    Args:
        files, quantization, name, shape, rows: as in `dequantise`.

    Raises:
        ConfigError: a reason of `dequantise`.
    """
    stored = stored_part(files, quantization, name, shape, rows, slice(0, shape[1]))
    bits, values, zeros = stored.scheme.bits, stored.values, stored.zeros
    size = (len(values), stored.scales.shape[1])
    if bits == 8 and stored.is_unsigned:
        values = values - 128
        zeros = -128 - (torch.zeros(()) if zeros is None else -zeros)
    scales = stored.scales.expand(size).contiguous()
    minimums = None if zeros is None else (-zeros * stored.scales).expand(size).contiguous()
    return Codes(
        values.to(torch.int8).numpy(),
        scales.numpy(),
        None if minimums is None else minimums.numpy(),
        bits=bits,
        offset=0 if stored.is_unsigned or bits == 8 else -8,
        is_half=all(grid is None or torch.equal(grid.half().float(), grid) for grid in (scales, minimums)),
    )
