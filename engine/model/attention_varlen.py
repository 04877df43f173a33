"""Attention with PyTorch's paged flash attention, on CUDA. It reads K and V in place, without gathering blocks.

Flash attention has no tree mask. A row of a tree therefore attends in two parts, merged by their log-sum-exp: to the
tokens that all rows of its span see, with flash attention, and to the slots of its own path, which are gathered.
`engine.model.attention` documents the interface, the layout of the cache and the meaning of a span.

    KV slots    c c c c c c | r n n n n      c context: flash attention     r, n: root position and nodes
    path of n               | r . n . n      gathered: at most as many slots as the longest path
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from msgspec import structs

from engine.core.step import ForwardInput
from engine.errors import EngineError
from engine.model.attention_padded import PaddedAttention
from engine.sampling.staging import to_device
from engine.tree_paths import TreePaths, find_paths


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
    num_tree_slots: torch.Tensor | None = None
    """[S] KV slots of each span's tree; None where the kernel that reads them is not used, or nothing branches."""
    ancestors: torch.Tensor | None = None
    """[N] int64 bits of each row's ancestors in its tree."""

    def limits(self, window: int) -> tuple[int, int]:
        """Tokens before and after a row's own that it attends to, -1 without a limit.

        Causal, except that a single row sees all tokens anyway. FlashAttention 2 splits the KV length and packs the
        query heads of a group only for one row and an unlimited window.
        """
        if window:
            return window - 1, 0
        return (-1, -1) if self.max_q == 1 else (-1, 0)


@dataclass(frozen=True, slots=True)
class PagedTrees:
    """The spans of a forward in which drafts branch."""

    chains: PagedSpans | None
    """All spans, for the rows that are on no path; the results of other rows are not used. None: all are on paths."""
    context: PagedSpans
    """The spans of the T rows that are on paths, over the KV slots before their paths. At least one slot each."""
    rows: torch.Tensor | None
    """[T] int64 rows of the forward; None where T is N."""
    paths: torch.Tensor
    """[T, P] int64 KV slots on the path of each row, its own included."""
    hidden: torch.Tensor
    """[T, 1 + P] bool: whether there is no context, and which of `paths` are padding."""


@dataclass(frozen=True, slots=True)
class WindowedTrees:
    """A forward in which drafts branch, in layers with a window. The window of a row depends on its depth, which flash
    attention cannot express, so K and V of the window are gathered."""

    attention: PaddedAttention
    groups: Any


Prepared = PagedSpans | PagedTrees | WindowedTrees


class VarlenAttention:
    """PyTorch's paged flash attention: the same call for prefill, decode and verify.

    Args:
        device: of query and cache.
        window: tokens that a row attends to, its own included; 0 means all.
        padded: computes forwards with trees where there is a window.
    """

    def __init__(self, *, device: torch.device, window: int = 0, padded: PaddedAttention | None = None) -> None:
        from torch.nn.attention.varlen import AuxRequest, varlen_attn

        self._varlen_attn = varlen_attn
        self._with_lse = AuxRequest(lse=True)
        self._device = device
        self._window = window
        self._padded = padded

    def masks_trees(self, max_q: int) -> bool:
        """Whether `attend` takes `PagedSpans` with trees of spans of at most `max_q` rows."""
        del max_q
        return False

    def prepare(self, forward_input: ForwardInput, *, block_size: int) -> Prepared:
        """As `Attention.prepare`. Nothing is read from the device.

        Raises:
            EngineError: the forward has trees, there is a window, and `padded` is missing.
        """
        tree = forward_input.tree
        if tree is None or self.masks_trees(int(forward_input.q_lens.max())):
            return self._spans(forward_input, block_size)
        if self._window:
            if self._padded is None:
                raise EngineError("attention with a window has no tree mask without `padded`")
            padded = _padded_with_own(forward_input, block_size)
            return WindowedTrees(self._padded, self._padded.prepare(padded, block_size=block_size))
        paths = find_paths(
            *(forward_input.q_lens, forward_input.kv_lens, forward_input.block_tables),
            *(tree.num_slots, tree.ancestors),
            block_size=block_size,
        )
        chains = None
        if len(paths.rows) < len(forward_input.token_ids):
            # Of a span whose rows are all on paths, nothing of this call is used, so it gets no context.
            kv_lens = np.where(paths.covers, forward_input.q_lens, forward_input.kv_lens)
            chains = self._spans(forward_input, block_size, kv_lens)
        return PagedTrees(chains, *self._context(forward_input, paths, block_size))

    def attend(
        self,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        prepared: Prepared,
    ) -> torch.Tensor:
        if isinstance(prepared, WindowedTrees):
            return prepared.attention.attend(query, k_cache, v_cache, prepared.groups)
        if isinstance(prepared, PagedSpans):
            out, _ = self.flash(query, k_cache, v_cache, prepared, prepared.limits(self._window))
            return out.reshape(query.shape[0], -1)
        return self._attend_trees(query, k_cache, v_cache, prepared)

    def flash(
        self,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        spans: PagedSpans,
        limits: tuple[int, int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, H, D] attention over spans without trees, and [H, N] float32 log-sum-exp of the scores."""
        out, lse = self._varlen_attn(
            query,
            k_cache,
            v_cache,
            spans.cu_q,
            spans.cu_kv,
            spans.max_q,
            spans.max_kv,
            return_aux=self._with_lse,
            window_size=limits,
            enable_gqa=True,
            seqused_k=spans.kv_lens,
            block_table=spans.block_tables,
        )
        return out, lse

    def _attend_trees(
        self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, trees: PagedTrees
    ) -> torch.Tensor:
        rows = trees.rows
        on_paths = self._attend_paths(query if rows is None else query.index_select(0, rows), k_cache, v_cache, trees)
        if trees.chains is None or rows is None:
            return on_paths
        out, _ = self.flash(query, k_cache, v_cache, trees.chains, (-1, 0))
        return out.reshape(query.shape[0], -1).index_copy(0, rows, on_paths)

    def _attend_paths(
        self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, trees: PagedTrees
    ) -> torch.Tensor:
        """[T, H * D] of the rows on paths: one softmax over the context, as one key of weight exp(lse), and the path.

        Args:
            query: [T, H, D].
            k_cache, v_cache: [num_blocks, block_size, G, D].
            trees: with T rows.
        """
        context, lse = self.flash(query, k_cache, v_cache, trees.context, (-1, -1))
        num_rows, num_heads, dim = query.shape
        kv_heads, width = k_cache.shape[2], trees.paths.shape[1]
        flat = trees.paths.view(-1)
        keys, values = (
            cache.view(-1, kv_heads * dim).index_select(0, flat).view(num_rows, width, kv_heads, dim).float()
            for cache in (k_cache, v_cache)
        )
        grouped = query.reshape(num_rows, kv_heads, -1, dim).float()  # [T, G, H / G, D]
        scores = torch.einsum("tgfd,tpgd->tgfp", grouped, keys).mul_(dim**-0.5)
        scores = torch.cat((lse.t().reshape(num_rows, kv_heads, -1, 1), scores), dim=3)
        share = scores.masked_fill_(trees.hidden[:, None, None], float("-inf")).softmax(dim=3)
        # What is hidden may be anything, also NaN, and its share of 0 would not remove that.
        values.masked_fill_(trees.hidden[:, 1:, None, None], 0.0)
        context = context.reshape(num_rows, kv_heads, -1, dim).masked_fill(trees.hidden[:, :1, None, None], 0.0)
        out = torch.einsum("tgfp,tpgd->tgfd", share[..., 1:], values).addcmul_(share[..., :1], context)
        return out.reshape(num_rows, num_heads * dim).to(query.dtype)

    def _spans(
        self, forward_input: ForwardInput, block_size: int, kv_lens: npt.NDArray[Any] | None = None
    ) -> PagedSpans:
        """The spans of a forward, with their trees where the kernel masks them."""
        kv_lens = forward_input.kv_lens if kv_lens is None else kv_lens
        arrays = _paged(forward_input.q_lens, kv_lens, forward_input.block_tables, block_size)
        max_q, tree = int(forward_input.q_lens.max()), forward_input.tree
        if tree is not None and self.masks_trees(max_q):
            arrays += [_int32(tree.num_slots), tree.ancestors.view(np.int64)]
        return _on_device(to_device(arrays, self._device), max_q, int(kv_lens.max()))

    def _context(
        self, forward_input: ForwardInput, paths: TreePaths, block_size: int
    ) -> tuple[PagedSpans, torch.Tensor, torch.Tensor, torch.Tensor]:
        """`PagedTrees` without the chains."""
        kv_lens = np.maximum(paths.context_lens, 1)
        arrays = _paged(paths.q_lens, kv_lens, forward_input.block_tables[paths.spans], block_size)
        *tensors, rows, slots, hidden = to_device([*arrays, paths.rows, paths.slots, paths.hidden], self._device)
        # Flash attention lays out the log-sum-exp of plain decoding in a way of its own, so one row counts as two.
        return _on_device(tensors, max(2, int(paths.q_lens.max())), int(kv_lens.max())), rows, slots, hidden


def _paged(
    q_lens: npt.NDArray[Any], kv_lens: npt.NDArray[Any], block_tables: npt.NDArray[Any], block_size: int
) -> list[npt.NDArray[Any]]:
    """The arrays of `PagedSpans` without trees."""
    return [
        _int32(np.concatenate(([0], np.cumsum(q_lens)))),
        _int32(np.concatenate(([0], np.cumsum(kv_lens)))),
        _int32(kv_lens),
        _int32(block_tables[:, : -(-int(kv_lens.max()) // block_size)]),
    ]


def _padded_with_own(forward_input: ForwardInput, block_size: int) -> ForwardInput:
    """The forward with block tables padded by a block of the span itself: what the scratch block has may be NaN."""
    tables = forward_input.block_tables
    is_padding = np.arange(tables.shape[1]) >= -(-forward_input.kv_lens[:, None] // block_size)
    return structs.replace(forward_input, block_tables=np.where(is_padding, tables[:, :1], tables))


def _on_device(tensors: list[torch.Tensor], max_q: int, max_kv: int) -> PagedSpans:
    cu_q, cu_kv, kv_lens, block_tables, *trees = tensors
    num_tree_slots, ancestors = trees or (None, None)
    return PagedSpans(cu_q, cu_kv, kv_lens, block_tables, max_q, max_kv, num_tree_slots, ancestors)


def _int32(values: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    return np.ascontiguousarray(values, dtype=np.int32)
