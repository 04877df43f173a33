"""Keys and values as int8: each token of a KV head has one scale, so a row depends on no other row.

    value = scale * code,  scale = max |value| / 127 of the token and head,  code = round(value / scale)

Owns the record of a token, its codes followed by the float32 scale, as PyTorch's operators read and write it. The
native kernel keeps the same bytes per token in another order, see `engine/model/native/decoder.cpp`.
"""

from __future__ import annotations

import torch

SCALE_BYTES = 4
LARGEST_CODE = 127


def record_len(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of the cache for one token of a KV head."""
    return head_dim + SCALE_BYTES if dtype is torch.int8 else head_dim


def token_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of the cache for one token of a KV head, of K or of V."""
    return record_len(head_dim, dtype) * dtype.itemsize


def quantised(values: torch.Tensor) -> torch.Tensor:
    """Records of floats.

    Args:
        values: [..., head_dim] of any float type.

    Returns:
        [..., head_dim + 4] int8.
    """
    exact = values.float()
    scales = exact.abs().amax(-1, keepdim=True) / LARGEST_CODE
    codes = (exact / scales.clamp(min=torch.finfo(torch.float32).tiny)).round()
    return torch.cat((codes.to(torch.int8), scales.view(torch.int8)), -1)


def dequantised(records: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What records stand for, rounded once.

    Args:
        records: [..., head_dim + 4] int8.
        dtype: of the result.

    Returns:
        [..., head_dim].
    """
    codes, scales = records[..., :-SCALE_BYTES], records[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return (codes.float() * scales).to(dtype)
