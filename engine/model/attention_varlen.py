"""Attention with PyTorch's paged flash attention, on CUDA. It reads K and V in place, without gathering blocks.

`engine.model.attention` documents the interface, the layout of the cache and the meaning of a span.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.core.step import ForwardInput
from engine.errors import EngineError
from engine.sampling.staging import to_device


@dataclass(frozen=True, slots=True)
class PagedSpans:
    """The spans of a forward on the device, in the form of `varlen_attn`. All tensors are int32."""

    cu_q: torch.Tensor
    """[S + 1] cumulative rows of the spans."""
    cu_kv: torch.Tensor
    """[S + 1] cumulative KV lengths. FlashAttention 2 requires both cumulative lengths, also with block tables."""
    kv_lens: torch.Tensor
    """[S] KV length of each span, its rows included."""
    block_tables: torch.Tensor
    """[S, W] block ids."""
    max_q: int
    max_kv: int

    def limits(self, window: int) -> tuple[int, int]:
        """Tokens before and after a row's own that it attends to, -1 without a limit.

        Causal, except that a single row sees all tokens anyway. FlashAttention 2 splits the KV length and packs the
        query heads of a group only for one row and an unlimited window.
        """
        if window:
            return window - 1, 0
        return (-1, -1) if self.max_q == 1 else (-1, 0)


class VarlenAttention:
    """PyTorch's paged flash attention: the same call for prefill, decode and verify.

    Args:
        device: of query and cache.
        window: tokens that a row attends to, its own included; 0 means all.
    """

    def __init__(self, *, device: torch.device, window: int = 0) -> None:
        from torch.nn.attention.varlen import varlen_attn

        self._varlen_attn = varlen_attn
        self._device = device
        self._window = window

    def prepare(self, forward_input: ForwardInput, *, block_size: int) -> PagedSpans:
        """As `Attention.prepare`.

        Raises:
            EngineError: the forward has a draft with branches, which this attention cannot mask.
        """
        if forward_input.tree is not None:
            raise EngineError("paged flash attention has no tree mask; on cuda every draft must be a chain")
        max_kv = int(forward_input.kv_lens.max())
        cu_q, cu_kv, kv_lens, block_tables = to_device(
            [
                _int32(np.concatenate(([0], np.cumsum(forward_input.q_lens)))),
                _int32(np.concatenate(([0], np.cumsum(forward_input.kv_lens)))),
                _int32(forward_input.kv_lens),
                _int32(forward_input.block_tables[:, : -(-max_kv // block_size)]),
            ],
            self._device,
        )
        return PagedSpans(
            cu_q=cu_q,
            cu_kv=cu_kv,
            kv_lens=kv_lens,
            block_tables=block_tables,
            max_q=int(forward_input.q_lens.max()),
            max_kv=max_kv,
        )

    def attend(
        self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, prepared: PagedSpans
    ) -> torch.Tensor:
        out = self._varlen_attn(
            query,
            k_cache,
            v_cache,
            prepared.cu_q,
            prepared.cu_kv,
            prepared.max_q,
            prepared.max_kv,
            window_size=prepared.limits(self._window),
            enable_gqa=True,
            seqused_k=prepared.kv_lens,
            block_table=prepared.block_tables,
        )
        if not isinstance(out, torch.Tensor):
            raise TypeError("varlen_attn returned auxiliary outputs that were not asked for")
        return out.reshape(query.shape[0], -1)


class TritonAttention(VarlenAttention):
    """Paceline's own kernel for spans of few rows (decode, verify); `VarlenAttention` for the others.

    Args:
        group_size: query heads per KV head.
        device: of query and cache.
    """

    def __init__(self, *, group_size: int, device: torch.device) -> None:
        super().__init__(device=device)
        from engine.kernels.paged_attention import MAX_PACKED, paged_attention

        self._paged_attention = paged_attention
        self._max_q = MAX_PACKED // group_size

    def attend(
        self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, prepared: PagedSpans
    ) -> torch.Tensor:
        if prepared.max_q > self._max_q:
            return super().attend(query, k_cache, v_cache, prepared)
        out: torch.Tensor = self._paged_attention(
            *(query, k_cache, v_cache, prepared.cu_q, prepared.kv_lens, prepared.block_tables),
            *(prepared.max_q, prepared.max_kv),
        )
        return out


def _int32(values: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.ascontiguousarray(values, dtype=np.int32)
