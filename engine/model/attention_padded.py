"""Attention with PyTorch's operators, on any device: spans are attended in padded groups.

Owns the grouping of spans and its cost in padding. The interface and the shape of the cache are in
`engine.model.attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from msgspec import structs

from engine.core.step import ForwardInput
from engine.quantization.kv_cache import RECORDS, dequantised
from engine.sampling.staging import to_device


@dataclass(frozen=True, slots=True)
class _Group:
    """Spans that are attended together, padded to the longest of them."""

    num_spans: int
    q_len: int
    """Query slots per span: rows of the longest span."""
    kv_len: int
    """Tokens per span: those of the longest span."""
    blocks: torch.Tensor
    """[num_spans * W] int64 ids of the blocks to gather, W per span."""
    rows: torch.Tensor | None
    """[num_spans * q_len] int64 row of each query slot; None when the slots are all rows of the forward, in order."""
    slots: torch.Tensor | None
    """Query slots that are no padding, in the order of `targets`; None when there is no padding."""
    targets: torch.Tensor | None
    """Rows of the forward that the group computes; None when these are all rows, in order."""
    mask: torch.Tensor | None
    """Additive mask: [num_spans, 1, q_len * group_size, kv_len] for folded heads, [1, 1, q_len, kv_len] for a long
    span; None when `causal`, or when every slot attends to all tokens."""
    causal: bool = False
    """Whether it is a long span without earlier context, for plain causal attention."""
    folded: bool = True
    """Whether the query heads of one KV head are folded into rows."""


@dataclass(frozen=True, slots=True)
class _Tree:
    """The rows of one span that are in its tree."""

    span: int
    """Index of the span in its group."""
    first_row: int
    """First row of the span that is in the tree."""
    start: int
    """First token of the tree in the span."""
    bits: np.ndarray[Any, Any]
    """[rows, 64] bool: whether a row attends to each token of the tree."""

    def hidden(self, num_rows: int, kv_len: int, window: int) -> np.ndarray[Any, Any]:
        """[num_rows, kv_len] whether a row does not attend to a token. Rows beyond those of the tree repeat the last.

        Args:
            num_rows: at least the rows of the tree.
            kv_len: tokens of the group's longest span.
            window: tokens that a row attends to, counted along its path; 0 means all.
        """
        later = self.bits[:, ::-1].cumsum(axis=1)[:, ::-1]  # tokens of the path from each one on
        seen = self.bits & (later <= window) if window else self.bits
        hidden = np.ones((len(seen), kv_len), dtype=bool)
        width = min(seen.shape[1], kv_len - self.start)
        hidden[:, self.start : self.start + width] = ~seen[:, :width]
        before = np.arange(self.start)
        hidden[:, : self.start] = (self.start - before + later[:, :1] > window) if window else False
        return hidden[np.minimum(np.arange(num_rows), len(hidden) - 1)]


def _bits(words: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """[len(words), 64] bool bits of 64-bit words, the lowest first."""
    return (words[:, None] >> np.arange(64, dtype=np.uint64) & np.uint64(1)).astype(bool)


class PaddedAttention:
    """Gathers the blocks of each span and calls `scaled_dot_product_attention`.

    Short spans (decode, verify) are attended in padded groups, with the query heads of a KV head folded into rows. For
    one row per span this is several times faster than `enable_gqa`. Spans of very different context lengths are in
    different groups, which bounds the padding. Long spans (prefill) are attended one by one.

    Args:
        group_size: query heads per KV head.
        dtype: dtype of query and cache.
        device: device of query and cache.
        window: tokens that a row attends to, its own included; 0 means all. Blocks before the window are not gathered.
    """

    SHORT_SPAN = 32
    """Most rows of a short span."""
    MIN_BATCHED = 1024
    """Gathered tokens from which batched products are faster than the fused operator, in bf16 at few rows. Measured on
    a Zen 5 CPU."""
    MAX_PADDING = 3072
    """Most padding of a group, in tokens. Computing it costs about as much as two more groups."""

    def __init__(self, *, group_size: int, dtype: torch.dtype, device: torch.device, window: int = 0) -> None:
        self._group_size = group_size
        self._window = window
        self._dtype = dtype
        self._device = device

    def prepare(self, forward_input: ForwardInput, *, block_size: int) -> list[_Group]:
        if self._window:
            forward_input = _without_old_blocks(forward_input, self._window, block_size)
        starts = np.cumsum(forward_input.q_lens) - forward_input.q_lens
        return [self._group(forward_input, members, starts, block_size) for members in self._partition(forward_input)]

    def attend(
        self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, prepared: list[_Group]
    ) -> torch.Tensor:
        if len(prepared) == 1 and prepared[0].targets is None:
            return self._attend_group(query, k_cache, v_cache, prepared[0])
        num_rows, num_heads, head_dim = query.shape
        out = query.new_empty(num_rows, num_heads * head_dim)
        for group in prepared:
            out[group.targets] = self._attend_group(query, k_cache, v_cache, group)
        return out

    def _partition(self, forward_input: ForwardInput) -> list[list[int]]:
        """Span indices by group: short spans of similar context length, then each long span alone."""
        short = np.flatnonzero(forward_input.q_lens <= self.SHORT_SPAN)
        groups: list[list[int]] = []
        num_tokens = 0
        for span in short[np.argsort(forward_input.kv_lens[short], kind="stable")].tolist():
            kv_len = int(forward_input.kv_lens[span])
            if not groups or len(groups[-1]) * kv_len - num_tokens > self.MAX_PADDING:
                groups.append([])
                num_tokens = 0
            groups[-1].append(span)
            num_tokens += kv_len
        long = np.flatnonzero(forward_input.q_lens > self.SHORT_SPAN).tolist()
        return [sorted(group) for group in groups] + [[span] for span in long]

    def _group(
        self, forward_input: ForwardInput, members: list[int], starts: np.ndarray[Any, Any], block_size: int
    ) -> _Group:
        q_lens, kv_lens = forward_input.q_lens[members], forward_input.kv_lens[members]
        q_len, kv_len = int(q_lens.max()), int(kv_lens.max())
        all_spans = len(members) == len(forward_input.q_lens)
        uniform = bool((q_lens == q_len).all())
        # A padding slot repeats the last row of its span, so that its mask is never empty. Its result is dropped.
        offsets = np.minimum(np.arange(q_len)[None, :], q_lens[:, None] - 1)  # [B, Q]
        rows = starts[members][:, None] + offsets
        real = np.arange(q_len)[None, :] < q_lens[:, None]
        last_seen = kv_lens[:, None] - q_lens[:, None] + offsets  # [B, Q]
        width = -(-kv_len // block_size)
        folded = q_len <= self.SHORT_SPAN
        is_cut = 0 < self._window < kv_len
        trees = self._trees(forward_input, members, starts)
        causal = not folded and kv_len == q_len and not is_cut and not trees
        full = bool((last_seen == kv_len - 1).all()) and not is_cut and not trees
        return _Group(
            num_spans=len(members),
            q_len=q_len,
            kv_len=kv_len,
            blocks=self._index(forward_input.block_tables[members, :width]),
            rows=None if all_spans and uniform else self._index(rows),
            slots=None if uniform else self._index(np.flatnonzero(real)),
            targets=None if all_spans else self._index(rows[real]),
            mask=None if causal or full else self._mask(last_seen, kv_len, self._group_size if folded else 1, trees),
            causal=causal,
            folded=folded,
        )

    def _index(self, values: np.ndarray[Any, Any]) -> torch.Tensor:
        (index,) = to_device([np.ascontiguousarray(values, dtype=np.int64).reshape(-1)], self._device)
        return index

    def _trees(self, forward_input: ForwardInput, members: list[int], starts: np.ndarray[Any, Any]) -> list[_Tree]:
        """The trees of a group's spans."""
        tree = forward_input.tree
        if tree is None:
            return []
        found = []
        for place, span in enumerate(members):
            num_slots, q_len = int(tree.num_slots[span]), int(forward_input.q_lens[span])
            if num_slots > 0:
                first_row = max(0, q_len - num_slots)
                words = tree.ancestors[starts[span] + first_row : starts[span] + q_len]
                found.append(_Tree(place, first_row, int(forward_input.kv_lens[span]) - num_slots, _bits(words)))
        return found

    def _mask(self, last_seen: np.ndarray[Any, Any], kv_len: int, repeats: int, trees: Sequence[_Tree]) -> torch.Tensor:
        """[B, 1, Q * repeats, kv_len]: 0 where a row attends to a token, -inf elsewhere.

        Args:
            last_seen: [B, Q] last token that each row attends to, without trees.
        """
        tokens, last = np.arange(kv_len), last_seen[:, :, None]
        hidden = tokens > last
        if self._window:
            hidden |= tokens <= last - self._window
        for tree in trees:
            hidden[tree.span, tree.first_row :] = tree.hidden(hidden.shape[1] - tree.first_row, kv_len, self._window)
        (repeated,) = to_device([np.repeat(hidden, repeats, axis=1)[:, None]], self._device)
        return torch.zeros(repeated.shape, dtype=self._dtype, device=self._device).masked_fill_(repeated, float("-inf"))

    def _attend_group(
        self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, group: _Group
    ) -> torch.Tensor:
        """Attention of one group, [rows of the group, num_heads * head_dim], in the order of `targets`."""
        _, num_heads, head_dim = query.shape
        num_kv_heads = k_cache.shape[2]
        spans, q_len = group.num_spans, group.q_len
        keys = self._gather(k_cache, group)  # [B, num_kv_heads, kv_len, head_dim]
        values = self._gather(v_cache, group)
        if group.rows is not None:
            query = query.index_select(0, group.rows)
        if not group.folded:
            long_query = query.transpose(0, 1).unsqueeze(0)  # [1, num_heads, Q, head_dim]
            out = F.scaled_dot_product_attention(
                long_query, keys, values, attn_mask=group.mask, is_causal=group.causal, enable_gqa=True
            )
            return out.squeeze(0).transpose(0, 1).reshape(q_len, num_heads * head_dim)
        fold = self._group_size
        folded = query.view(spans, q_len, num_kv_heads, fold, head_dim).transpose(1, 2)
        folded = folded.reshape(spans, num_kv_heads, q_len * fold, head_dim)
        if self._dtype is torch.bfloat16 and spans * group.kv_len >= self.MIN_BATCHED:
            out = _batched_products(folded, keys, values, group.mask)
        else:
            out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=group.mask)
        out = out.view(spans, num_kv_heads, q_len, fold, head_dim).transpose(1, 2)
        out = out.reshape(spans * q_len, num_heads * head_dim)
        return out if group.slots is None else out.index_select(0, group.slots)

    def _gather(self, cache: torch.Tensor, group: _Group) -> torch.Tensor:
        """K or V of a group, [B, num_kv_heads, kv_len, head_dim]: a view of one contiguous copy of its blocks, or of
        what blocks of records stand for."""
        num_blocks, _, num_kv_heads, width = cache.shape
        tokens = cache.view(num_blocks, -1).index_select(0, group.blocks)
        tokens = tokens.view(group.num_spans, -1, num_kv_heads, width)[:, : group.kv_len]
        if cache.dtype in RECORDS:
            tokens = dequantised(tokens, self._dtype)
        return tokens.transpose(1, 2)


def _without_old_blocks(forward_input: ForwardInput, window: int, block_size: int) -> ForwardInput:
    """The forward input without the leading blocks of each span that are before the window of its first row.

    Attention depends on the distance between tokens only, so a span whose first blocks are left out is a shorter one.
    """
    last_seen = forward_input.kv_lens - forward_input.q_lens  # of the row that looks back furthest
    if forward_input.tree is not None:
        last_seen = np.minimum(last_seen, forward_input.kv_lens - forward_input.tree.num_slots)
    before = last_seen - window + 1
    first = np.maximum(before, 0) // block_size  # [S]
    width = forward_input.block_tables.shape[1]
    columns = np.minimum(first[:, None] + np.arange(width)[None, :], width - 1)
    return structs.replace(
        forward_input,
        kv_lens=forward_input.kv_lens - first * block_size,
        block_tables=np.take_along_axis(forward_input.block_tables, columns, axis=1),
    )


def _batched_products(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """softmax(q k^T / sqrt(D) + mask) v for query [B, G, R, D] and keys, values [B, G, L, D] -> [B, G, R, D]."""
    spans, heads, rows, head_dim = query.shape
    keys, values = keys.reshape(spans * heads, -1, head_dim), values.reshape(spans * heads, -1, head_dim)
    scores = torch.bmm(query.reshape(spans * heads, rows, head_dim), keys.transpose(1, 2))
    scores = scores.view(spans, heads, rows, -1)
    scale = head_dim**-0.5
    scores = scores.mul_(scale) if mask is None else torch.add(mask, scores, alpha=scale)
    probs = scores.softmax(-1).view(spans * heads, rows, -1)
    return torch.bmm(probs, values).view(spans, heads, rows, head_dim)
