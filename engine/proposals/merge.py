"""Several proposals for one request become one tree: equal prefixes shared, the likeliest nodes first, one node budget.

Owns the order in which nodes are visited, and with it what rejection sampling tries at each position. Knows neither
where proposals come from nor how their expectations were learnt.

Nodes are visited best-first by cumulative expectation until the budget is spent. A visited node whose path is in the
tree already is shared and costs nothing. The order of the visits is the order of the nodes in the tree, and the order
in which siblings are tried.

**Why siblings of different proposers stay exact.** Rejection sampling without replacement (Miao et al. 2023; Jeon et
al. 2024) is exact if each token that is tried was drawn from the q it is tried with, given everything that was decided
before. Two rules give that.

1. A token of prompt lookup is certain, so its q is a point mass: it is accepted with probability p, and after a
   rejection p loses it and is normalised. A token of the model was drawn from the model's q, given its drawn siblings
   before it. A certain sibling was not drawn from that q and does not change it. So a drawn token may be one that was
   rejected before. It is then tried in vain, p becomes max(p - q, 0), and q loses it. That trial must not be left out:
   leaving it out would depend on the token drawn, and the tokens that q favours would come out too often. A certain
   token that was rejected before changes nothing and is not tried again.
2. Whether and when a node is visited depends on expectations, on the tokens of nodes visited before, and never on its
   own token or on one visited later. Expectations come from earlier steps, from lookups and from q. A full budget or a
   low expectation ends the visits before the next token is looked at, even if that one would be shared.

Below a node the argument starts anew: which children it has depends on its path and on its earlier siblings only.
Greedy and coupled requests compare tokens with the target's choice, so any tree is exact for them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from msgspec import Struct

from engine.core.step import Trial
from engine.tree import children_of


class Proposal(Struct, frozen=True, gc=False):
    """The tree of one proposer. Parents come before their children, and siblings are in the order they are tried in."""

    token_ids: tuple[int, ...]
    """Token of each node."""
    parents: tuple[int, ...]
    """Parent of each node; -1 for the last committed token."""
    expected: tuple[float, ...]
    """Probability that each node is accepted, given that its parent is. Must not depend on the node's own token where
    it was drawn."""
    q_rows: tuple[int, ...] = ()
    """Row of the draft's probabilities that each token was drawn from, the same one for siblings; empty where the
    tokens are certain."""


class MergedTree(Struct, frozen=True, gc=False):
    """The tree of one draft."""

    token_ids: tuple[int, ...]
    """Token of each node, in the order of visits."""
    parents: tuple[int, ...]
    """Parent of each node, written out for a chain too."""
    trials: tuple[Trial, ...]
    """What rejection sampling tries, in its order."""
    places: tuple[tuple[int, ...], ...]
    """Of each proposal, the node that each of its nodes became; -1 for one that was not visited."""


class _Visit(Struct, order=True, gc=False):
    """A node that may be visited next. The first one in order is the likeliest."""

    below: float
    """Minus its cumulative expectation."""
    number: int
    """Order of discovery, which decides between equals."""
    proposal: int
    node: int
    parent: int
    """Node of the tree that it belongs under."""


def merge(proposals: Sequence[Proposal], budget: int, least: float = 0.0) -> MergedTree:
    """Merge proposals into one tree.

    Args:
        proposals: of one request. At most one of them has drawn tokens: a position has one q.
        budget: most nodes of the tree.
        least: the visits end where no node has a larger cumulative expectation.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    reach: list[float] = []  # cumulative expectation of each node of the tree
    trials: list[Trial] = []
    node_of: dict[tuple[int, int], int] = {}  # (parent, token) -> node of the tree
    places = [[-1] * len(proposal.token_ids) for proposal in proposals]
    below = [children_of(proposal.parents) for proposal in proposals]
    heap: list[_Visit] = []
    num_found = 0

    def offer(proposal: int, nodes: Sequence[int], parent: int) -> None:
        nonlocal num_found
        above = reach[parent] if parent >= 0 else 1.0
        for node in nodes:
            share = proposals[proposal].expected[node]
            heapq.heappush(heap, _Visit(-above * share, num_found, proposal, node, parent))
            num_found += 1

    def offer_children(proposal: int, node: int, parent: int) -> None:
        """Of drawn siblings only the first: the next one is drawn given the token of the one before."""
        nodes = below[proposal][node + 1]
        offer(proposal, nodes[:1] if proposals[proposal].q_rows else nodes, parent)

    for index in range(len(proposals)):
        offer_children(index, -1, -1)
    while heap and len(token_ids) < budget:
        visit = heapq.heappop(heap)
        if -visit.below < least:
            break
        proposal = proposals[visit.proposal]
        token, q_row = proposal.token_ids[visit.node], -1
        if proposal.q_rows:
            q_row = proposal.q_rows[visit.node]
            siblings = below[visit.proposal][proposal.parents[visit.node] + 1]
            following = siblings.index(visit.node) + 1
            offer(visit.proposal, siblings[following : following + 1], visit.parent)
        node = node_of.get((visit.parent, token))
        is_new = node is None
        if node is None:
            node = node_of[visit.parent, token] = len(token_ids)
            token_ids.append(token)
            parents.append(visit.parent)
            reach.append(-visit.below)
        reach[node] = max(reach[node], -visit.below)
        if is_new or q_row >= 0:
            trials.append(Trial(node, q_row))
        places[visit.proposal][visit.node] = node
        offer_children(visit.proposal, visit.node, node)
    return MergedTree(tuple(token_ids), tuple(parents), tuple(trials), tuple(map(tuple, places)))
