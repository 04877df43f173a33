"""How texts went on after the same last tokens: the occurrences of a match, joined into one tree.

Owns the tree. Knows neither where the occurrences come from nor how likely a continuation is: a caller tells what to
expect of a node by its role. Common prefixes are shared; among siblings the most frequent one comes first, and of
equally frequent ones the latest. After SuffixDecoding (Oliaro et al. 2024), whose trees hold the most frequent paths.

    occurrences    a b c | a b d | x      of a match, the latest first
    tree           a --- b -+- c          a is `first`, x `other`, b `alone`
                   |        +- d
                   +- x
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

from msgspec import Struct

Role = Literal["alone", "first", "other"]
"""Place of a node among its siblings: it has none, it is the first, or it is a later one."""

Expected = Callable[[Role, int], float]
"""What to expect of a node by its role and depth: the probability of its acceptance, given that of its parent."""

TokenAt = Callable[[int, int], int]
"""The token that an occurrence (its position) has at a distance ahead; -1 where the text ends."""


class Continuations(Struct, frozen=True, gc=False):
    """A tree of continuations, the likeliest nodes first, parents before their children."""

    token_ids: tuple[int, ...]
    """Token of each node."""
    parents: tuple[int, ...]
    """Parent of each node; -1 for the last token of the request."""
    roles: tuple[Role, ...]
    """Role of each node."""
    expected: tuple[float, ...]
    """Probability that each node is accepted, given that its parent is."""


def join(positions: Sequence[int], token_at: TokenAt, k: int, expected: Expected) -> Continuations:
    """The k likeliest nodes of the tree of all occurrences.

    Args:
        positions: of the occurrences, the latest first.
        token_at: reads the texts.
        k: most nodes.
        expected: see `Expected`.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    roles: list[Role] = []
    shares: list[float] = []
    num_found = 0
    # Minus the cumulative expectation, order of discovery, then what makes the node.
    heap: list[tuple[float, int, int, int, Role, float, list[int], int]] = []

    def open_children(parent: int, above: float, agreeing: Sequence[int], depth: int) -> None:
        nonlocal num_found
        following = [(token_at(position, depth), position) for position in agreeing]
        counts = Counter(token for token, _ in following if token >= 0)
        for rank, (token, _) in enumerate(counts.most_common()):
            role: Role = "alone" if len(counts) == 1 else "first" if rank == 0 else "other"
            share = expected(role, depth)
            those = [position for other, position in following if other == token]
            heapq.heappush(heap, (-above * share, num_found, parent, token, role, share, those, depth))
            num_found += 1

    open_children(-1, 1.0, positions, 0)
    while heap and len(token_ids) < k:
        above, _, parent, token, role, share, agreeing, depth = heapq.heappop(heap)
        token_ids.append(token)
        parents.append(parent)
        roles.append(role)
        shares.append(share)
        open_children(len(token_ids) - 1, -above, agreeing, depth + 1)
    return Continuations(tuple(token_ids), tuple(parents), tuple(roles), tuple(shares))
