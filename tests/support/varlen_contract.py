"""PyTorch's paged flash attention on a CPU, with the argument checks of FlashAttention 2.

Owns a CPU kernel for the operator behind `torch.nn.attention.varlen.varlen_attn`, so that `VarlenAttention` itself can
be compared with the reference without a GPU. The checks are those of the CUDA operator, which refuses what breaks them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.attention.varlen as varlen

PAGE = 256


@functools.cache
def register() -> None:
    """Register the kernel, once per process."""
    varlen._varlen_attn.register_kernel("cpu")(_flash_attention_2)


def _check(
    query: torch.Tensor, key: torch.Tensor, lengths: dict[str, tuple[torch.Tensor, tuple[int, ...]]], window: Any
) -> None:
    for name, (tensor, shape) in lengths.items():
        if tensor.dtype is not torch.int32 or tensor.stride(-1) != 1 or tuple(tensor.shape) != shape:
            raise RuntimeError(f"{name} must be contiguous int32 of shape {shape}, is {tensor.dtype} {tensor.shape}")
    if key.shape[1] % PAGE:
        raise RuntimeError(f"Paged KV cache block size must be divisible by {PAGE}, is {key.shape[1]}")
    if query.shape[-1] % 8 or query.shape[-1] > 256:
        raise RuntimeError(f"head_dim must be a multiple of 8 and at most 256, is {query.shape[-1]}")
    if query.dtype not in (torch.float16, torch.bfloat16) or key.dtype is not query.dtype:
        raise RuntimeError(f"FlashAttention only supports fp16 and bf16, given {query.dtype} and {key.dtype}")
    if window != [-1, -1] and (window[0] < -1 or window[1] != 0):
        raise RuntimeError(f"window {window} is not used here")


def _flash_attention_2(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: Any = None,
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if cu_seq_k is None:
        raise RuntimeError("cumulative_sequence_length_q and cumulative_sequence_length_k must be both set or not set")
    assert seqused_k is not None
    assert block_table is not None
    num_spans = cu_seq_q.numel() - 1
    window = list(window_size) if window_size is not None else [-1, 0 if is_causal else -1]
    lengths = {
        "cu_seq_q": (cu_seq_q, (num_spans + 1,)),
        "cu_seq_k": (cu_seq_k, (num_spans + 1,)),
        "seqused_k": (seqused_k, (num_spans,)),
        "block_table": (block_table, (num_spans, block_table.shape[1])),
    }
    _check(query, key, lengths, window)
    group = query.shape[1] // key.shape[2]
    assert enable_gqa or group == 1
    # As on a GPU, rows of no span keep what was in their memory.
    out, lse = torch.full_like(query, float("nan")), torch.full((query.shape[1], query.shape[0]), float("nan"))
    for span in range(num_spans):
        begin, end, num_kv = int(cu_seq_q[span]), int(cu_seq_q[span + 1]), int(seqused_k[span])
        assert end - begin <= max_q
        assert num_kv <= max_k
        blocks = block_table[span, : -(-num_kv // key.shape[1])].long()
        keys = key[blocks].flatten(0, 1)[:num_kv].float().repeat_interleave(group, 1)
        values = value[blocks].flatten(0, 1)[:num_kv].float().repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", query[begin:end].float(), keys) * (scale or query.shape[-1] ** -0.5)
        if window[1] == 0:
            last_seen = num_kv - (end - begin) + torch.arange(end - begin)
            scores.masked_fill_(torch.arange(num_kv) > last_seen[:, None], float("-inf"))
            if window[0] >= 0:
                scores.masked_fill_(torch.arange(num_kv) < last_seen[:, None] - window[0], float("-inf"))
        out[begin:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(out.dtype)
        lse[:, begin:end] = scores.logsumexp(-1)
    return out, lse, torch.empty(2, dtype=torch.uint64)
