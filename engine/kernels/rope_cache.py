"""Rotary embedding of q and k, optional q/k RMSNorm, and the write of k and v into the paged cache, in one launch.

Owns one program per row and head. The rotation is the one of `engine.model.rope`: x * cos + swap_halves(x) * sin, where
sin is negative in the first half.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton reads the annotations of a kernel, so that its arguments cannot have types.

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from engine.kernels.e4m3 import float_view, store_record
from engine.quantization.kv_cache import FP8, quantised


@triton.jit
def rope_cache_kernel(
    qkv,
    cos,
    sin,
    slots,
    q_weight,
    k_weight,
    keys,
    values,
    key_scales,
    value_scales,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
    RECORD: tl.constexpr,
):
    """One row and one head: q is rotated in place, k is rotated into the cache, v is copied into the cache.

    RECORD is the size of a record of the cache in FP8, or 0 for a cache of the type of `qkv`.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < DIM
    swapped = (column + DIM // 2) % DIM
    source = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * DIM
    slot = tl.load(slots + row)
    x = tl.load(source + column, mask=inside, other=0.0)
    if head >= HEADS + KV_HEADS:
        place = slot * KV_HEADS + head - HEADS - KV_HEADS
        if RECORD:
            store_record(values, value_scales, place * RECORD, x, column, inside, DIM)
        else:
            tl.store(values + place * DIM + column, x, mask=inside)
    else:
        first = x.to(tl.float32)
        second = tl.load(source + swapped, mask=inside, other=0.0).to(tl.float32)
        if HAS_NORM:
            scale = tl.rsqrt(tl.sum(first * first, axis=0) / DIM + eps)
            weight = q_weight if head < HEADS else k_weight
            first *= scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
            second *= scale * tl.load(weight + swapped, mask=inside, other=0.0).to(tl.float32)
        turned = first * tl.load(cos + row * DIM + column, mask=inside, other=0.0).to(tl.float32)
        turned += second * tl.load(sin + row * DIM + column, mask=inside, other=0.0).to(tl.float32)
        turned = turned.to(qkv.dtype.element_ty)
        if head < HEADS:
            tl.debug_barrier()  # All threads have read the head before one of them writes it.
            tl.store(source + column, turned, mask=inside)
        else:
            place = slot * KV_HEADS + head - HEADS
            if RECORD:
                store_record(keys, key_scales, place * RECORD, turned, column, inside, DIM)
            else:
                tl.store(keys + place * DIM + column, turned, mask=inside)


@torch.library.custom_op("paceline::rope_cache", mutates_args=("qkv", "keys", "values"))
def rope_cache(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
) -> None:
    """Rotate q in place, and write the rotated k and v into the cache. One launch.

    Args:
        qkv: [N, H + 2 G, D] contiguous: q heads, then k heads, then v heads.
        cos, sin: [N, 1, D] from `engine.model.rope.Rope`.
        slots: [N] int64: block_id * block_size + offset.
        keys, values: [num_blocks, block_size, G, D], the cache; uint8 records of D + 4 for FP8, with D a multiple of 4.
        q_weight, k_weight: [D] RMSNorm weights of each head, or None.
        eps: of those norms.
    """
    rows, all_heads, dim = qkv.shape
    kv_heads = keys.shape[2]
    heads = all_heads - 2 * kv_heads
    if rows == 0:
        return
    rope_cache_kernel[(rows, all_heads)](
        qkv,
        cos,
        sin,
        slots,
        qkv if q_weight is None else q_weight,
        qkv if k_weight is None else k_weight,
        keys,
        values,
        float_view(keys),
        float_view(values),
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        BLOCK=triton.next_power_of_2(dim),
        HAS_NORM=q_weight is not None,
        RECORD=keys.shape[3] if keys.dtype is FP8 else 0,
        num_warps=1,
    )


@rope_cache.register_fake
def _(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
) -> None:
    del qkv, cos, sin, slots, keys, values, q_weight, k_weight, eps


def rope_cache_reference(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
) -> None:
    """The twin of `rope_cache`, in float32."""
    _, all_heads, dim = qkv.shape
    kv_heads = keys.shape[2]
    heads = all_heads - 2 * kv_heads
    parts = [qkv[:, :heads].float(), qkv[:, heads : heads + kv_heads].float()]
    for index, weight in enumerate((q_weight, k_weight)):
        if weight is not None:
            parts[index] = F.rms_norm(parts[index], (dim,), weight.float(), eps)
    query, key = (part * cos.float() + part.roll(dim // 2, -1) * sin.float() for part in parts)
    for cache, rows in ((keys, key.to(qkv.dtype)), (values, qkv[:, heads + kv_heads :])):
        records = quantised(rows, FP8) if cache.dtype is FP8 else rows
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, records)
    qkv[:, :heads] = query.to(qkv.dtype)
