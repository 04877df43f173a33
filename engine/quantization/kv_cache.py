"""Quantised keys and values: each token of a KV head has one scale, so a row depends on no other row.

    value = scale * code,  scale = max |value| / L of the token and head
    int8 (a cache of int8 elements)          L = 127,  code = round(value / scale)
    FP8, e4m3 (a cache of uint8 elements)    L = 448,  code = the nearest e4m3 number to value / scale, as its byte

Owns the record of a token, its codes followed by the float32 scale, as PyTorch's operators and the Triton kernels read
and write it. The native kernel keeps the same bytes per token in another order, see `engine/model/native/decoder.cpp`.
"""

from __future__ import annotations

import torch

INT8, FP8 = torch.int8, torch.uint8
"""Element types of caches of records."""
RECORDS = (INT8, FP8)
SCALE_BYTES = 4
LARGEST_CODE, LARGEST_E4M3 = 127, 448


def record_len(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of the cache for one token of a KV head."""
    return head_dim + SCALE_BYTES if dtype in RECORDS else head_dim


def token_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of the cache for one token of a KV head, of K or of V."""
    return record_len(head_dim, dtype) * dtype.itemsize


def quantised(values: torch.Tensor, dtype: torch.dtype = INT8) -> torch.Tensor:
    """Records of floats.

    Args:
        values: [..., head_dim] of any float type.
        dtype: `INT8` or `FP8`.

    Returns:
        [..., head_dim + 4] of `dtype`.
    """
    exact = values.float()
    scales = exact.abs().amax(-1, keepdim=True) / (LARGEST_CODE if dtype is INT8 else LARGEST_E4M3)
    codes = exact / scales.clamp(min=torch.finfo(torch.float32).tiny)
    if dtype is INT8:
        return torch.cat((codes.round().to(INT8), scales.view(INT8)), -1)
    return torch.cat((codes.to(torch.float8_e4m3fn).view(FP8), scales.view(FP8)), -1)


def dequantised(records: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What records stand for, rounded once.

    Args:
        records: [..., head_dim + 4] int8 or uint8.
        dtype: of the result.

    Returns:
        [..., head_dim].
    """
    codes, scales = records[..., :-SCALE_BYTES], records[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    if records.dtype is FP8:
        codes = codes.contiguous().view(torch.float8_e4m3fn)
    return (codes.float() * scales).to(dtype)
