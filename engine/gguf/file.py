"""Reads GGUF files: metadata, and tensors one at a time, dequantised or as they are.

Owns the container format (versions 2 and 3, little-endian). Every length is checked against the size of the file, so a
damaged file raises `ConfigError`. The package `gguf` does the dequantisation. Knows nothing of models. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from engine.errors import ConfigError
from engine.gguf.codes import SPLITTERS, Codes, bytes_per_weight, split_blocks

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_FLOATS = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
_QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
TYPES = {int(kind): kind for kind in (*_FLOATS, *(GGMLQuantizationType[name] for name in _QUANTISED))}
"""Types of tensors that are read, by their number in the file."""


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    shape: tuple[int, ...]
    """Shape in numpy's order, rows first."""
    kind: int
    """GGML quantisation type."""
    offset: int
    """Byte offset from the start of the data section."""


class GGUFFile:
    """An open GGUF file, used as a context manager.

    Args:
        path: of the file.

    Raises:
        ConfigError: it is not a GGUF file, or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model: cannot read {path}: {error}") from None
        self.metadata: dict[str, Any] = {}
        self._infos: dict[str, _TensorInfo] = {}
        try:
            self._parse()
        except (struct.error, UnicodeDecodeError) as error:
            self.close()
            raise ConfigError(f"model: {path} is damaged: {error}") from None
        except ConfigError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Arrays that were read stay valid."""
        self._bytes.close()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors."""
        return tuple(self._infos)

    def get(self, key: str, kind: type) -> Any:
        """A metadata value.

        Args:
            key: name of the value.
            kind: expected Python type; list for arrays.

        Raises:
            ConfigError: the value is missing or has another type.
        """
        value = self.metadata.get(key)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ConfigError(f"model: {self.path} has {key} = {str(value)[:60]!r}; expected {kind.__name__}")
        return value

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, rows first.

        Raises:
            ConfigError: there is no such tensor.
        """
        if name not in self._infos:
            raise ConfigError(f"model: {self.path} lacks tensor {name}")
        return self._infos[name].shape

    def quantised_types(self) -> tuple[str, ...]:
        """Names of the quantised types that occur, sorted."""
        kinds = {info.kind for info in self._infos.values()}
        return tuple(sorted(TYPES[kind].name for kind in kinds if kind in TYPES and TYPES[kind] not in _FLOATS))

    def read(self, name: str, rows: slice | None = None) -> npt.NDArray[np.float32]:
        """A tensor, dequantised to float32, or some of its rows.

        Args:
            name: of the tensor.
            rows: with start and stop, within the first dimension; None reads all.

        Raises:
            ConfigError: there is no such tensor, its type is not supported, it reaches beyond the file, or it holds
                values that are not finite.
        """
        shape, raw = self._raw(name, rows)
        kind = self._layout(name)[0]
        try:
            with np.errstate(all="ignore"):  # Damaged scales are refused below.
                values = np.asarray(dequantize(raw, kind), dtype=np.float32)
        except (NotImplementedError, ValueError) as error:
            raise ConfigError(f"model: {self.path}: cannot dequantise {name} of type {kind.name}: {error}") from None
        self._check_finite(name, values)
        values = values.reshape(shape)
        return values[rows] if rows is not None and len(shape) == 1 else values

    def is_quantised(self, name: str) -> bool:
        """Whether a tensor is a matrix of quantised blocks.

        Raises:
            ConfigError: there is no such tensor.
        """
        return len(self.shape(name)) == 2 and TYPES.get(self._infos[name].kind) in SPLITTERS

    def read_codes(self, name: str, rows: slice) -> Codes:
        """Rows of a quantised matrix, as they are.

        Args:
            name: of the tensor, for which `is_quantised` holds.
            rows: with start and stop, within the first dimension.

        Raises:
            ConfigError: a reason of `read`.
        """
        _, raw = self._raw(name, rows)
        with np.errstate(all="ignore"):  # Damaged scales are refused below.
            codes = split_blocks(raw, self._layout(name)[0])
        for values in (codes.scales, codes.minimums):
            if values is not None:
                self._check_finite(name, values)
        return codes

    def _raw(self, name: str, rows: slice | None) -> tuple[tuple[int, ...], npt.NDArray[np.uint8]]:
        """Shape and bytes of a tensor, or of some of its rows: [..., bytes per row].

        Raises:
            ConfigError: a reason of `read`.
        """
        shape, (_, row_bytes) = self.shape(name), self._layout(name)
        start, num_bytes = self._data_start + self._infos[name].offset, math.prod(shape[:-1]) * row_bytes
        if start + num_bytes > len(self._bytes):
            raise ConfigError(f"model: {self.path} is cut short: tensor {name} reaches beyond its end")
        if rows is not None and len(shape) > 1:
            num_rows = rows.stop - rows.start
            bytes_per_row = num_bytes // shape[0]
            start, num_bytes, shape = (
                start + rows.start * bytes_per_row,
                num_rows * bytes_per_row,
                (num_rows, *shape[1:]),
            )
        raw = np.frombuffer(self._bytes[start : start + num_bytes], dtype=np.uint8).reshape(*shape[:-1], row_bytes)
        return shape, raw

    def _check_finite(self, name: str, values: npt.NDArray[np.float32]) -> None:
        if not np.isfinite(values).all():
            raise ConfigError(f"model: {self.path} is damaged: tensor {name} holds values that are not finite")

    def _layout(self, name: str) -> tuple[GGMLQuantizationType, int]:
        """Type of a tensor and bytes per row.

        Raises:
            ConfigError: the type is not supported, or a row is not whole blocks.
        """
        info = self._infos[name]
        kind = TYPES.get(info.kind)
        if kind is None:
            allowed = ", ".join(known.name for known in TYPES.values())
            raise ConfigError(
                f"model: {self.path}: tensor {name} is of type {_type_name(info.kind)}; allowed: {allowed}; use a file "
                "of one of these types"
            )
        per_block, block_bytes = GGML_QUANT_SIZES[kind]
        if info.shape[-1] % per_block:
            raise ConfigError(
                f"model: {self.path}: tensor {name} has rows of {info.shape[-1]}, not whole blocks of {per_block}"
            )
        return kind, info.shape[-1] // per_block * block_bytes

    def bytes_per_element(self, name: str) -> float:
        """Bytes in the file of one element of a tensor.

        Raises:
            ConfigError: the type is not supported.
        """
        return self._layout(name)[1] / self.shape(name)[-1]

    def packed_bytes(self) -> int:
        """Bytes in memory of all tensors if quantised matrices stay as they are and the others have 16 bits each.

        Raises:
            ConfigError: a type is not supported.
        """
        total = 0.0
        for name, info in self._infos.items():
            kind = self._layout(name)[0]
            total += math.prod(info.shape) * (bytes_per_weight(kind) if self.is_quantised(name) else 2)
        return round(total)

    def check_size(self) -> None:
        """Check that all tensors together fit into the file: a damaged file must not fill the memory with copies.

        Raises:
            ConfigError: they do not, or a type is not supported.
        """
        needed = sum(math.prod(info.shape[:-1]) * self._layout(name)[1] for name, info in self._infos.items())
        if needed > len(self._bytes) - self._data_start:
            raise ConfigError(f"model: {self.path} is cut short: its tensors need {needed} bytes")

    def _parse(self) -> None:
        if self._bytes[:4] != _MAGIC:
            raise ConfigError(f"model: {self.path} is not a GGUF file")
        self._position = 4
        version, num_tensors, num_values = self._scalar("I"), self._scalar("Q"), self._scalar("Q")
        if version not in (2, 3):
            raise ConfigError(f"model: {self.path} is GGUF version {version}; allowed: 2, 3")
        for _ in range(self._plausible(num_values)):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"), nesting=0)
        for _ in range(self._plausible(num_tensors)):
            name = self._string()
            self._infos[name] = self._tensor_info(name)
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ConfigError(f"model: {self.path} has general.alignment {alignment!r}")
        self._data_start = -(-self._position // alignment) * alignment

    def _tensor_info(self, name: str) -> _TensorInfo:
        num_dims = self._scalar("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise ConfigError(f"model: {self.path}: tensor {name} has {num_dims} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(num_dims))[::-1]
        if min(shape) < 1:
            raise ConfigError(f"model: {self.path}: tensor {name} has shape {list(shape)}")
        return _TensorInfo(shape=shape, kind=self._scalar("I"), offset=self._scalar("Q"))

    def _value(self, kind: int, *, nesting: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY and nesting < 2:
            item, length = self._scalar("I"), self._plausible(self._scalar("Q"))
            return [self._value(item, nesting=nesting + 1) for _ in range(length)]
        raise ConfigError(f"model: {self.path} is damaged: metadata of unknown type {kind}")

    def _scalar(self, code: str) -> Any:
        value = struct.unpack_from("<" + code, self._bytes, self._position)[0]
        self._position += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        length = self._plausible(self._scalar("Q"))
        raw = self._bytes[self._position : self._position + length]
        self._position += length
        return raw.decode("utf-8")

    def _plausible(self, count: int) -> int:
        """Check a number of items of at least one byte each against the rest of the file, and return it."""
        if count > len(self._bytes) - self._position:
            raise ConfigError(f"model: {self.path} is damaged: a length of {count} at byte {self._position}")
        return count


def _type_name(kind: int) -> str:
    try:
        return str(GGMLQuantizationType(kind).name)
    except ValueError:
        return str(kind)
