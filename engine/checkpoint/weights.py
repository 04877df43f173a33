"""Reading weights: safetensors files, memory-mapped, whole or the part that one shard owns.

Owns how a model is cut over tensor-parallel shards (`ShardSpec`) and the complaints about missing, extra and misshaped
tensors. Knows tensor names only as strings; which names a model needs is `engine.model.load`' business.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.checkpoint.model_config import INDEX_FILE, SINGLE_FILE, ModelConfig
from engine.errors import ConfigError

SCALE_SUFFIX = ".int8_scale"
"""A tensor stored as int8 has its rows' float32 scales beside it, under its name and this."""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """Which part of a tensor-parallel model a process owns."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"rank: {self.rank} is not within [0, {self.size})")

    def part(self, total: int) -> slice:
        """This rank's share of `total` units, as even as whole units allow; earlier ranks take the remainder."""
        base, extra = divmod(total, self.size)
        start = self.rank * base + min(self.rank, extra)
        return slice(start, start + base + (self.rank < extra))

    def parts(self, total: int) -> tuple[int, ...]:
        """Units of every rank, in rank order."""
        base, extra = divmod(total, self.size)
        return tuple(base + (rank < extra) for rank in range(self.size))

    def kv_heads(self, config: ModelConfig) -> slice:
        """This rank's KV heads; its query heads are those of the same groups.

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
"""A model that is not cut."""


class WeightFiles:
    """The tensors of one model folder, by name.

    Args:
        folder: holds `model.safetensors`, or `model.safetensors.index.json` and the files that it names.

    Raises:
        ConfigError: no safetensors in the folder, or a file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = {name: _open(folder / name) for name in _file_names(folder)}
        self._home = {tensor: file for file in self._files.values() for tensor in file.keys()}  # noqa: SIM118
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._home

    def read(
        self, name: str, shape: tuple[int, ...], *, rows: slice | None = None, cols: slice | None = None
    ) -> torch.Tensor:
        """One tensor, or the part [rows, cols] of it, without reading the rest.

        Args:
            name: as in the file.
            shape: of the whole tensor, as the config implies it.
            rows: part of the first dimension; None is all.
            cols: part of the second dimension; None is all.

        Raises:
            ConfigError: the tensor is missing, has another shape, or is of a type that is not supported.
        """
        file = self._home.get(name)
        if file is None:
            raise ConfigError(f"model: {self.folder} lacks tensor {name} of shape {list(shape)}")
        self._read.add(name)
        view = file.get_slice(name)
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
        """As `read`, for weights: floats, or int8 rows with a scale each, which come as float32."""
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
        """Numbers in all tensors."""
        return sum(math.prod(file.get_slice(name).get_shape()) for name, file in self._home.items())

    def check_all_read(self, *, ignore: Iterable[str] = ()) -> None:
        """Complain about tensors that no part of the model asked for: the config is not that of these weights.

        Args:
            ignore: endings of names that carry nothing the forward pass needs.

        Raises:
            ConfigError: naming up to five of them, with their shapes.
        """
        extra = sorted(name for name in self._home if name not in self._read and not name.endswith(tuple(ignore)))
        if extra:
            some = ", ".join(f"{name} {self._home[name].get_slice(name).get_shape()}" for name in extra[:5])
            raise ConfigError(
                f"model: {self.folder} holds {len(extra)} tensors that config.json does not imply: {some}"
            )


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
