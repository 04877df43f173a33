"""Weights in the layouts of the native library: bfloat16, or quantised as they are stored.

Owns their memory outside of Python, and knows how much of it is quantised. Layouts are in matrix.h and packed.h.
"""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass

import numpy as np
import torch

from engine.gguf.codes import Codes
from engine.model.native.library import NativeCodes, load_library


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """The weights that stay quantised."""

    num_bytes: int = 0
    """Their memory."""
    bits: tuple[int, ...] = ()
    """Widths of their codes, ascending."""

    @property
    def label(self) -> str:
        """For example `packed 4-bit and 8-bit`; empty if there are none."""
        return f"packed {' and '.join(f'{bits}-bit' for bits in self.bits)}" if self.bits else ""

    def plus(self, bits: int, num_bytes: int) -> PackedWeights:
        """With one more matrix."""
        return PackedWeights(self.num_bytes + num_bytes, tuple(sorted({*self.bits, bits})))


class Matrices:
    """Matrices of the native library. They live as long as this.

    Raises:
        NativeUnavailable: there is no library for this machine.
    """

    def __init__(self) -> None:
        self._library = load_library()
        self._shapes: dict[int, tuple[int, int]] = {}
        self.packed = PackedWeights()
        """Those that are quantised."""

    def pack(self, weight: torch.Tensor, blocks: int) -> int:
        """Address of a copy of a weight.

        Args:
            weight: [out, in] bfloat16; `in` is even.
            blocks: column blocks per panel, 2 or 4.

        Raises:
            MemoryError: there is no memory.
        """
        weight = weight.contiguous()
        out, width = weight.shape
        return self._kept(self._library.matrix_pack(weight.data_ptr(), out, width, blocks), (out, width))

    def pack_codes(self, codes: Codes, blocks: int) -> int:
        """Address of a copy of a quantised weight.

        Args:
            codes: [out, in]; its block is a multiple of 16.
            blocks: column blocks per panel, 2 or 4.

        Raises:
            MemoryError: there is no memory.
        """
        elements, scales = np.ascontiguousarray(codes.codes), np.ascontiguousarray(codes.scales)
        minimums = None if codes.minimums is None else np.ascontiguousarray(codes.minimums)
        native = NativeCodes(
            codes=elements.ctypes.data,
            scales=scales.ctypes.data,
            minimums=None if minimums is None else minimums.ctypes.data,
            bits=codes.bits,
            block=codes.block,
            offset=codes.offset,
            is_half=codes.is_half,
        )
        out, width = codes.codes.shape
        packed = self._library.matrix_pack_codes(ctypes.byref(native), out, width, blocks)
        matrix = self._kept(packed, (out, width))
        self.packed = self.packed.plus(codes.bits, self._library.matrix_bytes(matrix))
        return matrix

    def multiply(self, matrix: int, x: torch.Tensor) -> torch.Tensor:
        """x W^T on one thread, as a forward computes it.

        Args:
            matrix: from `pack` or `pack_codes`.
            x: [N, in] bfloat16.

        Returns:
            [N, out] float32.
        """
        x = x.contiguous()
        product = torch.empty(len(x), self._shapes[matrix][0])
        self._library.matrix_multiply(matrix, x.data_ptr(), len(x), product.data_ptr())
        return product

    def read(self, matrix: int) -> torch.Tensor:
        """The weight of a matrix, [out, in] bfloat16."""
        weight = torch.empty(self._shapes[matrix])
        self._library.matrix_read(matrix, weight.data_ptr())
        return weight.bfloat16()

    def _kept(self, matrix: int | None, shape: tuple[int, int]) -> int:
        if matrix is None:
            raise MemoryError(f"no memory for a packed weight of {shape[0]} x {shape[1]}")
        weakref.finalize(self, self._library.matrix_free, matrix)
        self._shapes[matrix] = shape
        return matrix
