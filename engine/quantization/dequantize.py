"""Dequantises the weights of Hugging Face checkpoints: stored elements, scales and zero points become float32.

Owns the names of the tensors of each format and their arithmetic. Only the asked part of a weight is read. A layer is
quantised if its tensors are there, so the lists of excluded layers in a config are not needed. Layouts:

    compressed-tensors   weight [out, in] float8 or int8, or weight_packed [out, in * bits / 32] int32
    fp8                  weight [out, in] float8, weight_scale_inv [out / block, in / block]
    gptq                 qweight [in * bits / 32, out] int32, qzeros [groups, out * bits / 32], scales, g_idx [in]
    awq                  qweight [in, out / 8] int32, qzeros [groups, out / 8], scales [groups, out]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from engine.errors import ConfigError
from engine.quantization.config import Quantization, Scheme

IGNORED = (".input_scale", ".input_zero_point", ".output_scale", ".activation_scale", ".k_scale", ".v_scale")
"""Suffixes of tensors that only quantised activations or a quantised KV cache need."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position within an int32 of each of eight consecutive columns."""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Tensors(Protocol):
    """Reads tensors by name."""

    def __contains__(self, name: str) -> bool: ...

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor that is there."""
        ...

    def read(
        self, name: str, shape: tuple[int, ...], *, rows: slice | None = None, cols: slice | None = None
    ) -> torch.Tensor:
        """A tensor of this shape, or the part [rows, cols] of it."""
        ...


def is_quantised(files: Tensors, name: str) -> bool:
    """Whether the weight `name` is stored in a quantised form."""
    module = name.removesuffix(".weight")
    others = (".weight_packed", ".qweight", ".weight_scale", ".weight_scale_inv")
    return name.endswith(".weight") and any(module + other in files for other in others)


def dequantise(
    files: Tensors, quantization: Quantization, name: str, shape: tuple[int, int], rows: slice, cols: slice
) -> torch.Tensor:
    """The part [rows, cols] of a quantised weight, float32.

    Args:
        files: the tensors of the checkpoint.
        quantization: how it is quantised.
        name: of the weight, ending in `.weight`.
        shape: of the whole weight, [out, in].
        rows, cols: the part to read, with start and stop.

    Raises:
        ConfigError: a tensor is missing, of another type or shape, or does not fit the config.
    """
    stored = stored_part(files, quantization, name, shape, rows, cols)
    values = stored.values
    if stored.zeros is not None:
        values = values - stored.of_columns(stored.zeros)
    return values.mul_(stored.of_columns(stored.scales))


@dataclass(frozen=True, slots=True)
class Stored:
    """A part of a weight: (values - zeros) * scales, with zeros and scales of each column's group."""

    scheme: Scheme
    values: torch.Tensor
    """[rows, cols] float32 integers, or floats."""
    scales: torch.Tensor
    """[rows or 1, groups] float32."""
    zeros: torch.Tensor | None
    """As the scales."""
    groups: torch.Tensor
    """[cols] group of each column."""
    is_unsigned: bool = False
    """Whether integers start at 0."""

    def of_columns(self, grid: torch.Tensor) -> torch.Tensor:
        """[rows or 1, cols or 1] of a [rows or 1, groups] tensor. A dimension of one is broadcast."""
        return grid.index_select(1, self.groups) if grid.shape[1] > 1 else grid


def stored_part(
    files: Tensors, quantization: Quantization, name: str, shape: tuple[int, int], rows: slice, cols: slice
) -> Stored:
    """The part [rows, cols] of a quantised weight as it is. Arguments and errors are those of `dequantise`."""
    module = name.removesuffix(".weight")
    if quantization.method == "gptq":
        return _gptq(files, quantization.schemes[0], module, shape, rows, cols)
    if quantization.method == "awq":
        return _awq(files, quantization.schemes[0], module, shape, rows, cols)
    scale_name = module + (".weight_scale_inv" if module + ".weight_scale_inv" in files else ".weight_scale")
    if scale_name not in files:
        raise ConfigError(f"model: the quantised weight {name} has no tensor {scale_name}")
    packed_name = module + ".weight_packed"
    is_packed = packed_name in files
    scheme = _fitting(quantization, files.shape_of(scale_name), shape, scale_name, packed=is_packed)
    if is_packed:
        values = _packed_columns(files, packed_name, scheme, shape, rows, cols)
    else:
        values = files.read(name, shape, rows=rows, cols=cols)
        wanted = torch.float8_e4m3fn if scheme.is_float else torch.int8
        if values.dtype is not wanted:
            raise ConfigError(f"model: tensor {name} is of type {values.dtype}; quantization_config implies {wanted}")
        values = values.float()
    of_rows = torch.arange(rows.start, rows.stop) // scheme.block[0]
    scales = _scales(files, scale_name, scheme, shape)
    zeros = _zeros(files, module, scheme, shape, packed=is_packed) if scheme.has_zeros else None
    if len(scales) > 1:
        scales = scales.index_select(0, of_rows)
        zeros = None if zeros is None else zeros.index_select(0, of_rows)
    return Stored(scheme, values, scales, zeros, column_groups(files, module, scheme, shape, cols))


def _fitting(
    quantization: Quantization, scales: tuple[int, ...], shape: tuple[int, int], name: str, *, packed: bool
) -> Scheme:
    """The scheme of a layer: the one whose number of scales is the layer's.

    Raises:
        ConfigError: there is none, or more than one.
    """
    given = _two_dims(scales)
    fitting = [scheme for scheme in quantization.schemes if _grid(scheme, shape) == given]
    if packed:
        fitting = [scheme for scheme in fitting if not scheme.is_float]
    if len(fitting) != 1:
        expected = " or ".join(str(list(_grid(scheme, shape))) for scheme in quantization.schemes)
        raise ConfigError(
            f"model: tensor {name} has shape {list(scales)} for a weight of {list(shape)}; "
            f"quantization_config implies {expected}" + (", which is ambiguous" if fitting else "")
        )
    return fitting[0]


def _two_dims(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (1, 1) if not shape else (*shape, 1) if len(shape) == 1 else shape


def _grid(scheme: Scheme, shape: tuple[int, int]) -> tuple[int, int]:
    """Number of blocks with a scale of their own, along rows and columns."""
    return -(-shape[0] // scheme.block[0]), -(-shape[1] // scheme.block[1])


def column_groups(files: Tensors, module: str, scheme: Scheme, shape: tuple[int, int], cols: slice) -> torch.Tensor:
    """Group number of each column of a part, [cols] int64."""
    index = next((name for suffix in (".weight_g_idx", ".g_idx") if (name := module + suffix) in files), None)
    if index is None:
        return torch.arange(cols.start, cols.stop) // scheme.block[1]
    of_cols = _integers(files.read(index, (shape[1],), rows=cols), index).long()
    count = _grid(scheme, shape)[1]
    if of_cols.numel() and not 0 <= int(of_cols.min()) <= int(of_cols.max()) < count:
        raise ConfigError(f"model: tensor {index} must hold group numbers within [0, {count})")
    return of_cols


def _scales(files: Tensors, name: str, scheme: Scheme, shape: tuple[int, int]) -> torch.Tensor:
    return _checked_scales(files.read(name, files.shape_of(name)), name).reshape(_grid(scheme, shape))


def _checked_scales(scales: torch.Tensor, name: str) -> torch.Tensor:
    """The scales in float32.

    Raises:
        ConfigError: they are no floats, or not finite.
    """
    if scales.dtype not in _FLOATS:
        raise ConfigError(f"model: tensor {name} is of type {scales.dtype}; allowed: float32, bfloat16, float16")
    if not bool(scales.isfinite().all()):
        raise ConfigError(f"model: tensor {name} is damaged: it holds scales that are not finite")
    return scales.float()


def _zeros(files: Tensors, module: str, scheme: Scheme, shape: tuple[int, int], *, packed: bool) -> torch.Tensor:
    """Zero points of compressed-tensors: like the weights, shifted to signed numbers."""
    name, grid = module + ".weight_zero_point", _grid(scheme, shape)
    if not packed:
        stored = files.shape_of(name) if name in files else grid
        if _two_dims(stored) != grid:
            raise ConfigError(f"model: tensor {name} has shape {list(stored)}; its scales imply {list(grid)}")
        return _integers(files.read(name, stored), name, torch.int8).float().reshape(grid)
    words = _integers(files.read(name, (-(-grid[0] * scheme.bits // 32), grid[1])), name)
    return _unpack(words.t(), scheme.bits)[:, : grid[0]].t().float() - (1 << (scheme.bits - 1))


def _packed_columns(
    files: Tensors, name: str, scheme: Scheme, shape: tuple[int, int], rows: slice, cols: slice
) -> torch.Tensor:
    """Elements of compressed-tensors' `weight_packed`, float32, signed."""
    stored = name.replace(".weight_packed", ".weight_shape")
    if stored in files and (given := files.read(stored, (2,)).tolist()) != list(shape):
        raise ConfigError(f"model: tensor {stored} holds {given}, but config.json implies {list(shape)}")
    words, skipped = _words(cols, scheme.bits)
    width = -(-shape[1] * scheme.bits // 32)
    packed = _integers(files.read(name, (shape[0], width), rows=rows, cols=words), name)
    values = _unpack(packed, scheme.bits)[:, skipped : skipped + cols.stop - cols.start]
    return values.float() - (1 << (scheme.bits - 1))


def _gptq(files: Tensors, scheme: Scheme, module: str, shape: tuple[int, int], rows: slice, cols: slice) -> Stored:
    out, width = shape
    bits, num_groups = scheme.bits, _grid(scheme, shape)[1]
    name = module + ".qweight"
    words, skipped = _words(cols, bits)
    packed = _integers(files.read(name, (-(-width * bits // 32), out), rows=words, cols=rows), name)
    values = _unpack(packed.t(), bits)[:, skipped : skipped + cols.stop - cols.start].float()
    words, skipped = _words(rows, bits)
    name = module + ".qzeros"
    packed = _integers(files.read(name, (num_groups, -(-out * bits // 32)), cols=words), name)
    zeros = _unpack(packed, bits)[:, skipped : skipped + rows.stop - rows.start] + scheme.zero_offset
    return _grouped(files, scheme, module, shape, values, zeros, rows, cols)


def _awq(files: Tensors, scheme: Scheme, module: str, shape: tuple[int, int], rows: slice, cols: slice) -> Stored:
    out, width = shape
    num_groups = _grid(scheme, shape)[1]
    if out % 8:
        raise ConfigError(f"model: {module}.qweight: {out} rows are not a multiple of 8, which AWQ needs")
    words, skipped = _words(rows, 4)
    order, size = torch.tensor(_AWQ_ORDER), rows.stop - rows.start

    def unpacked(name: str, length: int, part: slice | None) -> torch.Tensor:
        packed = _integers(files.read(name, (length, out // 8), rows=part, cols=words), name)
        in_order = _unpack(packed, 4).view(packed.shape[0], -1, 8).index_select(2, order).flatten(1)
        return in_order[:, skipped : skipped + size]

    values = unpacked(module + ".qweight", width, cols).t().float()
    zeros = unpacked(module + ".qzeros", num_groups, None)
    return _grouped(files, scheme, module, shape, values, zeros, rows, cols)


def _grouped(
    files: Tensors,
    scheme: Scheme,
    module: str,
    shape: tuple[int, int],
    values: torch.Tensor,
    zeros: torch.Tensor,
    rows: slice,
    cols: slice,
) -> Stored:
    """Values [rows, cols] with zeros [groups, rows] and scales that are stored [groups, out]."""
    name = module + ".scales"
    scales = _checked_scales(files.read(name, (_grid(scheme, shape)[1], shape[0]), cols=rows), name)
    groups = column_groups(files, module, scheme, shape, cols)
    return Stored(scheme, values, scales.t(), zeros.float().t(), groups, is_unsigned=True)


def _words(part: slice, bits: int) -> tuple[slice, int]:
    """The int32 words that hold these elements, and the number of elements before the first one."""
    per_word = 32 // bits
    start = part.start // per_word
    return slice(start, -(-part.stop // per_word)), part.start - start * per_word


def _unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned elements of int32 words, low bits first: [N, W] -> [N, W * 32 / bits] int32."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words[:, :, None] >> shifts) & ((1 << bits) - 1)).flatten(1)


def _integers(tensor: torch.Tensor, name: str, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    if tensor.dtype is not dtype and not (name.endswith("g_idx") and tensor.dtype is torch.int64):
        raise ConfigError(f"model: tensor {name} is of type {tensor.dtype}; allowed: {dtype}")
    return tensor
