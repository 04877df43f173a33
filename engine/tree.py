"""Draft trees as plain integers: who is whose ancestor, how deep a node is, and which slots an accepted path leaves.

A tree is a tuple with the parent of each node, -1 for the position of the last committed token. Parents come before
their children. An empty tuple stands for a chain, where each node follows the one before. Knows no tokens and no model.

    nodes     0 1 2 3 4            parents   -1 0 0 -1 2            a chain of 3   ()
              root -+- 0 -+- 1
                    |     +- 2 --- 4
                    +- 3
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_NODES = 64
"""Most nodes of a tree: a row's ancestors are the bits of one 64-bit word."""

MAX_WIDTH = 8
"""Most children of a node."""


def branches(parents: Sequence[int]) -> bool:
    """Whether a node has another parent than the node before it."""
    return any(parent != node - 1 for node, parent in enumerate(parents))


def check_parents(parents: Sequence[int]) -> None:
    """Check the form of a tree.

    Raises:
        ValueError: there are more than MAX_NODES nodes, or a parent does not come before its child.
    """
    if len(parents) > MAX_NODES:
        raise ValueError(f"parents: {len(parents)} nodes given, allowed are {MAX_NODES}")
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(f"parents: node {node} has parent {parent}, allowed are -1..{node - 1}")


def depths(parents: Sequence[int]) -> list[int]:
    """Number of ancestors of each node; 0 for the children of the root position."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return found


def ancestor_masks(parents: Sequence[int]) -> list[int]:
    """Per node, the bits of itself and of its ancestors."""
    found: list[int] = []
    for node, parent in enumerate(parents):
        found.append(1 << node | (0 if parent < 0 else found[parent]))
    return found


def children_of(parents: Sequence[int]) -> list[list[int]]:
    """[len(parents) + 1] the children of each node in order; entry 0 has those of the root position."""
    found: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node, parent in enumerate(parents):
        found[parent + 1].append(node)
    return found


def chain_parents(num_nodes: int) -> tuple[int, ...]:
    """The parents of a chain, written out."""
    return tuple(range(-1, num_nodes - 1))
