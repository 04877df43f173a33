"""Merged trees: which nodes they have, and that the token after each path follows the target's distribution.

Odds: the chi-square tests compare with the 1 - 1e-6 quantile, so a right implementation fails about once in a million
runs per test; the draws are fresh in each run.
"""

from __future__ import annotations

import random
import secrets
from collections import Counter

import pytest
import torch
from fakes import ToyModel
from hypothesis import given
from hypothesis import strategies as st
from statistic import joint_p_value
from tree_drafts import Bias, RandomMerges
from trees import path_to, random_parents

from engine.core.acceptance import AcceptanceKind
from engine.core.request import Request
from engine.core.step import Batch, Span, Trial
from engine.core.verifier import accept_or_reject
from engine.messages import SamplingParams, Submit
from engine.proposals.merge import Proposal, merge
from engine.tree import check_parents, children_of

VOCAB = 5
ODDS = 1e-6
PROMPT = (1, 0, 0)


def chain(tokens: str, *expected: float, drawn: bool = False) -> Proposal:
    ids = tuple(map(int, tokens))
    return Proposal(ids, tuple(range(-1, len(ids) - 1)), expected, tuple(range(len(ids))) if drawn else ())


def test_equal_prefixes_are_shared_and_the_likeliest_nodes_come_first() -> None:
    tree = merge([chain("123", 0.9, 0.5, 0.9), chain("124", 0.8, 0.9, 0.9), chain("5", 0.6)], 5)
    # Token 1, then 2 and 4 as the second proposal expects, then 5. The first proposal expects less of 2 (0.45), so its
    # node below, 3, is found last.
    assert tree.token_ids == (1, 2, 4, 5, 3)
    assert tree.parents == (-1, 0, 1, -1, 1)
    assert tree.places == ((0, 1, 4), (0, 1, 2), (3,))


@pytest.mark.parametrize(("budget", "tokens"), [(0, ()), (1, (1,)), (2, (1, 2)), (9, (1, 2, 3, 7))])
def test_the_budget_counts_nodes(budget: int, tokens: tuple[int, ...]) -> None:
    assert merge([chain("123", 0.9, 0.9, 0.9), chain("7", 0.1)], budget).token_ids == tokens


def test_nodes_of_little_expectation_are_left_out() -> None:
    proposals = [chain("123", 0.9, 0.5, 0.9), chain("7", 0.42)]
    assert merge(proposals, 9, 0.4).token_ids == (1, 2, 7, 3)
    assert merge(proposals, 9, 0.43).token_ids == (1, 2)
    assert merge(proposals, 9, 0.95).token_ids == ()


def test_a_drawn_token_is_tried_again_where_a_certain_one_was_rejected() -> None:
    certain, drawn = chain("12", 0.9, 0.9), chain("13", 0.5, 0.9, drawn=True)
    tree = merge([certain, drawn], 5)
    assert (tree.token_ids, tree.parents) == ((1, 2, 3), (-1, 0, 0))
    assert tree.trials == (Trial(0), Trial(1), Trial(0, 0), Trial(2, 1))


def test_a_certain_token_is_not_tried_again() -> None:
    certain, drawn = chain("12", 0.5, 0.9), chain("13", 0.9, 0.9, drawn=True)
    assert merge([certain, drawn], 5).trials == (Trial(0, 0), Trial(1, 1), Trial(2))


def test_drawn_siblings_keep_their_order_whatever_is_expected_of_them() -> None:
    siblings = Proposal((3, 1, 2), (-1, -1, -1), (0.1, 0.9, 0.5), (0, 0, 0))
    assert merge([siblings], 3).token_ids == (3, 1, 2)


@given(seed=st.integers(0, 2**32), budget=st.integers(0, 20))
def test_every_node_is_a_proposed_path_and_none_occurs_twice(seed: int, budget: int) -> None:
    rng = random.Random(seed)
    proposals = []
    for _ in range(rng.randint(0, 4)):
        parents = random_parents(rng, rng.randint(1, 12))
        tokens = [0] * len(parents)
        for nodes in children_of(parents):
            for node, token in zip(nodes, rng.sample(range(12), len(nodes)), strict=True):
                tokens[node] = token
        proposals.append(Proposal(tuple(tokens), parents, tuple(rng.random() for _ in parents)))
    tree = merge(proposals, budget)
    check_parents(tree.parents)
    paths = [tuple(tree.token_ids[each] for each in path_to(tree.parents, node)) for node in range(len(tree.parents))]
    assert len(set(paths)) == len(paths)
    proposed = {
        tuple(proposal.token_ids[each] for each in path_to(proposal.parents, node))
        for proposal in proposals
        for node in range(len(proposal.token_ids))
    }
    assert set(paths) <= proposed
    assert len(paths) == min(budget, len(proposed)), "the budget is used up, or everything is there"


def next_tokens(bias: Bias, acceptance: AcceptanceKind, k: int, runs: int) -> float:
    """The p-value of the tokens that follow the prompt and each accepted path, over so many random merged trees.

    The draft is far from the target. What it favours is often rejected, so that a bias is large.
    """
    target = ToyModel(vocab_size=VOCAB)
    drafter = RandomMerges(ToyModel(vocab_size=VOCAB, seed=9, blend=1.0), 3, bias=bias)
    counts: dict[tuple[int, ...], Counter[tuple[int, ...]]] = {}
    for _ in range(runs // 100):
        spans = []
        for key in range(100):
            submit = Submit(request_id=str(key), prompt=PROMPT, sampling=SamplingParams())
            request = Request(submit=submit, key=key, stream_key=secrets.randbits(64), tokens=list(PROMPT))
            spans.append(Span(request, len(PROMPT) - 1, 1, k, samples=True, reason="plan"))
        draft = drafter.draft(Batch(1, tuple(spans), 0))
        texts = [
            [*PROMPT, *(row.token_ids[each] for each in path_to(row.parents, node))]
            for row in draft.rows
            for node in range(-1, len(row.token_ids))
        ]
        logits = torch.stack([torch.tensor(target.logits_after(text)) for text in texts])
        for verdict in accept_or_reject(logits, spans, draft, acceptance=acceptance):
            for depth in range(min(2, len(verdict.token_ids))):
                before, token = verdict.token_ids[:depth], verdict.token_ids[depth]
                counts.setdefault(before, Counter())[(token,)] += 1
    assert drafter.num_repeats > runs // 20
    pairs = []
    for before, found in counts.items():
        probs = torch.tensor(target.logits_after([*PROMPT, *before])).softmax(0).tolist()
        pairs.append((found, {(token,): prob for token, prob in enumerate(probs)}))
    return joint_p_value(pairs)


@pytest.mark.parametrize("acceptance", ["each", "together"])
@pytest.mark.parametrize("k", [2, 6])
def test_the_token_after_every_path_follows_the_target(k: int, acceptance: AcceptanceKind) -> None:
    assert next_tokens("none", acceptance, k, 6000) > ODDS


@pytest.mark.parametrize("acceptance", ["each", "together"])
@pytest.mark.parametrize(("bias", "k"), [("drops_repeats", 6), ("fills_up", 1)])
def test_a_trial_that_depends_on_the_token_drawn_is_seen(bias: Bias, k: int, acceptance: AcceptanceKind) -> None:
    """Whether a drawn token is tried must not depend on that token: neither because it repeats one that was rejected,
    nor because it is shared when the budget is spent."""
    assert next_tokens(bias, acceptance, k, 6000) < ODDS
