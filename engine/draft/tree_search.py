"""Drafting trees on the host: level by level, the most promising nodes of each level first (EAGLE-2, Li et al. 2024).

Owns the nodes of one request while its draft is computed, and the loop over the levels of all requests. A chain is a
tree of width 1. Knows neither draft requests nor how a sequence came to its committed tokens.

    level 0    children of the last committed token         logits of the committed forward
    level d    children of the best nodes of level d - 1    one forward over these nodes, each sees its own path;
                                                            of a parallel draft, the committed forward

Greedy and coupled requests only compare a node with the target's choice, so any node may be left out. A greedy tree has
the k nodes of largest cumulative confidence among those found. Under the rejection rule nothing may depend on the token
drawn at a node: such trees have a fixed shape, a chain with siblings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.core.packing import SpanRows, pack_spans
from engine.draft.architectures import Architecture, Outputs
from engine.draft.chain import Chooser
from engine.draft.sequence import Drafting
from engine.sampling.logits_processor import BatchLogitsProcessor, Columns
from engine.sampling.staging import to_host
from engine.tree import MAX_NODES, branches

MAX_DEPTH = 6
"""Levels of a tree with branches. A chain has as many as its k."""


def max_levels(k: int, width: int) -> int:
    """Levels that a draft of k nodes may have."""
    return k if width == 1 else min(k, MAX_DEPTH)


def num_children(k: int, width: int, level: int) -> int:
    """Children that the chain of a tree of fixed shape gets at a level: two thirds of the nodes are the chain."""
    levels = min(max_levels(k, width), -(-2 * k // 3))
    if level >= levels:
        return 0
    more, rest = divmod(k - levels, levels)
    return min(width, 1 + more + (level < rest))


def max_computed(k: int, width: int) -> int:
    """KV slots that a draft of k nodes may need; the nodes of the last level need none."""
    return min(MAX_NODES, width * max(0, max_levels(k, width) - 1))


@dataclass(slots=True)
class _Node:
    """One node of a tree."""

    token: int
    parent: int
    """Index among the nodes; -1 for the last committed token."""
    confidence: float
    score: float
    """Product of the confidences from the root position to here."""
    rank: int
    """Place among its siblings."""
    mask: int = 0
    """Bits of the KV slots of its ancestors and of its own; 0 until it is computed."""


class TreeSearch:
    """The tree of one request.

    Args:
        row: what is drafted for.
    """

    def __init__(self, row: Drafting) -> None:
        self.row = row
        self.width = row.request_row.width
        self.frontier = [-1]
        """Nodes whose logits are computed next, or have just been."""
        self._nodes: list[_Node] = []
        self._computed: list[int] = []  # node of each KV slot
        self._level = 0
        self._num_before = 0  # nodes before those of the level
        processor = row.sequence.logits_processor
        self._num_processed = processor.num_tokens if processor is not None else 0
        self._followed = -1  # node that the logits processor is at
        self._follows = processor is None or not processor.has_ended  # whether a token may come after it

    @property
    def _is_dynamic(self) -> bool:
        return self.row.sampling.greedy or self.width == 1

    def follow(self, node: int) -> bool:
        """Bring the logits processor to the end of a node's path; whether a token may come after it."""
        processor = self.row.sequence.logits_processor
        if processor is None:
            return True
        if node != self._followed:
            steps = [node]
            if not self._follows or self._nodes[node].parent != self._followed:
                steps = self._path(node)
                processor.rewind(self._num_processed)
            self._follows = all(processor.push(self._nodes[each].token) for each in steps) and not processor.has_ended
            self._followed = node
        return self._follows

    def grow(self, tokens: Sequence[Sequence[int]], confidences: Sequence[Sequence[float]]) -> None:
        """Add the children of the frontier.

        Args:
            tokens: of each node of the frontier, its candidates in the order in which they are tried.
            confidences: of the candidates; NaN where there is none, and 0 for a later one that q excludes.
        """
        self._num_before = len(self._nodes)
        threshold = self.row.request_row.exit_threshold
        most = self.width if self._is_dynamic else num_children(self.row.k, self.width, self._level)
        for parent, candidates, certain in zip(self.frontier, tokens, confidences, strict=True):
            above = self._nodes[parent].score if parent >= 0 else 1.0
            for rank, (token, confidence) in enumerate(zip(candidates, certain, strict=False)):
                if rank >= most or math.isnan(confidence) or (rank > 0 and confidence == 0):
                    break
                if rank > 0 and self._is_dynamic and above * confidence < threshold:
                    break
                self._nodes.append(_Node(token, parent, confidence, above * confidence, rank))
        self._level += 1

    def advance(self) -> list[int]:
        """Choose the nodes of the last level that get children; none ends the search.

        Returns:
            For each of them, the place of its parent in the frontier before.
        """
        before, self.frontier = self.frontier, self._open_nodes()
        return [before.index(self._nodes[node].parent) for node in self.frontier]

    def _open_nodes(self) -> list[int]:
        row, found = self.row, range(self._num_before, len(self._nodes))
        if self._level >= max_levels(row.k, self.width):
            return []
        open_nodes = [node for node in found if self._nodes[node].score >= row.request_row.exit_threshold]
        if self._is_dynamic:
            scores = sorted((node.score for node in self._nodes), reverse=True)
            least = scores[row.k - 1] if len(scores) >= row.k else -1.0  # What is not above it can gain nothing.
            open_nodes = [node for node in open_nodes if self._nodes[node].score > least]
            open_nodes.sort(key=lambda node: -self._nodes[node].score)
        else:
            goes_on = num_children(row.k, self.width, self._level) > 0
            open_nodes = [node for node in open_nodes if self._nodes[node].rank == 0 and goes_on]
        room = min(self.width, MAX_NODES - len(self._computed))
        return [node for node in open_nodes if self.follow(node)][:room]

    def rows(self) -> SpanRows:
        """The rows of a forward over the frontier. Its nodes get the next KV slots."""
        sequence = self.row.sequence
        start, nodes = len(sequence.positions), [self._nodes[node] for node in self.frontier]
        for index, node in zip(self.frontier, nodes, strict=True):
            node.mask = 1 << len(self._computed) | (self._nodes[node.parent].mask if node.parent >= 0 else 0)
            self._computed.append(index)
        positions = [len(sequence.tokens) + self._level - 1] * len(nodes)
        sequence.positions += positions
        is_chain = len(nodes) == 1 and nodes[0].mask & (nodes[0].mask + 1) == 0
        return SpanRows(
            *([node.token for node in nodes], start, sequence.block_ids, len(nodes), positions),
            num_tree_slots=0 if is_chain else len(self._computed),
            ancestors=() if is_chain else [node.mask for node in nodes],
        )

    def finish(self) -> None:
        """Give the row its draft, and the sequence the first computed nodes that follow each other."""
        row, sequence = self.row, self.row.sequence
        if sequence.logits_processor is not None:
            sequence.logits_processor.rewind(self._num_processed)
        places = {node: place for place, node in enumerate(self._kept())}
        row.token_ids += [self._nodes[node].token for node in places]
        row.confidences += [self._nodes[node].confidence for node in places]
        parents = tuple(places.get(self._nodes[node].parent, -1) for node in places)
        row.parents = parents if branches(parents) else ()
        first = len(sequence.positions) - len(self._computed)
        before, agreed = -1, 0
        for node in self._computed:
            if self._nodes[node].parent != before:
                break
            sequence.tokens.append(self._nodes[node].token)
            before, agreed = node, agreed + 1
        del sequence.positions[first + agreed :]

    def _kept(self) -> list[int]:
        """The nodes of the draft, those most likely accepted first, parents before children."""
        nodes = range(len(self._nodes))
        if self._is_dynamic:
            return sorted(nodes, key=lambda node: (-self._nodes[node].score, node))[: self.row.k]
        return sorted(nodes, key=lambda node: (self._nodes[node].rank > 0, node))

    def _path(self, node: int) -> list[int]:
        path: list[int] = []
        while node >= 0:
            path.append(node)
            node = self._nodes[node].parent
        return path[::-1]


def draft_trees(
    architecture: Architecture,
    chooser: Chooser,
    rows: Sequence[Drafting],
    outputs: Outputs,
    probs: torch.Tensor,
    *,
    columns: Columns | None,
    block_size: int,
) -> None:
    """Draft for all rows together, one forward and one read per level.

    Args:
        architecture: the draft's model.
        chooser: ranks or draws the tokens.
        rows: with k > 0, in the order of `outputs`; their KV slots are reserved.
        outputs: of the committed forward.
        probs: [max_rows, max_k, draft_vocab], written for rows of the rejection rule.
        columns: mapping of a reduced vocabulary, for logits processors.
        block_size: tokens per KV block.
    """
    searches = [TreeSearch(row) for row in rows]
    live, level = searches, 0
    while live:
        owners = [search.row for search in live for _ in search.frontier]
        possible = _process(live, outputs.logits, columns)
        width = max(search.width for search in live)
        chosen, certain = chooser.candidates(owners, outputs.logits, probs, depth=level, width=width)
        tokens, confidences = (values.tolist() for values in to_host([chosen, certain]))
        for impossible in [index for index, is_possible in enumerate(possible) if not is_possible]:
            confidences[impossible] = [math.nan]
        first = 0
        for search in live:
            last = first + len(search.frontier)
            search.grow(
                [row[: search.width] for row in tokens[first:last]],
                [row[: search.width] for row in confidences[first:last]],
            )
            first = last
        parent_rows = _advance(live)
        live, level = [search for search in live if search.frontier], level + 1
        if live:
            parents = outputs.select(parent_rows)
            outputs = parents.following() or architecture.compute_drafted(
                pack_spans([search.rows() for search in live], block_size), parents.previous_hidden
            )
    for search in searches:
        search.finish()


def _advance(searches: Sequence[TreeSearch]) -> list[int]:
    """Advance every search. Returns the logit row of the parent of each node of the new frontiers."""
    rows: list[int] = []
    first = 0
    for search in searches:
        num_before = len(search.frontier)
        rows += [first + place for place in search.advance()]
        first += num_before
    return rows


def _process(searches: Sequence[TreeSearch], logits: torch.Tensor, columns: Columns | None) -> list[bool]:
    """Apply penalties and grammars at every node of the frontiers.

    Returns:
        Whether each row has a column that its grammar allows. The logits of other rows mean nothing. Empty: all have.
    """
    batch_processor = BatchLogitsProcessor(columns)
    index = 0
    for search in searches:
        processor = search.row.sequence.logits_processor
        for node in search.frontier:
            if processor is not None and search.follow(node):
                batch_processor.add(index, processor)
            index += 1
    batch_processor.apply(logits)
    if not batch_processor.can_exclude_all:
        return []
    possible = torch.isfinite(logits.amax(dim=-1))
    logits.masked_fill_(~possible.unsqueeze(1), 0.0)
    allowed: list[bool] = possible.tolist()
    return allowed
