"""Reads weights from memory-mapped safetensors files: whole tensors, or the part of one shard.

Owns how a model is divided over tensor-parallel shards (`ShardSpec`), and the errors for missing, unknown and misshaped
tensors. Tensor names are plain strings here; `engine.model.shard_weights` knows which ones a model needs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.checkpoint.model_config import INDEX_FILE, SINGLE_FILE, ModelConfig
from engine.errors import ConfigError

SCALE_SUFFIX = ".int8_scale"
"""Suffix of the tensor with the float32 scale of each row of an int8 tensor."""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


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
        """This rank's KV heads. Its query heads are those of the same groups.

        Raises:
            ConfigError: there are more shards than KV heads.
        """
        if self.size > config.num_kv_heads:
            raise ConfigError(
                f"tensor_parallel_size: {self.size} is above the model's {config.num_kv_heads} KV heads; "
                f"a shard takes at least one"
            )
        return self.part(config.num_kv_heads)


WHOLE = ShardSpec()
"""The only shard of a model."""


class WeightFiles:
    """The tensors of one model folder, by name.

    Args:
        folder: has `model.safetensors`, or `model.safetensors.index.json` and the files that it names.
        rename: gives the name under which a tensor of the files is read; None keeps the names.

    Raises:
        ConfigError: the folder has no safetensors, or a file is damaged.
    """

    def __init__(self, folder: Path, *, rename: Callable[[str], str] | None = None) -> None:
        self.folder = folder
        self._files = {name: _open(folder / name) for name in _file_names(folder)}
        self._home = {
            rename(stored) if rename is not None else stored: (file, stored)
            for file in self._files.values()
            for stored in file.keys()  # noqa: SIM118
        }
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._home

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
        view = self._view(name)
        given = tuple(view.get_shape())
        if given != shape:
            raise ConfigError(f"model: tensor {name} has shape {list(given)}, but config.json implies {list(shape)}")
        try:
            index = (rows or slice(None),) if len(shape) == 1 else (rows or slice(None), cols or slice(None))
            tensor: torch.Tensor = view[index]
        except SafetensorError as error:
            raise ConfigError(f"model: cannot read tensor {name} in {self.folder}: {error}") from None
        return tensor

    def read_float(
        self, name: str, shape: tuple[int, ...], *, rows: slice | None = None, cols: slice | None = None
    ) -> torch.Tensor:
        """Read a weight: a float tensor, or an int8 tensor with a scale per row, which is returned as float32.

        The arguments are those of `read`.

        Raises:
            ConfigError: a reason of `read`, or the tensor is of another dtype.
        """
        tensor = self.read(name, shape, rows=rows, cols=cols)
        if tensor.dtype is torch.int8 and name + SCALE_SUFFIX in self:
            scale = self.read(name + SCALE_SUFFIX, shape[:1], rows=rows).float()
            return tensor.float() * scale.view(-1, *[1] * (len(shape) - 1))
        if tensor.dtype not in _FLOATS:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in _FLOATS)
            allowed += f", int8 with {name}{SCALE_SUFFIX}"
            raise ConfigError(f"model: tensor {name} is of type {tensor.dtype}; allowed: {allowed}")
        return tensor

    def num_elements(self) -> int:
        """Number of elements of all tensors."""
        return sum(math.prod(self._view(name).get_shape()) for name in self._home)

    def check_all_read(self, *, ignore: Iterable[str] = ()) -> None:
        """Check that every tensor has been read: an unread one means that the config does not fit the weights.

        Args:
            ignore: suffixes of tensor names that the forward pass does not need.

        Raises:
            ConfigError: tensors were not read. Names up to five of them, with their shapes.
        """
        extra = sorted(name for name in self._home if name not in self._read and not name.endswith(tuple(ignore)))
        if extra:
            some = ", ".join(f"{name} {self._view(name).get_shape()}" for name in extra[:5])
            raise ConfigError(
                f"model: {self.folder} holds {len(extra)} tensors that config.json does not imply: {some}"
            )

    def _view(self, name: str) -> Any:
        file, stored = self._home[name]
        return file.get_slice(stored)


def _file_names(folder: Path) -> list[str]:
    if (folder / SINGLE_FILE).is_file():
        return [SINGLE_FILE]
    index = folder / INDEX_FILE
    if not index.is_file():
        raise ConfigError(
            f"model: {folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors weights are loaded"
        )
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"model: {index} is not a safetensors index: {error!r}") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ConfigError(f"model: {index} names {name!r}; allowed: names of .safetensors files in the same folder")
    return names


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"model: cannot read {path}: {error}") from None
