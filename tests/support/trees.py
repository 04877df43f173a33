"""Random draft trees, and forwards over them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.packing import SpanRows
from engine.tree import ancestor_masks, depths


def random_parents(rng: random.Random, num_nodes: int) -> tuple[int, ...]:
    """The parents of a random tree: from chains to bushes."""
    chain_like = rng.random()
    return tuple(node - 1 if rng.random() < chain_like else rng.randint(-1, node - 1) for node in range(num_nodes))


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from the root position to a node, in order."""
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


@dataclass(frozen=True, slots=True)
class TreeSpan:
    """Committed tokens and a tree after them."""

    committed: Sequence[int]
    """Tokens that are in the cache or among the rows."""
    num_rows: int
    """The last so many of `committed` are rows of the forward."""
    tokens: Sequence[int]
    parents: Sequence[int]
    blocks: Sequence[int]

    def rows(self) -> SpanRows:
        """All rows, with the logits of the last committed token and of the nodes."""
        start = len(self.committed) - self.num_rows
        return SpanRows(
            [*self.committed[start:], *self.tokens],
            start,
            self.blocks,
            1 + len(self.tokens),
            [*range(start, len(self.committed)), *(len(self.committed) + depth for depth in depths(self.parents))],
            num_tree_slots=len(self.tokens),
            ancestors=ancestor_masks(self.parents),
        )

    def path_tokens(self, node: int) -> list[int]:
        """The text up to a node; -1 is the last committed token."""
        return [*self.committed, *(self.tokens[each] for each in path_to(self.parents, node))]
