"""Reads weights from memory-mapped safetensors or GGUF files: whole tensors, or the part of one shard.

Owns how a model is divided over tensor-parallel shards (`ShardSpec`), the errors for missing, unknown and misshaped
tensors, and the memory that dequantising takes. Tensor names are plain strings here; `engine.model.shard_weights` knows
which ones a model needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weight_folder import file_names, open_weights
from engine.errors import ConfigError
from engine.gguf.codes import Codes
from engine.gguf.tensors import GGUFTensors
from engine.quantization.codes import has_codes, read_codes
from engine.quantization.config import Quantization
from engine.quantization.dequantize import IGNORED, dequantise, is_quantised
from engine.quantization.weight import Quantised, Rows

SCALE_SUFFIX = ".int8_scale"
"""Suffix of the tensor with the float32 scale of each row of an int8 tensor."""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_CHUNK_ELEMENTS = 8 << 20
"""Elements that are dequantised at once, in float32, so that a large tensor takes its own size and little more."""


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """The part of a tensor-parallel model that one process owns.

    Args:
        rank: of the shard, within [0, size).
        size: number of shards.

    Raises:
        ConfigError: the rank is out of range.
    """

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"rank: {self.rank} is not within [0, {self.size})")

    def part(self, total: int) -> slice:
        """This rank's part of `total` units. Parts differ by at most one unit; lower ranks have the larger ones."""
        base, extra = divmod(total, self.size)
        start = self.rank * base + min(self.rank, extra)
        return slice(start, start + base + (self.rank < extra))

    def parts(self, total: int) -> tuple[int, ...]:
        """Number of units of each rank, in rank order."""
        base, extra = divmod(total, self.size)
        return tuple(base + (rank < extra) for rank in range(self.size))

    def kv_heads(self, config: ModelConfig) -> slice:
        """This rank's KV heads: a part of them, or one that several ranks have if there are more ranks than KV heads.

        Raises:
            ConfigError: there are more shards than KV heads, and the heads cannot be divided evenly.
        """
        if self.size <= config.num_kv_heads:
            return self.part(config.num_kv_heads)
        if self.size % config.num_kv_heads or config.num_heads % self.size:
            raise ConfigError(
                f"tensor_parallel_size: {self.size} is above the model's {config.num_kv_heads} KV heads; a size above "
                f"must be a multiple of them and divide its {config.num_heads} query heads"
            )
        head = self.rank * config.num_kv_heads // self.size
        return slice(head, head + 1)

    def query_heads(self, config: ModelConfig) -> slice:
        """This rank's query heads: those of its KV heads, or its share of those of a KV head that several ranks have.

        Raises:
            ConfigError: a reason of `kv_heads`.
        """
        groups = self.kv_heads(config)
        if self.size > config.num_kv_heads:
            return self.part(config.num_heads)
        fold = config.num_heads // config.num_kv_heads
        return slice(groups.start * fold, groups.stop * fold)


WHOLE = ShardSpec()
"""The only shard of a model."""


class WeightFiles:
    """The tensors of one model folder, by name.

    Args:
        folder: has `model.safetensors`, or `model.safetensors.index.json` and the files that it names, or `model.gguf`.
        quantization: how the weights are quantised, see `ModelConfig.quantization`.
        rename: gives the name under which a tensor of the files is read; None keeps the names.
        as_stored: read `model.gguf` where the folder has it beside a dequantised copy.
        names: of the safetensors files to read instead of those of a model.

    Raises:
        ConfigError: the folder has no weights, or a file is damaged.
    """

    def __init__(
        self,
        folder: Path,
        quantization: Quantization | None = None,
        *,
        rename: Callable[[str], str] | None = None,
        as_stored: bool = False,
        names: Iterable[str] | None = None,
    ) -> None:
        self.folder = folder
        self.quantization = quantization
        self.dequantised_bytes = 0
        """Bytes that `read_float` has made out of quantised weights."""
        self.read_bytes = 0
        """Bytes of the files that have been read."""
        names = names or file_names(folder, as_stored=as_stored)
        self._files = {name: open_weights(folder / name) for name in names}
        self._home = {
            rename(stored) if rename is not None else stored: (file, stored)
            for file in self._files.values()
            for stored in file.keys()  # noqa: SIM118
        }
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._home

    def has_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a tensor is there and has this shape."""
        return name in self._home and self.shape_of(name) == shape

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor that is there."""
        return tuple(self._view(name).get_shape())

    def read(
        self, name: str, shape: tuple[int, ...], *, rows: slice | None = None, cols: slice | None = None
    ) -> torch.Tensor:
        """Read a tensor, or the part [rows, cols] of it.

        Args:
            name: of the tensor in the file.
            shape: expected shape of the whole tensor.
            rows: part of the first dimension; None reads all.
            cols: part of the second dimension; None reads all.

        Raises:
            ConfigError: the tensor is missing, has another shape, or cannot be read.
        """
        if name not in self._home:
            raise ConfigError(f"model: {self.folder} lacks tensor {name} of shape {list(shape)}")
        self._read.add(name)
        file, stored = self._home[name]
        view = file.get_slice(stored)
        given = tuple(view.get_shape())
        if given != shape:
            raise ConfigError(f"model: tensor {name} has shape {list(given)}, but config.json implies {list(shape)}")
        try:
            index = (rows or slice(None), cols or slice(None))[: len(shape)]
            tensor: torch.Tensor = view[index] if index else file.get_tensor(stored)
        except SafetensorError as error:
            raise ConfigError(f"model: cannot read tensor {name} in {self.folder}: {error}") from None
        self.read_bytes += file.stored_bytes(stored, tensor.numel()) if isinstance(file, GGUFTensors) else tensor.nbytes
        return tensor

    def read_float(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: slice | None = None,
        cols: slice | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        """Read a weight: a float tensor as it is, or a quantised one, which is dequantised.

        Args:
            name, shape, rows, cols: as in `read`.
            dtype: of the result if the weight is quantised.

        Raises:
            ConfigError: a reason of `read`, or the tensor is of another dtype.
        """
        if len(shape) == 2 and self._is_packed(name):
            return self._dequantised(name, (shape[0], shape[1]), rows, cols, dtype)
        tensor = self.read(name, shape, rows=rows, cols=cols)
        if tensor.dtype is torch.int8 and name + SCALE_SUFFIX in self:
            scale = self.read(name + SCALE_SUFFIX, shape[:1], rows=rows).float()
            return tensor.float() * scale.view(-1, *[1] * (len(shape) - 1))
        if tensor.dtype not in _FLOATS:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in _FLOATS)
            allowed += f", int8 with {name}{SCALE_SUFFIX}"
            raise ConfigError(f"model: tensor {name} is of type {tensor.dtype}; allowed: {allowed}")
        return tensor

    def quantised(self, name: str, shape: tuple[int, int], rows: slice | None = None) -> Quantised | None:
        """Rows of a weight that can stay quantised; None where it has no such form. They are read when they are used.

        Args:
            name, shape, rows: as in `read`.

        Raises:
            ConfigError: the tensor has another shape.
        """
        if not self._has_codes(name, shape):
            return None
        self._read.update((name, name + SCALE_SUFFIX))
        return Quantised((Rows(self, name, shape, rows or slice(0, shape[0])),))

    def _has_codes(self, name: str, shape: tuple[int, int]) -> bool:
        if self.quantization is not None:
            return is_quantised(self, name) and has_codes(self, self.quantization, name, shape)
        if name not in self._home or self.shape_of(name) != shape:
            return False
        file, stored = self._home[name]
        if isinstance(file, GGUFTensors):
            return file.is_quantised(stored)
        return name + SCALE_SUFFIX in self and self._view(name).get_dtype() == "I8"

    def read_codes(self, name: str, shape: tuple[int, int], rows: slice) -> Codes:
        """Rows of a weight of `quantised`, as they are.

        Raises:
            ConfigError: a reason of `read`.
        """
        file, stored = self._home.get(name, (None, name))
        if self.quantization is not None:
            return read_codes(self, self.quantization, name, shape, rows)
        if isinstance(file, GGUFTensors):
            codes = file.get_slice(stored).codes(rows)
            self.read_bytes += file.stored_bytes(stored, codes.codes.size)
            return codes
        scales = self.read(name + SCALE_SUFFIX, shape[:1], rows=rows).float()
        return Codes(
            self.read(name, shape, rows=rows).numpy(), scales[:, None].numpy(), None, bits=8, offset=0, is_half=False
        )

    @property
    def packing(self) -> str | None:
        """How the weights are quantised, in words; None if they are floats."""
        if self.quantization is not None:
            return self.quantization.label
        types = {kind for file in self._files.values() if isinstance(file, GGUFTensors) for kind in file.types()}
        return f"GGUF {', '.join(sorted(types))}" if types else None

    def _is_packed(self, name: str) -> bool:
        if self.quantization is not None:
            return is_quantised(self, name)
        return name in self._home and isinstance(self._home[name][0], GGUFTensors)

    def _dequantised(
        self, name: str, shape: tuple[int, int], rows: slice | None, cols: slice | None, dtype: torch.dtype
    ) -> torch.Tensor:
        rows, cols = rows or slice(0, shape[0]), cols or slice(0, shape[1])
        step = max(1, _CHUNK_ELEMENTS // max(1, cols.stop - cols.start))

        def chunk(start: int) -> torch.Tensor:
            part = slice(start, min(start + step, rows.stop))
            if self.quantization is None:
                return self.read(name, shape, rows=part, cols=cols).to(dtype)
            return dequantise(self, self.quantization, name, shape, part, cols).to(dtype)

        tensor = chunk(rows.start)
        if len(tensor) < rows.stop - rows.start:
            first, tensor = tensor, torch.empty(rows.stop - rows.start, cols.stop - cols.start, dtype=dtype)
            tensor[: len(first)] = first
            for start in range(rows.start + step, rows.stop, step):
                tensor[start - rows.start : start - rows.start + step] = chunk(start)
        self.dequantised_bytes += tensor.nbytes
        return tensor

    def num_elements(self) -> int:
        """Number of elements of all tensors."""
        return sum(math.prod(self._view(name).get_shape()) for name in self._home)

    def check_all_read(self, *, ignore: Iterable[str] = ()) -> None:
        """Check that every tensor has been read: an unread one means that the config does not fit the weights.

        Some quantisers write a bias of zeros for layers that have none. It changes nothing and is no error.

        Args:
            ignore: suffixes of tensor names that the forward pass does not need.

        Raises:
            ConfigError: tensors were not read. Names up to five of them, with their shapes.
        """
        is_quantised = self.quantization is not None
        ignored = (*ignore, *(IGNORED if is_quantised else ()))
        extra = sorted(name for name in self._home if name not in self._read and not name.endswith(ignored))
        if is_quantised:
            extra = [name for name in extra if not (name.endswith(".bias") and self._is_zero(name))]
        if extra:
            some = ", ".join(f"{name} {self._view(name).get_shape()}" for name in extra[:5])
            raise ConfigError(
                f"model: {self.folder} holds {len(extra)} tensors that config.json does not imply: {some}"
            )

    def _is_zero(self, name: str) -> bool:
        return not bool(self.read(name, self.shape_of(name)).any())

    def stored_bytes(self) -> int:
        """Size of the files."""
        return sum((self.folder / name).stat().st_size for name in self._files)

    def _view(self, name: str) -> Any:
        file, stored = self._home[name]
        return file.get_slice(stored)
