"""Trees drafted on the host: which nodes they have, in which order, and from which distributions.

Promise: a greedy tree as wide as it has nodes has the nodes of largest cumulative probability. A tree of the rejection
rule has a shape that depends on k and width only, and siblings without repetition.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fakes import ToyModel, toy_grammars
from reference import Spelling

from engine.core.block_pool import BlockPool
from engine.draft.architectures import PlainArchitecture
from engine.draft.messages import DraftRequestRow, DraftResponseRow
from engine.draft.proposer import Proposer
from engine.draft.tree_search import MAX_DEPTH, max_computed, max_levels, num_children
from engine.messages import GrammarSpec
from engine.sampling.distribution import warp
from engine.sampling.penalties import TokenOptions
from engine.sampling.row_sampling import RowSampling
from engine.tree import branches, children_of, depths

VOCAB, BLOCK, MAX_K = 6, 4, 16
GREEDY = RowSampling(0.0, 1.0, 1, 1, False)
TEXT = (1, 2, 3)


class Draft:
    """A proposer over a toy model."""

    def __init__(self, *, num_blocks: int = 60) -> None:
        self.model = ToyModel(vocab_size=VOCAB, num_blocks=num_blocks, block_size=BLOCK)
        self.pool = BlockPool(num_blocks, BLOCK, prefix_cache=True)
        self.proposer = Proposer(PlainArchitecture(self.model.forward), self.pool, vocab=None, max_model_len=100)
        self.probs = torch.full((4, MAX_K, VOCAB), float("nan"))

    def propose(
        self,
        k: int,
        width: int,
        sampling: RowSampling = GREEDY,
        *,
        text: tuple[int, ...] = TEXT,
        start: int = 0,
        **changes: object,
    ) -> DraftResponseRow:
        row = DraftRequestRow(1, start, text[start:], k, sampling, width=width, **changes)  # type: ignore[arg-type]
        (response,) = self.proposer.propose([row], [], self.probs)
        return response

    def probs_after(self, path: tuple[int, ...]) -> np.ndarray:
        logits = self.model.logits_after([*TEXT, *path]).astype(np.float64)
        exact: np.ndarray = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        return exact


def paths_of(response: DraftResponseRow) -> list[tuple[int, ...]]:
    """The tokens from the root position to each node."""
    parents = response.parents or tuple(range(-1, len(response.token_ids) - 1))
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(response.token_ids, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


@pytest.mark.parametrize("k", [1, 2, 5, 8])
def test_a_wide_greedy_tree_has_the_likeliest_nodes_in_their_order(k: int) -> None:
    draft = Draft()
    found = paths_of(draft.propose(k, 8))
    every: dict[tuple[int, ...], float] = {(): 1.0}
    for path in list(every):
        every.pop(path)
    level: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(MAX_DEPTH):
        level = {
            (*path, token): mass * float(prob)
            for path, mass in level.items()
            for token, prob in enumerate(draft.probs_after(path))
            if mass * prob > 1e-3
        }
        every |= level
    assert found == sorted(every, key=lambda path: -every[path])[:k]


def test_confidences_are_those_of_each_node_after_its_own_path() -> None:
    draft = Draft()
    response = draft.propose(12, 3)
    assert branches(response.parents)
    for path, confidence in zip(paths_of(response), response.confidences, strict=True):
        assert confidence == pytest.approx(draft.probs_after(path[:-1])[path[-1]], rel=1e-5)


def test_width_one_is_the_greedy_chain() -> None:
    draft, text = Draft(), list(TEXT)
    for _ in range(7):
        text.append(int(draft.model.logits_after(text).argmax()))
    response = draft.propose(7, 1)
    assert (response.token_ids, response.parents) == (tuple(text[3:]), ())


@pytest.mark.parametrize("width", [1, 3])
def test_a_draft_after_a_tree_is_that_of_a_fresh_draft(width: int) -> None:
    """Whatever was accepted: what stays in the cache belongs to the text."""
    for accepted in range(4):
        used = Draft()
        first = used.propose(6, 3)
        path = paths_of(first)[-1][:accepted]
        text = (*TEXT, *path, 0)
        again = used.propose(6, width, text=text, start=3)
        assert again == Draft().propose(6, width, text=text)
        used.pool.check()


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize(("k", "width", "expected"), [
    (2, 3, ()),
    (3, 2, (-1, 0, -1)),
    (5, 2, (-1, 0, 1, 2, -1)),
    (6, 3, (-1, 0, 1, 2, -1, 0)),
    (16, 3, (-1, 0, 1, 2, 3, 4, -1, -1, 0, 0, 1, 1, 2, 2, 3, 4)),
])  # fmt: skip
def test_a_sampled_tree_has_a_fixed_shape(k: int, width: int, expected: tuple[int, ...], seeded: bool) -> None:
    for stream in range(5):
        draft = Draft()
        sampling = RowSampling(1.0, 1.0, stream, 0 if seeded else 1, seeded)
        response = draft.propose(k, width, sampling)
        assert response.parents == expected
        parents = expected or tuple(range(-1, k - 1))
        for nodes in children_of(parents):
            tokens = [response.token_ids[node] for node in nodes]
            assert len(set(tokens)) == len(tokens)
            if nodes and not seeded:
                path = paths_of(response)[nodes[0]][:-1]
                logits = torch.tensor(draft.model.logits_after([*TEXT, *path])).unsqueeze(0)
                torch.testing.assert_close(draft.probs[0, nodes[0]], warp(logits, [sampling])[0])


def test_a_sampled_tree_has_no_token_that_its_distribution_excludes() -> None:
    sampling = RowSampling(1.0, 1.0, 3, 1, False, 1)  # top_k of one: every position has one candidate.
    response = Draft().propose(9, 3, sampling)
    assert response.parents == ()
    assert len(response.token_ids) == max(depths(tuple(range(-1, 5)))) + 1


def test_the_threshold_ends_paths_and_drops_unlikely_siblings() -> None:
    draft = Draft()
    whole, cut = draft.propose(16, 3), draft.propose(16, 3, exit_threshold=0.2)
    assert 0 < len(cut.token_ids) < len(whole.token_ids)
    for path, parent in zip(paths_of(cut), cut.parents or range(-1, 15), strict=False):
        before = np.prod([draft.probs_after(path[:end])[path[end]] for end in range(len(path) - 1)])
        assert before >= 0.2, parent


def test_penalties_follow_each_path() -> None:
    """A repetition penalty that forbids repeating: no path has a token twice, nor one of the prompt."""
    draft = Draft()
    options = TokenOptions(num_prompt=3, presence_penalty=60.0)
    response = draft.propose(10, 2, options=options)
    assert branches(response.parents)
    assert all(len(set(path)) == len(path) for path in paths_of(response))


@pytest.mark.parametrize(("k", "width"), [(1, 1), (1, 4), (5, 1), (5, 3), (16, 8)])
def test_a_draft_keeps_to_its_nodes_levels_and_slots(k: int, width: int) -> None:
    assert sum(num_children(k, width, level) for level in range(MAX_K)) <= k
    draft = Draft()
    used: list[int] = []
    forward = draft.model.forward

    def counted(forward_input):  # type: ignore[no-untyped-def]
        used.append(len(forward_input.token_ids))
        return forward(forward_input)

    draft.proposer = Proposer(PlainArchitecture(counted), draft.pool, vocab=None, max_model_len=100)
    response = draft.propose(k, width)
    assert len(response.token_ids) == k
    assert sum(used[1:]) <= max_computed(k, width)
    assert len(used) <= max_levels(k, width)


def test_a_tree_has_the_texts_of_its_grammar_and_ends_where_they_do() -> None:
    """The draft has no column for the stop token, so that after a complete text no column is allowed."""
    grammars = toy_grammars(Spelling(of_token=("a", "b", "c", "d", "", ""), end_ids=(5,)))
    grammar = GrammarSpec(kind="regex", text="ab|ac|bd")
    while grammars.poll(grammar) is None:
        pass
    model = ToyModel(vocab_size=VOCAB, columns=4, num_blocks=60, block_size=BLOCK)
    pool = BlockPool(60, BLOCK, prefix_cache=True)
    proposer = Proposer(PlainArchitecture(model.forward), pool, vocab=None, max_model_len=100, grammars=grammars)
    options = TokenOptions(num_prompt=3, grammar=grammar, stop_token_ids=(5,))
    row = DraftRequestRow(1, 0, TEXT, 12, GREEDY, options, width=3)
    (response,) = proposer.propose([row], [], torch.zeros(1, MAX_K, 4))
    assert sorted(paths_of(response)) == [(0,), (0, 1), (0, 2), (1,), (1, 3)]
