"""Causal attention of a forward's rows over the paged KV cache, behind one interface with three implementations.

Owns the interface, the choice and the slow twin, `ReferenceAttention` (plain loops); `PaddedAttention` (PyTorch's
operators, any device) and `VarlenAttention` (paged flash attention, CUDA) have files of their own. What depends on the
plan alone is computed once per forward (`prepare`), not per layer. Knows nothing of layers, weights or who owns blocks.

    cache (one for K, one for V)   [num_blocks, block_size, num_kv_heads, head_dim]
    span s                         its q_lens[s] rows are the last of its kv_lens[s] tokens; row j sees
                                   tokens [0, kv_lens[s] - q_lens[s] + j]
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import numpy as np
import torch

from engine.core.step import ForwardInput
from engine.errors import ConfigError
from engine.model.attention_padded import PaddedAttention
from engine.model.attention_varlen import TritonAttention, VarlenAttention

AttentionKind = Literal["auto", "reference", "padded", "varlen", "triton"]


class Attention(Protocol):
    """Attention over paged KV. `prepare` once per forward, `attend` once per layer with what it returned."""

    def prepare(self, forward_input: ForwardInput, *, block_size: int) -> Any:
        """What `attend` needs of the plan, on the device."""
        ...

    def attend(self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, prepared: Any) -> torch.Tensor:
        """Attention of each row over its span's tokens, its own included.

        Args:
            query: [N, num_heads, head_dim]; query head h reads KV head h // (num_heads / num_kv_heads).
            k_cache: [num_blocks, block_size, num_kv_heads, head_dim], rows already written.
            v_cache: as k_cache.
            prepared: from `prepare` for the same plan.

        Returns:
            [N, num_heads * head_dim], dtype of query.
        """
        ...


def make_attention(kind: AttentionKind, *, group_size: int, dtype: torch.dtype, device: torch.device) -> Attention:
    """The fastest attention for the device and dtype, or the one asked for.

    Args:
        kind: `auto` chooses.
        group_size: query heads per KV head.
        dtype: of query and cache.
        device: of query and cache.

    Raises:
        ConfigError: `varlen` or `triton` on a device or dtype that it does not serve.
    """
    flash = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    if kind in ("varlen", "triton") and not flash:
        raise ConfigError(f"attention: {kind} needs cuda and bfloat16, given {device.type} and {dtype}")
    if kind == "triton":
        return TritonAttention(group_size=group_size, device=device)
    if kind == "reference":
        return ReferenceAttention()
    if kind == "varlen" or (kind == "auto" and flash):
        return VarlenAttention(device=device)
    return PaddedAttention(group_size=group_size, dtype=dtype, device=device)


class ReferenceAttention:
    """One row and one head at a time, softmax in float32."""

    def prepare(self, forward_input: ForwardInput, *, block_size: int) -> ForwardInput:
        del block_size  # The cache's own shape tells it.
        return forward_input

    def attend(
        self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, prepared: ForwardInput
    ) -> torch.Tensor:
        num_rows, num_heads, head_dim = query.shape
        _, block_size, num_kv_heads, _ = k_cache.shape
        group = num_heads // num_kv_heads
        out = torch.empty_like(query)
        row = 0
        for q_len, kv_len, table in zip(prepared.q_lens, prepared.kv_lens, prepared.block_tables, strict=True):
            blocks = torch.from_numpy(table[: -(-kv_len // block_size)].astype(np.int64)).to(k_cache.device)
            keys = k_cache[blocks].flatten(0, 1).float()  # [tokens, num_kv_heads, head_dim]
            values = v_cache[blocks].flatten(0, 1).float()
            for j in range(q_len):
                seen = kv_len - q_len + j + 1
                for head in range(num_heads):
                    scores = keys[:seen, head // group] @ query[row, head].float() / head_dim**0.5
                    out[row, head] = (scores.softmax(0) @ values[:seen, head // group]).to(out.dtype)
                row += 1
        return out.view(num_rows, num_heads * head_dim)
