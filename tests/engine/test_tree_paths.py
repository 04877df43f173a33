"""Paths of rows in trees, by example: the KV slots of each row, of every row of a forward, and at the largest tree."""

from __future__ import annotations

import numpy as np
import pytest

from engine.core.packing import SpanRows, pack_spans
from engine.tree import MAX_NODES, ancestor_masks, chain_parents
from engine.tree_paths import TreePaths, find_paths

BLOCK = 4
SPANS = (
    # A chain: rows at slots 3 and 4.
    SpanRows([1, 2], 3, [7, 5], 1),
    # A committed row at slot 4, the root position at 5, the nodes at 6 to 8. Nodes 0 and 2 follow the root.
    SpanRows([1, 2, 3, 4, 5], 4, [9, 3, 6], 4, num_tree_slots=3, ancestors=(0b1, 0b11, 0b100)),
    # A tree of one node, without context.
    SpanRows([1, 2], 0, [2], 2, num_tree_slots=1, ancestors=(0b1,)),
    # The second level of a tree: its first node, at slot 4, was computed before.
    SpanRows([1], 5, [4, 8], 1, num_tree_slots=2, ancestors=(0b10,)),
)


def paths_of(*spans: SpanRows, whole: bool = False, width: int | None = None) -> TreePaths:
    forward = pack_spans(spans, BLOCK)
    assert forward.tree is not None
    lengths = (forward.q_lens, forward.kv_lens, forward.block_tables)
    tree = (forward.tree.num_slots, forward.tree.ancestors)
    return find_paths(*lengths, *tree, block_size=BLOCK, whole=whole, width=width)


def visible(paths: TreePaths) -> list[list[int]]:
    """KV slots on the path of each row."""
    return [
        slots[~hidden].tolist() for slots, hidden in zip(paths.slots, paths.hidden[:, 1:].astype(bool), strict=True)
    ]


def test_rows_of_trees_see_their_ancestors_and_the_others_are_left_out() -> None:
    paths = paths_of(*SPANS)
    assert paths.spans.tolist() == [1, 2, 3]
    assert paths.q_lens.tolist() == [4, 2, 1]
    assert paths.context_lens.tolist() == [5, 0, 4]
    assert paths.rows.tolist() == [3, 4, 5, 6, 7, 8, 9]
    # Slots 5 to 8 of the second span are in its blocks 3 and 6.
    assert visible(paths) == [[13], [13, 14], [13, 14, 15], [13, 24], [8], [8, 9], [33]]
    assert paths.slots.shape == (7, 3)
    assert paths.slots[paths.hidden[:, 1:]].tolist() == [0] * 9
    assert paths.hidden[:, 0].tolist() == [False] * 4 + [True] * 2 + [False]
    assert paths.covers.tolist() == [False, False, True, True]


def test_every_row_has_a_path_where_the_whole_forward_is_wanted() -> None:
    paths = paths_of(*SPANS, whole=True)
    assert paths.spans.tolist() == [0, 1, 2, 3]
    assert paths.q_lens.tolist() == [2, 5, 2, 1]
    assert paths.context_lens.tolist() == [3, 4, 0, 4]
    assert paths.rows.tolist() == list(range(10))
    chain, tree = [[31], [31, 20]], [[12], [12, 13], [12, 13, 14], [12, 13, 14, 15], [12, 13, 24]]
    assert visible(paths) == [*chain, *tree, [8], [8, 9], [33]]
    assert paths.covers.all()


def test_paths_are_padded_to_a_width() -> None:
    paths = paths_of(*SPANS, width=5)
    assert paths.slots.shape == (7, 5)
    assert visible(paths) == visible(paths_of(*SPANS))
    with pytest.raises(ValueError, match="a path of 3 slots, there is room for 2"):
        paths_of(*SPANS, width=2)


def test_the_last_node_of_the_largest_tree_sees_nothing_behind_it() -> None:
    """Also where another span of the forward has a longer path than this tree has nodes."""
    blocks = list(range(1, 20))
    chain = ancestor_masks(chain_parents(MAX_NODES))
    root_and_nodes = SpanRows([0] * (MAX_NODES + 1), 0, blocks, 1, num_tree_slots=MAX_NODES, ancestors=chain)
    last_node = SpanRows([0], MAX_NODES - 1, blocks, 1, num_tree_slots=MAX_NODES, ancestors=(1 << (MAX_NODES - 1),))
    found = visible(paths_of(root_and_nodes, last_node))
    assert found[MAX_NODES] == list(np.arange(MAX_NODES + 1) + BLOCK)
    assert found[-1] == [BLOCK + MAX_NODES - 1]
