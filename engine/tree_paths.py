"""The KV slots that the rows of draft trees attend to, for attention that has no tree mask.

Owns the split of what a row sees into the context, which all rows on paths of its span see, and the slots of its own
path. Plain integers: knows no tensors, and nothing of how a forward is described (`engine.core.step`).

    KV slots of a span    c c c c c c | r n n n n      c context, r root position if it is a row, n nodes
    rows on paths                       r n n n n      each with its own path through r and n
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TreePaths:
    """The T rows on paths, of S' of the S spans of a forward."""

    spans: Int64s
    """[S'] spans with rows on paths, ascending."""
    q_lens: Int32s
    """[S'] rows on paths of each, at the end of the span."""
    context_lens: Int32s
    """[S'] KV slots before the paths; 0 where the span starts with them."""
    rows: Int64s
    """[T] row of the forward."""
    slots: Int64s
    """[T, P] KV slots (block_id * block_size + offset) on the path of each row, in their order, padded with 0."""
    hidden: npt.NDArray[np.bool_]
    """[T, 1 + P] whether there is no context, and which of `slots` are padding."""
    covers: npt.NDArray[np.bool_]
    """[S] whether all rows of a span are on paths."""


def find_paths(
    q_lens: Int32s,
    kv_lens: Int32s,
    block_tables: Int32s,
    num_tree_slots: Int32s,
    ancestors: npt.NDArray[np.uint64],
    *,
    block_size: int,
    whole: bool = False,
    width: int | None = None,
) -> TreePaths:
    """The paths of the rows in trees and of the root positions before them.

    Args:
        q_lens, kv_lens: [S] rows and KV slots of each span.
        block_tables: [S, W] block ids.
        num_tree_slots: [S] KV slots at the end of each span that belong to its tree; 0 for a chain.
        ancestors: [N] bits of each row's ancestors in its tree.
        block_size: KV slots per block.
        whole: put every row of every span on a path, chains and rows before a tree included.
        width: P, at least the longest path; None takes that.

    Raises:
        ValueError: a path is longer than `width`.
    """
    on_paths = q_lens if whole else np.where(num_tree_slots > 0, np.minimum(q_lens, num_tree_slots + 1), 0)
    first_slots = kv_lens - np.maximum(on_paths, num_tree_slots)  # of the paths, also the length of the context
    owner = np.repeat(np.arange(len(q_lens)), on_paths)  # [T]
    place = np.arange(len(owner)) - (np.cumsum(on_paths) - on_paths)[owner]
    rows = (np.cumsum(q_lens) - on_paths)[owner] + place
    own = (kv_lens - on_paths - first_slots)[owner] + place  # slot of each row, counted from the first of its path
    tree_start = (kv_lens - num_tree_slots - first_slots)[owner]
    slot = np.arange(int((kv_lens - first_slots)[owner].max(initial=1)))
    bit = np.clip(slot - tree_start[:, None], 0, 64).astype(np.uint64)  # a shift by 64 leaves 0: no node is there
    in_tree = (ancestors[rows][:, None] >> bit) & np.uint64(1) == 1
    is_node = (own >= tree_start)[:, None]
    visible = np.where(is_node, (slot < tree_start[:, None]) | in_tree, slot <= own[:, None])
    lengths = visible.sum(axis=1)
    longest = int(lengths.max(initial=1))
    width = longest if width is None else width
    if longest > width:
        raise ValueError(f"a path of {longest} slots, there is room for {width}")
    order = np.argsort(~visible, axis=1, kind="stable")[:, :width]
    order = np.pad(order, ((0, 0), (0, width - order.shape[1])))
    is_padding = np.arange(width) >= lengths[:, None]
    index = np.where(is_padding, 0, first_slots[owner][:, None] + order)
    slots = block_tables[owner[:, None], index // block_size].astype(np.int64) * block_size + index % block_size
    spans = np.flatnonzero(on_paths)
    no_context = (first_slots == 0)[owner][:, None]
    return TreePaths(
        spans=spans.astype(np.int64),
        q_lens=on_paths[spans].astype(np.int32),
        context_lens=first_slots[spans].astype(np.int32),
        rows=rows.astype(np.int64),
        slots=np.where(is_padding, 0, slots),
        hidden=np.concatenate((no_context, is_padding), axis=1),
        covers=on_paths == q_lens,
    )
