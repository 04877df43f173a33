"""Draft trees do not change the distribution of the output: chi-square on a toy vocabulary, over random trees.

Odds: each test compares a statistic with its 1 - 1e-6 quantile, so a right implementation fails about once in a million
runs per test. Every sampling option is in tests/engine/sampling/test_sampling.py.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from fakes import FixedPacer, RandomPacer, ToyEngine, ToyModel
from reference import generate, sequence_distribution
from statistic import p_value
from tree_drafts import RandomMerges, RandomTrees

from engine.core.acceptance import AcceptanceKind
from engine.messages import SamplingParams, Submit

VOCAB = 5
ODDS = 1e-6
NUM_TOKENS = 3
"""First tokens that are compared, of which the first one is not drafted. Few, so that a small bias is seen."""
MAX_TOKENS = 9
"""Tokens of each request. The tree of a step has at most as many nodes as tokens are still to come."""
PROMPT = (0, 1, 0, 1, 0)


def trees(seed: int, *, certain: bool = False, drops_unlikely: bool = False) -> RandomTrees:
    model = ToyModel(vocab_size=VOCAB, seed=9, blend=0.5)
    return RandomTrees(model, seed, certain=certain, drops_unlikely=drops_unlikely)


def p_of(drafter: RandomTrees, sampling: SamplingParams, *, runs: int, acceptance: AcceptanceKind) -> float:
    """The p-value of as many unseeded requests."""
    target = ToyModel(vocab_size=VOCAB, num_blocks=128)
    engine = ToyEngine(
        target,
        drafter,
        RandomPacer(11, max_k=8),
        num_blocks=128,
        max_num_requests=16,
        max_step_tokens=256,
        acceptance=acceptance,
    )
    longer = replace(sampling, max_tokens=MAX_TOKENS)
    submits = [Submit(request_id=f"r{i}", prompt=PROMPT, sampling=longer) for i in range(runs)]
    counts = Counter(tuple(tokens[:NUM_TOKENS]) for tokens in engine.run(submits).values())
    assert drafter.num_forks > 500
    expected = sequence_distribution(target.logits_after, PROMPT, replace(sampling, max_tokens=NUM_TOKENS))
    return p_value(counts, expected)


@pytest.mark.parametrize("acceptance", ["each", "together"])
@pytest.mark.parametrize("certain", [False, True], ids=["from q", "certain"])
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.8)])
def test_emitted_tokens_follow_the_target(
    temperature: float, top_p: float, certain: bool, acceptance: AcceptanceKind
) -> None:
    sampling = SamplingParams(temperature=temperature, top_p=top_p)
    assert p_of(trees(3, certain=certain), sampling, runs=2500, acceptance=acceptance) > ODDS


@pytest.mark.parametrize("acceptance", ["each", "together"])
def test_dropping_a_drawn_token_because_it_is_unlikely_is_seen(acceptance: AcceptanceKind) -> None:
    """A node may depend on q and on the path before it. This rule depends on the token drawn there, and is biased."""
    drafter = trees(3, drops_unlikely=True)
    assert p_of(drafter, SamplingParams(temperature=1.0), runs=2500, acceptance=acceptance) < ODDS


def merges(seed: int) -> RandomMerges:
    return RandomMerges(ToyModel(vocab_size=VOCAB, seed=9, blend=0.5), seed)


@pytest.mark.parametrize("acceptance", ["each", "together"])
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.8)])
def test_trees_merged_from_several_proposers_follow_the_target(
    temperature: float, top_p: float, acceptance: AcceptanceKind
) -> None:
    """Drawn and certain siblings in any order, shared nodes, and a budget that cuts. Biased merges are in
    tests/engine/proposals/test_merge.py."""
    drafter = merges(5)
    assert p_of(drafter, SamplingParams(temperature=temperature, top_p=top_p), runs=1500, acceptance=acceptance) > ODDS
    assert drafter.num_repeats > 1000


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "coupled"])
def test_every_tree_gives_the_same_text(temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, top_p=0.9, max_tokens=60, seed=5)
    target = ToyModel(vocab_size=VOCAB)
    expected = generate(target.logits_after, PROMPT, sampling, 128).tokens
    for seed in range(12):
        drafter = merges(seed) if seed % 3 == 0 else trees(seed, certain=seed % 2 == 0)
        engine = ToyEngine(ToyModel(vocab_size=VOCAB), drafter, FixedPacer(1 + seed % 9), max_step_tokens=64)
        assert engine.run([Submit(request_id="r", prompt=PROMPT, sampling=sampling)])["r"] == expected
