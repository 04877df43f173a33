"""Attention with PyTorch's paged flash attention, on CUDA: it reads the blocks where they lie.

The interface, and what the cache and a span are, stand in `engine.model.attention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.core.step import ForwardInput


@dataclass(frozen=True, slots=True)
class _Varlen:
    """A plan on the device, as `varlen_attn` takes it; all int32."""

    cu_q: torch.Tensor
    kv_lens: torch.Tensor
    block_tables: torch.Tensor
    max_q: int
    max_kv: int


class VarlenAttention:
    """PyTorch's paged flash attention: one call for prefill, decode and verify alike."""

    def __init__(self, *, device: torch.device) -> None:
        from torch.nn.attention.varlen import varlen_attn

        self._varlen_attn = varlen_attn
        self._device = device

    def prepare(self, forward_input: ForwardInput, *, block_size: int) -> _Varlen:
        max_kv = int(forward_input.kv_lens.max())
        cu_q = np.concatenate(([0], np.cumsum(forward_input.q_lens)))
        return _Varlen(
            cu_q=self._int32(cu_q),
            kv_lens=self._int32(forward_input.kv_lens),
            block_tables=self._int32(forward_input.block_tables[:, : -(-max_kv // block_size)]),
            max_q=int(forward_input.q_lens.max()),
            max_kv=max_kv,
        )

    def attend(
        self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, prepared: _Varlen
    ) -> torch.Tensor:
        out = self._varlen_attn(
            query,
            k_cache,
            v_cache,
            prepared.cu_q,
            None,
            prepared.max_q,
            prepared.max_kv,
            window_size=(-1, 0),
            enable_gqa=True,
            seqused_k=prepared.kv_lens,
            block_table=prepared.block_tables,
        )
        if not isinstance(out, torch.Tensor):
            raise TypeError("varlen_attn returned auxiliary outputs that were not asked for")
        return out.reshape(query.shape[0], -1)

    def _int32(self, values: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32)).to(self._device, non_blocking=True)
