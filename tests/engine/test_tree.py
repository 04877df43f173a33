"""Trees as integers, by example."""

from __future__ import annotations

import pytest

from engine.tree import ancestor_masks, branches, chain_parents, check_parents, children_of, depths

PARENTS = (-1, 0, 0, -1, 2)


def test_depths_ancestors_and_children() -> None:
    assert depths(PARENTS) == [0, 1, 1, 0, 2]
    assert ancestor_masks(PARENTS) == [0b1, 0b11, 0b101, 0b1000, 0b10101]
    assert children_of(PARENTS) == [[0, 3], [1, 2], [], [4], [], []]


def test_a_chain_has_no_branches() -> None:
    assert chain_parents(3) == (-1, 0, 1)
    assert not branches(chain_parents(5))
    assert not branches(())
    assert branches(PARENTS)
    assert ancestor_masks(chain_parents(3)) == [0b1, 0b11, 0b111]


def test_a_node_comes_after_its_parent() -> None:
    check_parents(PARENTS)
    for wrong in ((0,), (-2,), (-1, 1)):
        with pytest.raises(ValueError, match="parents: "):
            check_parents(wrong)


def test_a_tree_has_a_bit_of_one_word_for_each_node() -> None:
    largest = chain_parents(64)
    check_parents(largest)
    assert ancestor_masks(largest)[-1] == 2**64 - 1
    with pytest.raises(ValueError, match="parents: 65 nodes given, allowed are 64"):
        check_parents(chain_parents(65))
