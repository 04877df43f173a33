"""Drafts that stay on the device: the chain equals the loop, reads once, and changes no token of any request.

Checked on a CPU, where the same code runs over the same protocol as over CUDA IPC.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakes import FixedPacer, LoopbackEndpoint, RandomPacer, ToyEngine, ToyModel, toy_drafter
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import sequence_distribution
from statistic import p_value
from toy_eagle import FeaturedToy, toy_eagle

from engine.core.block_pool import BlockPool
from engine.core.drafter import Drafter, NoDrafter
from engine.draft.adversarial import WrongDrafter
from engine.draft.architectures import PlainArchitecture
from engine.draft.messages import DraftRequestRow
from engine.draft.proposer import Proposer
from engine.messages import SamplingParams, Submit
from engine.sampling.penalties import TokenOptions
from engine.sampling.row_sampling import RowSampling

VOCAB, MAX_K = 7, 6
ODDS = 1e-6
SAMPLINGS = [RowSampling(0.0, 1.0, 1, 0, False), RowSampling(0.9, 0.8, 5, 3, False), RowSampling(1.0, 1.0, 5, 0, True)]


def endpoint_of(*, on_device: bool) -> LoopbackEndpoint:
    model = ToyModel(vocab_size=VOCAB, num_blocks=64)
    pool = BlockPool(64, model.block_size, prefix_cache=True)
    proposer = Proposer(PlainArchitecture(model.forward), pool, vocab=None, max_model_len=200)
    return LoopbackEndpoint(proposer, max_rows=8, max_k=MAX_K, draft_vocab=VOCAB, on_device=on_device)


ROUNDS = st.lists(
    st.tuples(
        st.integers(0, MAX_K), st.sampled_from([0.0, 0.3, 0.7]), st.integers(0, MAX_K), st.integers(0, VOCAB - 1)
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(histories=st.lists(st.tuples(st.sampled_from(SAMPLINGS), ROUNDS), min_size=1, max_size=4))
def test_the_chain_drafts_what_the_loop_drafts(histories: list[Any]) -> None:
    """Over several requests for the same sequences: any K, any early exit, any number of accepted tokens."""
    chain, loop = endpoint_of(on_device=True), endpoint_of(on_device=False)
    texts = [[1, 2, key] for key in range(len(histories))]
    sent = [0] * len(histories)
    for turn in range(max(len(rounds) for _, rounds in histories)):
        keys = [key for key, (_, rounds) in enumerate(histories) if turn < len(rounds)]
        rows = []
        for key in keys:
            sampling, rounds = histories[key]
            k, threshold, _, _ = rounds[turn]
            rows.append(DraftRequestRow(key, sent[key], tuple(texts[key][sent[key] :]), k, sampling, None, threshold))
            sent[key] = len(texts[key])
        found, expected = chain.ask(rows, deadline_s=1.0), loop.ask(rows, deadline_s=1.0)
        drafted = chain.drafted(len(rows))
        for place, (key, one, other) in enumerate(zip(keys, found.rows, expected.rows, strict=True)):
            length = one.num_on_device
            assert (one.token_ids, one.confidences) == ((), ())
            assert drafted.token_ids[place, :length].tolist() == list(other.token_ids)
            assert drafted.confidences[place, :length].tolist() == list(other.confidences)
            assert (one.reason, one.has_probs) == (other.reason, other.has_probs)
            if other.has_probs:
                assert torch.equal(chain.probs[place, :length], loop.probs[place, :length])
            _, _, num_accepted, token = histories[key][1][turn]
            texts[key] += [*other.token_ids[:num_accepted], token]
        assert chain.num_reads <= turn + 1


@pytest.mark.parametrize("on_device", [True, False])
def test_a_bias_counts_at_every_drafted_position(on_device: bool) -> None:
    endpoint = endpoint_of(on_device=on_device)
    options = TokenOptions(num_prompt=2, logit_bias=((2, 90.0),))
    row = DraftRequestRow(1, 0, (1, 0), MAX_K, SAMPLINGS[0], options)
    (found,) = endpoint.ask([row], deadline_s=1.0).rows
    drafted = endpoint.drafted(1).token_ids[0, : found.num_on_device].tolist() if on_device else list(found.token_ids)
    assert drafted == [2] * MAX_K


def run(drafter: Drafter, submits: list[Submit], *, featured: bool = False, k: int | None = None) -> Any:
    target = (FeaturedToy if featured else ToyModel)(vocab_size=VOCAB)
    pacer = RandomPacer(3, max_k=5) if k is None else FixedPacer(k)
    engine = ToyEngine(target, drafter, pacer, max_num_requests=8, max_step_tokens=64)
    engine.run(submits)
    return [engine.result_of(submit.request_id) for submit in submits], pacer


OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "num_logprobs": 2, "num_prompt_logprobs": 1},
    {"temperature": 1.0, "seed": 4},
    {"temperature": 0.8, "seed": 4, "top_p": 0.8, "num_logprobs": 1},
    {"temperature": 0.0, "presence_penalty": 0.9, "repetition_penalty": 1.3, "logit_bias": ((2, 1.0),)},
    {"temperature": 0.7, "seed": 9, "min_tokens": 9, "stop_token_ids": (3, 4)},
]
SUBMITS = [
    Submit(request_id=str(i), prompt=(1, 2, i % VOCAB), sampling=SamplingParams(max_tokens=18, **options))
    for i, options in enumerate(OPTIONS * 2)
]


@pytest.mark.parametrize("kind", ["draft_model", "reduced vocabulary", "eagle", "wrong drafts"])
def test_no_token_or_score_depends_on_where_drafts_are(kind: str) -> None:
    draft = ToyModel(vocab_size=VOCAB, seed=9, blend=0.3)
    if kind == "eagle":
        drafter: Drafter = toy_eagle(FeaturedToy(vocab_size=VOCAB), draft, on_device=True)[0]
    elif kind == "reduced vocabulary":
        vocab = torch.tensor([4, 0, 2, 1, 6])
        drafter = toy_drafter(ToyModel(vocab_size=VOCAB, columns=5, seed=9), vocab=vocab, on_device=True)
    else:
        drafter = toy_drafter(draft, on_device=True)
        drafter = WrongDrafter(drafter, VOCAB) if kind == "wrong drafts" else drafter
    found, _ = run(drafter, SUBMITS, featured=kind == "eagle")
    expected, _ = run(NoDrafter(), SUBMITS, featured=kind == "eagle")
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens
        assert len(one.logprobs) == len(other.logprobs)
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-5)


def test_the_pacer_learns_the_confidences_of_drafts_that_the_host_has_not_seen() -> None:
    _, on_device = run(toy_drafter(ToyModel(vocab_size=VOCAB), on_device=True), SUBMITS[:1], k=3)
    _, on_host = run(toy_drafter(ToyModel(vocab_size=VOCAB)), SUBMITS[:1], k=3)
    found = [outcome.confidences for stats in on_device.stats for outcome in stats.outcomes]
    assert found == [tuple(torch.tensor(o.confidences).tolist()) for s in on_host.stats for o in s.outcomes]
    assert sum(len(confidences) for confidences in found) > 10


def test_sampled_output_follows_the_target() -> None:
    """Rejection sampling with ids, probabilities and lengths from the device; 1e-6 odds of a false alarm."""
    runs, sampling = 3000, SamplingParams(temperature=0.9, top_p=0.95, max_tokens=3)
    target = ToyModel(vocab_size=5)
    drafter = toy_drafter(ToyModel(vocab_size=5, seed=9, blend=0.5), on_device=True)
    engine = ToyEngine(target, drafter, RandomPacer(11, max_k=4), max_num_requests=16, max_step_tokens=128)
    submits = [Submit(request_id=f"r{i}", prompt=(0, 1, 0), sampling=sampling) for i in range(runs)]
    counts: dict[tuple[int, ...], int] = {}
    for tokens in engine.run(submits).values():
        counts[tuple(tokens)] = counts.get(tuple(tokens), 0) + 1
    assert p_value(counts, sequence_distribution(target.logits_after, (0, 1, 0), sampling)) > ODDS
