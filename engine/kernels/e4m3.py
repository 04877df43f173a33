"""Numbers of the format e4m3 in Triton kernels, read and written by their bits.

Owns the conversion of codes, which are bytes, on any GPU: Triton's own type exists from compute capability 8.9 on. The
record of a token, its codes and their scale, is that of `engine.quantization.kv_cache`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton reads the annotations of a kernel, so that its arguments cannot have types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.quantization.kv_cache import FP8


@triton.jit
def decoded(codes):
    """float16 numbers that are 1/256 of those of e4m3 codes. Exact, since float16 has one more bit of exponent."""
    words = codes.to(tl.uint16)
    return (((words & 0x80) << 8) | ((words & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def encoded(x):
    """The e4m3 codes nearest to float32 numbers of at most 448, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Of the float32's mantissa three bits stay. The exponent's bias of 127 becomes 7.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below the smallest normal number, 2^-6, a code counts steps of 2^-9. Adding 2^23 rounds to whole steps.
    steps = (tl.abs(x) * 512.0 + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
    code = tl.where(tl.abs(x) < 0.015625, steps, normal)
    return (((bits >> 24) & 0x80) | code).to(tl.uint8)


@triton.jit
def store_record(records, scales, start, x, column, inside, DIM: tl.constexpr):
    """Write the record of one token and KV head.

    Args:
        records: uint8 memory, and `scales`: the same as float32.
        start: offset of the record in bytes, a multiple of 4. The scale follows DIM codes.
        x: values; 0 where they are not `inside`.
    """
    exact = x.to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(exact), axis=0), 448.0)
    tl.store(
        records + start + column, encoded(tl.div_rn(exact, tl.maximum(scale, 1.1754943508222875e-38))), mask=inside
    )
    tl.store(scales + (start + DIM) // 4, scale)


def float_view(records: torch.Tensor) -> torch.Tensor:
    """The memory of uint8 records as float32, for their scales; other caches as they are."""
    return records.view(torch.float32) if records.dtype is FP8 else records
