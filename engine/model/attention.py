"""Causal attention over the paged KV cache: one interface, five implementations.

Owns the interface, the choice, the reference implementation in plain loops, and what Paceline's own kernel computes on
CUDA. `PaddedAttention` uses PyTorch's operators on any device, `VarlenAttention` paged flash attention. What depends
on the forward input alone is computed once per forward (`prepare`), not per layer. Knows nothing of layers, weights or
block ownership.

    cache (one for K, one for V)   [num_blocks, block_size, num_kv_heads, head_dim]
    span s                         q_lens[s] rows, the last of its kv_lens[s] tokens; row j attends to
                                   tokens [0, kv_lens[s] - q_lens[s] + j], with a window to the last of them
    tree of span s                 its last tree.num_slots[s] tokens; a row in it attends to the tokens before the tree
                                   and to its ancestors, and a window counts along its path
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import numpy as np
import torch

from engine.core.packing import cut_spans
from engine.core.step import ForwardInput
from engine.errors import ConfigError
from engine.kernels import CUT_PACKED
from engine.model.attention_padded import PaddedAttention
from engine.model.attention_varlen import PagedSpans, Prepared, VarlenAttention
from engine.quantization.kv_cache import RECORDS, dequantised

AttentionKind = Literal["auto", "reference", "padded", "varlen", "triton", "invariant"]


class Attention(Protocol):
    """Attention over a paged KV cache. `prepare` is called once per forward, `attend` once per layer."""

    def prepare(self, forward_input: ForwardInput, *, block_size: int) -> Any:
        """Index tensors and masks that `attend` needs for this forward input."""
        ...

    def attend(self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, prepared: Any) -> torch.Tensor:
        """Attention of each row over the tokens of its span up to its own position, in a tree over its ancestors.

        Args:
            query: [N, num_heads, head_dim]. Query head h reads KV head h // (num_heads / num_kv_heads).
            k_cache: [num_blocks, block_size, num_kv_heads, head_dim], or records. Holds the keys of all rows
                already.
            v_cache: values, with the shape of `k_cache`.
            prepared: result of `prepare` for the same forward input.

        Returns:
            [N, num_heads * head_dim], in the dtype of `query`.
        """
        ...


def make_attention(
    kind: AttentionKind,
    *,
    group_size: int,
    dtype: torch.dtype,
    device: torch.device,
    window: int = 0,
    fp8_cache: bool = False,
) -> Attention:
    """An attention implementation.

    Args:
        kind: the implementation; `auto` is the fastest for device and dtype.
        group_size: query heads per KV head.
        dtype: dtype of query and cache.
        device: device of query and cache.
        window: tokens that a row attends to, its own included; 0 means all.
        fp8_cache: whether the cache has records of e4m3 codes. On CUDA one implementation reads them, whatever `kind`.

    Raises:
        ConfigError: a kind of CUDA on a device or dtype that it does not support, or a window where it has none.
    """
    flash = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    if kind in ("varlen", "triton", "invariant") and not flash:
        raise ConfigError(f"attention: {kind} needs cuda and bfloat16, given {device.type} and {dtype}")
    if kind == "invariant" or (fp8_cache and flash):
        if window:
            given = "kernel: invariant" if kind == "invariant" else "kv_cache_dtype: fp8"
            raise ConfigError(f"{given} given, but layers of this model have a window; allowed is auto")
        return KernelAttention(group_size=group_size, device=device, invariant=kind == "invariant")
    if kind == "triton" and not window:
        return TritonAttention(group_size=group_size, device=device)
    if kind == "reference":
        return ReferenceAttention(window=window)
    padded = PaddedAttention(group_size=group_size, dtype=dtype, device=device, window=window)
    if kind in ("varlen", "triton") or (kind == "auto" and flash):
        return VarlenAttention(device=device, window=window, padded=padded)
    return padded


class ReferenceAttention:
    """The reference: one row and one head at a time, with softmax in float32.

    Args:
        window: tokens that a row attends to, its own included; 0 means all.
    """

    def __init__(self, *, window: int = 0) -> None:
        self._window = window

    def prepare(self, forward_input: ForwardInput, *, block_size: int) -> ForwardInput:
        del block_size  # The shape of the cache has it.
        return forward_input

    def attend(
        self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, prepared: ForwardInput
    ) -> torch.Tensor:
        num_rows, num_heads, head_dim = query.shape
        _, block_size, num_kv_heads, _ = k_cache.shape
        group = num_heads // num_kv_heads
        out = torch.empty_like(query)
        row = 0
        for span, (q_len, kv_len, table) in enumerate(
            zip(prepared.q_lens.tolist(), prepared.kv_lens.tolist(), prepared.block_tables, strict=True)
        ):
            blocks = torch.from_numpy(table[: -(-kv_len // block_size)].astype(np.int64)).to(k_cache.device)
            keys, values = (cache[blocks].flatten(0, 1) for cache in (k_cache, v_cache))
            if k_cache.dtype in RECORDS:
                keys, values = (dequantised(records, torch.float32) for records in (keys, values))
            keys, values = keys.float(), values.float()  # [tokens, num_kv_heads, head_dim]
            for j in range(q_len):
                seen = self._seen(prepared, span, row, kv_len - q_len + j)
                for head in range(num_heads):
                    scores = keys[seen, head // group] @ query[row, head].float() / head_dim**0.5
                    out[row, head] = (scores.softmax(0) @ values[seen, head // group]).to(out.dtype)
                row += 1
        return out.view(num_rows, num_heads * head_dim)

    def _seen(self, forward_input: ForwardInput, span: int, row: int, slot: int) -> list[int]:
        """Tokens of a span that one of its rows attends to, in the order of their positions.

        Args:
            slot: of the row within the span.
        """
        tree = forward_input.tree
        seen = list(range(slot + 1))
        if tree is not None:
            first = int(forward_input.kv_lens[span] - tree.num_slots[span])
            if slot >= first:
                word = int(tree.ancestors[row])
                seen = [*range(first), *(first + j for j in range(int(tree.num_slots[span])) if word >> j & 1)]
        return seen[-self._window :]


class TritonAttention(VarlenAttention):
    """Paceline's own kernel for spans of few rows (decode, verify), trees included; `VarlenAttention` for the others.

    Args:
        group_size: query heads per KV head.
        device: of query and cache.
    """

    _invariant = False

    def __init__(self, *, group_size: int, device: torch.device) -> None:
        super().__init__(device=device)
        from engine.kernels.paged_attention import MAX_PACKED, paged_attention

        self._paged_attention = paged_attention
        self._max_q = MAX_PACKED // group_size

    def masks_trees(self, max_q: int) -> bool:
        return max_q <= self._max_q

    def attend(
        self,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        prepared: Prepared,
    ) -> torch.Tensor:
        if not isinstance(prepared, PagedSpans) or prepared.max_q > self._max_q:
            return super().attend(query, k_cache, v_cache, prepared)
        out: torch.Tensor = self._paged_attention(
            *(query, k_cache, v_cache, prepared.cu_q, prepared.kv_lens, prepared.block_tables),
            *(prepared.num_tree_slots, prepared.ancestors, prepared.max_q, prepared.max_kv, self._invariant),
        )
        return out


class KernelAttention(TritonAttention):
    """Paceline's own kernel for all spans: of a cache in FP8, which flash attention does not read, or batch-invariant.
    A span of more rows than a program takes is cut into several, each over the KV slots up to its last row.

    Args:
        group_size: query heads per KV head.
        device: of query and cache.
        invariant: whether the bits of a row do not depend on other spans, nor on how its span is cut.
    """

    def __init__(self, *, group_size: int, device: torch.device, invariant: bool = False) -> None:
        super().__init__(group_size=group_size, device=device)
        self._max_q = max(1, CUT_PACKED // group_size)
        self._invariant = invariant

    def masks_trees(self, max_q: int) -> bool:
        del max_q
        return True

    def prepare(self, forward_input: ForwardInput, *, block_size: int) -> Prepared:
        """As `Attention.prepare`. Nothing is read from the device."""
        return self._spans(cut_spans(forward_input, self._max_q), block_size)

    def attend(
        self,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        prepared: Prepared,
    ) -> torch.Tensor:
        """As `Attention.attend`.

        Raises:
            ConfigError: a forward is recorded whose spans are longer than a program takes.
        """
        if isinstance(prepared, PagedSpans) and prepared.max_q > self._max_q:
            raise ConfigError(
                f"cuda_graphs: on with kv_cache_dtype fp8 or kernel invariant takes {self._max_q} rows per request of "
                f"this model, and speculative.k makes {prepared.max_q}; lower speculative.k, or set cuda_graphs to off"
            )
        return super().attend(query, k_cache, v_cache, prepared)
