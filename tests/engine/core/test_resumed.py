"""A request that continues in another engine gets the tokens that the first engine would have generated.

Promise: for greedy and seeded requests, interrupting a run at any token and continuing in a new engine changes nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from fakes import RandomPacer, ToyEngine, ToyModel, toy_drafter
from hypothesis import given, settings
from hypothesis import strategies as st
from statistic import p_value

from engine.core.drafter import NoDrafter
from engine.messages import SamplingParams, Submit

VOCAB = 7


def fresh(seed: int, *, with_draft: bool) -> ToyEngine:
    target = ToyModel(vocab_size=VOCAB)
    drafter = toy_drafter(ToyModel(vocab_size=VOCAB, seed=3, blend=0.3)) if with_draft else NoDrafter()
    return ToyEngine(target, drafter, RandomPacer(seed, 5))


@settings(max_examples=150, deadline=None)
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12).map(tuple),
    sampling=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 1.0]),
        top_p=st.sampled_from([1.0, 0.8]),
        frequency_penalty=st.sampled_from([0.0, 0.7]),
        repetition_penalty=st.sampled_from([1.0, 1.3]),
        min_tokens=st.sampled_from([0, 9]),
        max_tokens=st.integers(2, 24),
        seed=st.integers(0, 2**63 - 1),
        stop_token_ids=st.sampled_from([(), (0,)]),
        num_logprobs=st.sampled_from([None, 2]),
    ),
    cut=st.integers(0, 23),
    seed=st.integers(0, 2**32),
    with_draft=st.booleans(),
)
def test_going_on_elsewhere_changes_nothing(
    prompt: tuple[int, ...], sampling: SamplingParams, cut: int, seed: int, with_draft: bool
) -> None:
    submit = Submit(request_id="r", prompt=prompt, sampling=sampling)
    whole = fresh(seed, with_draft=with_draft)
    whole.run([submit])
    tokens = whole.tokens_of("r")
    cut = min(cut, len(tokens) - 1)
    rest = fresh(seed + 1, with_draft=with_draft)
    rest.run([replace(submit, generated=tuple(tokens[:cut]))])
    assert rest.tokens_of("r") == tokens[cut:]
    last, expected = rest.deltas["r"][-1], whole.deltas["r"][-1]
    assert last.finish_reason == expected.finish_reason
    if sampling.num_logprobs is not None:
        got = [entry.logprob for delta in rest.deltas["r"] for entry in delta.logprobs]
        there = [entry.logprob for delta in whole.deltas["r"] for entry in delta.logprobs]
        assert got == pytest.approx(there[cut:], abs=1e-5)
    assert rest.pool.num_free == rest.pool.num_blocks - 1


def test_without_a_seed_the_distribution_is_kept() -> None:
    """Chi-square of the token after the cut against the model's distribution; one false alarm in 10,000 runs."""
    target = ToyModel(vocab_size=VOCAB)
    prefix = (1, 2)
    engine = fresh(0, with_draft=True)
    sampling = SamplingParams(temperature=1.0, max_tokens=3)
    submits = [Submit(request_id=f"r{i}", prompt=(3,), sampling=sampling, generated=prefix) for i in range(3000)]
    outcomes = [tuple(tokens) for tokens in engine.run(submits).values()]
    assert {len(outcome) for outcome in outcomes} == {1}, "three in all, two of them before"
    probs = torch.softmax(torch.from_numpy(target.logits_after((3, *prefix))), dim=0)
    distribution = {(token,): float(mass) for token, mass in enumerate(probs)}
    assert p_value(Counter(outcomes), distribution) > 1e-4
