"""Drafting does not change the distribution of the output: chi-square on a toy vocabulary.

Odds: each test compares a statistic with its 1 - 1e-6 quantile, so a right implementation fails about once in a million
runs per test; the draws of unseeded requests are fresh in each run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import FixedPacer, RandomPacer, ToyEngine, ToyModel, toy_drafter
from msgspec import structs
from reference import sequence_distribution
from statistic import p_value
from toy_eagle import FeaturedToy, toy_eagle
from toy_medusa import toy_medusa

from engine.core.drafter import Drafter, NoDrafter
from engine.core.pacing import KChoice, SpeculationPlan
from engine.core.request import Request
from engine.core.stats import StepStats
from engine.core.step import Batch, Draft, DraftRow, Verdict
from engine.draft.first_of import FirstOf
from engine.lookup.ngram import Lookup, NgramDrafter
from engine.messages import SamplingParams, Submit
from engine.proposals.drafter import MergedDrafter
from engine.sampling.distribution import Purpose, draw, gumbel, stream_seed, warp
from engine.sampling.row_sampling import RowSampling

VOCAB = 5
ODDS = 1e-6
NUM_TOKENS = 4
PROMPT = (0, 1, 0, 1, 0)


def sample(
    target: ToyModel, drafter: Drafter, sampling: SamplingParams, *, seeded: bool, runs: int
) -> dict[tuple[int, ...], int]:
    engine = ToyEngine(target, drafter, RandomPacer(11, max_k=7), max_num_requests=16, max_step_tokens=160)
    submits = [
        Submit(
            request_id=f"r{i}",
            prompt=PROMPT,
            sampling=replace(sampling, max_tokens=NUM_TOKENS, seed=i if seeded else None),
        )
        for i in range(runs)
    ]
    counts: dict[tuple[int, ...], int] = {}
    for tokens in engine.run(submits).values():
        counts[tuple(tokens)] = counts.get(tuple(tokens), 0) + 1
    return counts


def target_and_drafter(method: str, *, width: int = 1) -> tuple[ToyModel, Drafter]:
    """A target with the same distribution for every method, and the method's drafter.

    Args:
        method: its name; `+tree` drafts trees.
        width: of draft trees.
    """
    if method.endswith("+tree"):
        return target_and_drafter(method.removesuffix("+tree"), width=3)
    if method.endswith("+lookup"):
        target, model = target_and_drafter(method.removesuffix("+lookup"), width=width)
        if width > 1:
            return target, MergedDrafter(Lookup(min_size=1, max_size=3), model)
        return target, FirstOf(NgramDrafter(min_size=2, max_size=3), model, source="lookup")
    if method == "eagle":
        target = FeaturedToy(vocab_size=VOCAB)
        sampling = ToyModel(vocab_size=VOCAB, columns=4, seed=9, blend=0.5)
        return target, toy_eagle(target, sampling, vocab=torch.tensor([4, 0, 2, 1]), width=width)[0]
    if method == "medusa":
        target = FeaturedToy(vocab_size=VOCAB)
        sampling = ToyModel(vocab_size=VOCAB, columns=4, seed=9, blend=0.5)
        return target, toy_medusa(target, sampling, num_heads=3, vocab=torch.tensor([4, 0, 2, 1]))[0]
    return ToyModel(vocab_size=VOCAB), drafter_of(method, width=width)


def drafter_of(method: str, *, width: int = 1) -> Drafter:
    if method == "none":
        return NoDrafter()
    if method == "ngram":
        lookup: dict[str, Any] = {"min_size": 1, "max_size": 2}
        return NgramDrafter(**lookup) if width == 1 else MergedDrafter(Lookup(**lookup), None)
    if method == "draft_model":
        return toy_drafter(ToyModel(vocab_size=VOCAB, seed=9, blend=0.5), width=width)
    return toy_drafter(ToyModel(vocab_size=VOCAB, columns=3, seed=9), vocab=torch.tensor([4, 0, 2]), width=width)


@pytest.mark.parametrize("seeded", [False, True], ids=["rejection", "coupled"])
@pytest.mark.parametrize(
    "method",
    [
        *("none", "ngram", "draft_model", "draft_model_reduced", "eagle", "eagle+lookup", "medusa"),
        *("ngram+tree", "draft_model+tree", "draft_model_reduced+tree", "eagle+tree"),
        *("draft_model+lookup+tree", "eagle+lookup+tree", "medusa+lookup+tree"),
    ],
)
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.8)])
def test_emitted_tokens_follow_the_target(method: str, temperature: float, top_p: float, seeded: bool) -> None:
    target, drafter = target_and_drafter(method)
    sampling = SamplingParams(temperature=temperature, top_p=top_p)
    counts = sample(target, drafter, sampling, seeded=seeded, runs=1000)
    assert (
        p_value(counts, sequence_distribution(target.logits_after, PROMPT, replace(sampling, max_tokens=NUM_TOKENS)))
        > ODDS
    )


def test_the_chi_square_sees_a_wrong_distribution() -> None:
    """The test above can fail: the draft's tokens do not follow the target's distribution."""
    sampling = SamplingParams(temperature=1.0)
    target, draft = ToyModel(vocab_size=VOCAB), ToyModel(vocab_size=VOCAB, seed=9, blend=0.5)
    counts = sample(draft, NoDrafter(), sampling, seeded=False, runs=1000)
    assert (
        p_value(counts, sequence_distribution(target.logits_after, PROMPT, replace(sampling, max_tokens=NUM_TOKENS)))
        < ODDS
    )


def test_equal_seeds_give_equal_tokens_for_every_method_and_k() -> None:
    sampling = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=50, seed=123)
    seen = set()
    trees = ("ngram+tree", "draft_model+tree", "draft_model_reduced+tree", "eagle+tree", "eagle+lookup+tree")
    for method in ("none", "ngram", "draft_model", "draft_model_reduced", "eagle", "medusa", *trees):
        for k in (0, 1, 4, 9):
            engine = ToyEngine(*target_and_drafter(method), FixedPacer(k))
            seen.add(tuple(engine.run([Submit(request_id="r", prompt=PROMPT, sampling=sampling)])["r"]))
    assert len(seen) == 1


def test_different_seeds_differ() -> None:
    target = ToyModel(vocab_size=VOCAB)
    engine = ToyEngine(target, NoDrafter(), FixedPacer(0))
    submits = [
        Submit(request_id=f"r{i}", prompt=PROMPT, sampling=SamplingParams(temperature=1.0, max_tokens=30, seed=i))
        for i in range(8)
    ]
    assert len({tuple(tokens) for tokens in engine.run(submits).values()}) == 8


def test_coupling_accepts_more_than_independent_draws_would() -> None:
    """Shared noise is what makes seeded drafts worth it: P(same) >= (1 - TV) / (1 + TV)."""
    rng = np.random.default_rng(0)
    logits = torch.tensor(rng.normal(size=(2, 40)) * 1.5, dtype=torch.float32)
    logits[1] = logits[0] + 0.4 * logits[1]
    sampling = RowSampling(1.0, 1.0, 7, 0, True)
    p, q = warp(logits, [sampling, sampling])
    ids = torch.arange(40)
    runs = 4000
    noise = gumbel([stream_seed(7, i, Purpose.TOKEN, 0) for i in range(runs)], ids)
    same = (draw(p.repeat(runs, 1), noise.clone()) == draw(q.repeat(runs, 1), noise.clone())).float().mean().item()
    distance = 0.5 * (p - q).abs().sum().item()
    bound = (1 - distance) / (1 + distance)
    assert same > bound - 5 * (bound * (1 - bound) / runs) ** 0.5


def test_gumbel_noise_is_standard_and_independent_of_the_shape_it_is_asked_for() -> None:
    seeds = [stream_seed(3, i, Purpose.TOKEN, 0) for i in range(64)]
    noise = gumbel(seeds, torch.arange(4096))
    assert abs(noise.mean().item() - 0.5772) < 0.02
    assert abs(noise.var().item() - np.pi**2 / 6) < 0.05
    some = torch.tensor([5, 4000, 17])
    assert torch.equal(gumbel(seeds[9:10], some)[0], noise[9, some])
    correlation = np.corrcoef(noise.numpy())
    np.fill_diagonal(correlation, 0)
    assert np.abs(correlation).max() < 0.1


class DropsDrafts:
    """Shortens each draft by a rule over the draft's distribution.

    Args:
        inner: drafts.
        looks_at_token: whether the rule asks how likely the drawn token was, or how likely the most likely one is.
    """

    def __init__(self, inner: Drafter, *, looks_at_token: bool) -> None:
        self._inner = inner
        self._looks_at_token = looks_at_token

    def draft(self, batch: Batch) -> Draft:
        draft = self._inner.draft(batch)
        return structs.replace(draft, rows=tuple(self._cut(row) for row in draft.rows))

    def committed(self, batch: Batch, verdict: Verdict) -> None:
        self._inner.committed(batch, verdict)

    def forget(self, keys: Sequence[int]) -> None:
        self._inner.forget(keys)

    def _cut(self, row: DraftRow) -> DraftRow:
        kept = 0
        for j, token in enumerate(row.token_ids):
            assert row.probs is not None
            if float(row.probs[j, token] if self._looks_at_token else row.probs[j].max()) < 0.45:
                break
            kept += 1
        return structs.replace(row, token_ids=row.token_ids[:kept], confidences=row.confidences[:kept])


@pytest.mark.parametrize("looks_at_token", [True, False], ids=["biased", "exact"])
def test_a_draft_may_be_cut_by_its_distribution_but_not_by_the_token_drawn(looks_at_token: bool) -> None:
    """Dropping a drawn token because it was unlikely makes the likely tokens too frequent."""
    target = ToyModel(vocab_size=VOCAB)
    drafter = DropsDrafts(drafter_of("draft_model"), looks_at_token=looks_at_token)
    counts = sample(target, drafter, SamplingParams(), seeded=False, runs=2500)
    sampling = sequence_distribution(target.logits_after, PROMPT, SamplingParams(max_tokens=NUM_TOKENS))
    assert (p_value(counts, sampling) > ODDS) is not looks_at_token


class ThresholdPacer(RandomPacer):
    """A random K and a random early-exit threshold for every request in every step."""

    def __init__(self, seed: int, max_k: int) -> None:
        super().__init__(seed, max_k)
        self.num_cut = self.num_whole = 0

    def choose(self, plan: SpeculationPlan, decodes: Sequence[Request], num_prefill_rows: int) -> list[KChoice]:
        choices = super().choose(plan, decodes, num_prefill_rows)
        return [replace(choice, exit_threshold=float(self._random.random())) for choice in choices]

    def observe(self, stats: StepStats) -> None:
        for outcome in stats.outcomes:
            self.num_cut += outcome.num_drafted < outcome.num_asked
            self.num_whole += outcome.num_drafted == outcome.num_asked


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("seeded", [False, True], ids=["rejection", "coupled"])
def test_early_exit_does_not_change_the_distribution(seeded: bool, width: int) -> None:
    target, pacer = ToyModel(vocab_size=VOCAB), ThresholdPacer(3, max_k=4)
    drafter = drafter_of("draft_model", width=width)
    engine = ToyEngine(target, drafter, pacer, max_num_requests=16, max_step_tokens=128)
    sampling = SamplingParams(max_tokens=NUM_TOKENS)
    submits = [
        Submit(request_id=f"r{i}", prompt=PROMPT, sampling=replace(sampling, seed=i if seeded else None))
        for i in range(2500)
    ]
    counts = Counter(tuple(tokens) for tokens in engine.run(submits).values())
    assert p_value(counts, sequence_distribution(target.logits_after, PROMPT, sampling)) > ODDS
    assert pacer.num_cut > 300
    assert pacer.num_whole > 300
