"""Quantised matrices as integer codes with a scale and a minimum per block, and GGUF blocks in that form.

    weight[n, k] = scales[n, k // block] * codes[n, k] + minimums[n, k // block], rounded once to float32

Owns the order of bits in GGUF's blocks. The values are those of the package `gguf`, bit for bit: products of a scale
and a code are exact wherever a minimum is added. Knows nothing of files. Formats:
https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType

_Bytes = npt.NDArray[np.uint8]
_Ints = npt.NDArray[np.int8]
_Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Codes:
    """A quantised matrix of N rows and K columns."""

    codes: _Ints
    """[N, K] int8."""
    scales: _Floats
    """[N, K / block] float32."""
    minimums: _Floats | None
    """[N, K / block] float32; None where all are 0."""
    bits: int
    """4 if the codes are within `offset` .. `offset` + 15, else 8."""
    offset: int
    """Smallest 4-bit code."""
    is_half: bool
    """Whether float16 holds the scales and minimums exactly."""

    @property
    def block(self) -> int:
        """Columns with one scale."""
        return int(self.codes.shape[1]) // int(self.scales.shape[1])

    @property
    def num_bytes(self) -> float:
        """Bytes of the codes, scales and minimums in memory, in whole bits."""
        num_grids = 1 if self.minimums is None else 2
        return self.codes.size * self.bits / 8 + num_grids * self.scales.size * (2 if self.is_half else 4)

    def rows(self, index: npt.NDArray[np.int64] | slice) -> Codes:
        """Some of the rows."""
        minimums = None if self.minimums is None else self.minimums[index]
        return replace(self, codes=self.codes[index], scales=self.scales[index], minimums=minimums)

    def values(self) -> _Floats:
        """[N, K] float32."""
        shape = (*self.scales.shape, self.block)
        values = self.codes.reshape(shape) * self.scales[..., None]
        if self.minimums is not None:
            values += self.minimums[..., None]
        return values.reshape(self.codes.shape)


def stacked(parts: Sequence[Codes]) -> Codes:
    """The rows of several matrices with equally many columns as one, in the widest of their forms."""
    block = min(part.block for part in parts)
    is_narrow = all(part.bits == 4 and part.offset == parts[0].offset for part in parts)
    has_minimums = any(part.minimums is not None for part in parts)
    finer = [part.block // block for part in parts]
    return Codes(
        np.concatenate([part.codes for part in parts]),
        np.concatenate([np.repeat(part.scales, times, 1) for part, times in zip(parts, finer, strict=True)]),
        np.concatenate([np.repeat(_minimums(part), times, 1) for part, times in zip(parts, finer, strict=True)])
        if has_minimums
        else None,
        bits=4 if is_narrow else 8,
        offset=parts[0].offset if is_narrow else 0,
        is_half=all(part.is_half for part in parts),
    )


def _minimums(part: Codes) -> _Floats:
    return np.zeros_like(part.scales) if part.minimums is None else part.minimums


def split_blocks(raw: _Bytes, kind: GGMLQuantizationType) -> Codes:
    """The blocks of quantised rows as codes.

    Args:
        raw: [N, bytes per row].
        kind: a type of `SPLITTERS`.
    """
    split, size = SPLITTERS[kind]
    codes, scales, minimums = split(raw.reshape(-1, size))
    rows = len(raw)
    has_few_bits = kind in _FOUR_BITS
    return Codes(
        np.ascontiguousarray(codes.reshape(rows, -1), dtype=np.int8),
        scales.reshape(rows, -1),
        None if minimums is None else minimums.reshape(rows, -1),
        bits=4 if has_few_bits else 8,
        offset=_FOUR_BITS.get(kind, 0),
        is_half=kind not in _SUPER_BLOCKS,
    )


def bytes_per_weight(kind: GGMLQuantizationType) -> float:
    """Bytes in memory of one weight of a type that stays quantised."""
    block = split_blocks(np.zeros((1, SPLITTERS[kind][1]), np.uint8), kind)
    return block.num_bytes / block.codes.size


_Split = tuple[npt.NDArray[np.int8 | np.uint8], _Floats, _Floats | None]


def _halves(blocks: _Bytes, start: int) -> _Floats:
    """The float16 at a byte of each block, [B, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: _Bytes) -> _Bytes:
    """Low and high halves of groups of bytes: [B, groups, G] -> [B, groups * 2 G]."""
    low, high = packed & np.uint8(15), packed >> np.uint8(4)
    return np.stack((low, high), axis=2).reshape(len(packed), -1)


def _signed(codes: _Bytes, zero: int) -> _Ints:
    return codes.view(np.int8) - np.int8(zero)


def _high_bits(packed: _Bytes) -> _Bytes:
    """Bits of four bytes, low bits first, as the fifth bits of codes."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: _Bytes) -> _Split:
    return _signed(_nibbles(blocks[:, None, 2:]), 8), _halves(blocks, 0), None


def _q4_1(blocks: _Bytes) -> _Split:
    return _nibbles(blocks[:, None, 4:]), _halves(blocks, 0), _halves(blocks, 2)


def _q5_0(blocks: _Bytes) -> _Split:
    return _signed(_nibbles(blocks[:, None, 6:]) | _high_bits(blocks[:, 2:6]), 16), _halves(blocks, 0), None


def _q5_1(blocks: _Bytes) -> _Split:
    return _nibbles(blocks[:, None, 8:]) | _high_bits(blocks[:, 4:8]), _halves(blocks, 0), _halves(blocks, 2)


def _q8_0(blocks: _Bytes) -> _Split:
    return blocks[:, 2:].view(np.int8), _halves(blocks, 0), None


def _k_scales(blocks: _Bytes) -> tuple[_Floats, _Floats]:
    """Scales and minimums of the eight blocks of a Q4_K or Q5_K super-block: six bits each, times two float16."""
    low, high, rest = (blocks[:, start : start + 4] for start in (4, 8, 12))
    scales = np.concatenate((low & 63, (rest & 15) | (low >> 6 << 4)), axis=1)
    minimums = np.concatenate((high & 63, (rest >> 4) | (high >> 6 << 4)), axis=1)
    return _halves(blocks, 0) * scales.astype(np.float32), -(_halves(blocks, 2) * minimums.astype(np.float32))


def _q4_k(blocks: _Bytes) -> _Split:
    return _nibbles(blocks[:, 16:].reshape(-1, 4, 32)), *_k_scales(blocks)


def _q5_k(blocks: _Bytes) -> _Split:
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    high = (blocks[:, None, 16:48] >> shifts & np.uint8(1)) << np.uint8(4)
    return _nibbles(blocks[:, 48:].reshape(-1, 4, 32)) | high.reshape(len(blocks), -1), *_k_scales(blocks)


def _q6_k(blocks: _Bytes) -> _Split:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64))
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & np.uint8(3)) << np.uint8(4)
    scales = _halves(blocks, 208) * np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return _signed(low | high.reshape(len(blocks), -1), 32), scales, None


_Kind = GGMLQuantizationType
SPLITTERS: dict[GGMLQuantizationType, tuple[Callable[[_Bytes], _Split], int]] = {
    _Kind.Q4_0: (_q4_0, 18),
    _Kind.Q4_1: (_q4_1, 20),
    _Kind.Q5_0: (_q5_0, 22),
    _Kind.Q5_1: (_q5_1, 24),
    _Kind.Q8_0: (_q8_0, 34),
    _Kind.Q4_K: (_q4_k, 144),
    _Kind.Q5_K: (_q5_k, 176),
    _Kind.Q6_K: (_q6_k, 210),
}
"""How each type is split, and the bytes of its blocks."""
_FOUR_BITS = {_Kind.Q4_0: -8, _Kind.Q4_1: 0, _Kind.Q4_K: 0}
"""Types with codes of four bits, and the smallest of them."""
_SUPER_BLOCKS = (_Kind.Q4_K, _Kind.Q5_K, _Kind.Q6_K)
