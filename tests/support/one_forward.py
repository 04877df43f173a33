"""What holds of drafts on the target's hidden states: their output, and what one forward drafts.

Their tests give the draft; nothing here depends on how it computes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from distill_fakes import VOCAB
from fakes import FixedPacer, LoopbackEndpoint, RandomPacer, ToyEngine
from hypothesis import strategies as st
from local_engine import LocalEngine
from reference import generate, sequence_distribution
from statistic import p_value
from toy_eagle import FeaturedToy

from engine.core.drafter import Drafter
from engine.core.stats import StepStats
from engine.draft.messages import DraftRequestRow
from engine.messages import SamplingParams, Submit
from engine.sampling.row_sampling import RowSampling

TOYS, ODDS = 7, 1e-6
"""Vocabulary of the toys, and the odds of a false alarm."""
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "tp1": {},
    "no prefix cache": {"prefix_cache": False},
    "preempting": {"kv_cache_tokens": 160, "max_model_len": 112, "prefix_cache": False, "tensor_parallel_size": 2},
}
"""Settings of the engine under which drafting must not change the output."""

_SAMPLINGS = [RowSampling(0.0, 1.0, 1, 0, False), RowSampling(0.9, 0.8, 5, 3, False), RowSampling(1.0, 1.0, 5, 0, True)]
_ROUNDS = st.lists(
    st.tuples(st.integers(0, 6), st.sampled_from([0.0, 0.3, 0.7]), st.integers(0, 6), st.integers(0, TOYS - 1)),
    min_size=1,
    max_size=5,
)
HISTORIES = st.lists(st.tuples(st.sampled_from(_SAMPLINGS), _ROUNDS), min_size=1, max_size=4)
"""Of each sequence: its sampling, and per draft request K, the exit threshold, the number of accepted tokens and the
token after them."""


def check_output(target_folder: Path, draft_folder: Path, settings: dict[str, Any]) -> LocalEngine:
    """Output is the same with the draft as without one: greedy and seeded, fp32, K random per step, several requests
    with a common beginning, twice.

    Args:
        target_folder, draft_folder: the models.
        settings: of the engine.

    Returns:
        The engine that drafted, stopped.
    """
    seeded = torch.Generator().manual_seed(3)
    common = torch.randint(3, VOCAB, (40,), generator=seeded).tolist()
    submits = [
        Submit(
            request_id=str(i),
            prompt=(*common[: 8 + 6 * i], 5 + i),
            sampling=SamplingParams(temperature=0.0 if i % 2 else 0.9, seed=i, max_tokens=40),
        )
        for i in range(6)
    ]
    again = [Submit(request_id=f"{s.request_id}'", prompt=s.prompt, sampling=s.sampling) for s in submits]
    with LocalEngine(target_folder) as engine:
        plain = engine.generate(submits)
    drafted: dict[str, Any] = {"draft_folder": draft_folder, "pacer": RandomPacer(4, max_k=5), "speculative": {"k": 5}}
    with LocalEngine(target_folder, **drafted, **settings) as engine:
        assert engine.generate(submits) == plain
        assert list(engine.generate(again).values()) == list(plain.values())
        assert sum(stats.num_drafted for stats in engine.stats) > 100
    return engine


def sampled_odds(target: FeaturedToy, drafter: Drafter) -> float:
    """Probability of output that deviates from the target's distribution as far as what the engine samples, with
    rejection sampling and K random per step.

    Args:
        target: with five tokens and 400 blocks.
        drafter: drafts for it.
    """
    runs, sampling = 3000, SamplingParams(temperature=0.9, top_p=0.95, max_tokens=3)
    engine = ToyEngine(target, drafter, RandomPacer(11, max_k=4), num_blocks=400, max_num_requests=16)
    submits = [Submit(request_id=f"r{i}", prompt=(0, 1, 0), sampling=sampling) for i in range(runs)]
    counts: dict[tuple[int, ...], int] = {}
    for tokens in engine.run(submits).values():
        counts[tuple(tokens)] = counts.get(tuple(tokens), 0) + 1
    return p_value(counts, sequence_distribution(target.logits_after, (0, 1, 0), sampling))


def check_greedy(target: FeaturedToy, drafter: Drafter) -> list[StepStats]:
    """Three greedy requests have the target's own output at K = 5. Returns what was observed of the steps."""
    pacer = FixedPacer(5)
    engine = ToyEngine(target, drafter, pacer, max_model_len=200)
    greedy = SamplingParams(temperature=0.0, max_tokens=30)
    asked = [Submit(request_id=str(i), prompt=(1, 2, i), sampling=greedy) for i in range(3)]
    result = engine.run(asked)
    for submit in asked:
        assert result[submit.request_id] == generate(target.logits_after, submit.prompt, greedy, 200).tokens
    assert sum(stats.num_drafted for stats in pacer.stats) > 60
    return pacer.stats


def check_on_device(
    target: FeaturedToy, make_endpoint: Callable[[bool], LoopbackEndpoint], histories: list[Any]
) -> None:
    """A draft that keeps its tokens on the device drafts what it drafts on the host, with one read per request.

    Args:
        target: gives the features.
        make_endpoint: the draft's endpoint, on the device or on the host.
        histories: drawn from `HISTORIES`.
    """
    device, host = make_endpoint(True), make_endpoint(False)
    texts = [[1, 2, key] for key in range(len(histories))]
    sent = [0] * len(histories)
    for turn in range(max(len(rounds) for _, rounds in histories)):
        keys = [key for key, (_, rounds) in enumerate(histories) if turn < len(rounds)]
        rows = []
        written: list[list[int]] = []
        for key in keys:
            sampling, rounds = histories[key]
            k, threshold, _, _ = rounds[turn]
            start, new = sent[key], tuple(texts[key][sent[key] :])
            before = [target.features_after(texts[key][:position]) for position in range(start, start + len(new))]
            places = tuple(range(len(written), len(written) + len(new)))
            written += before
            rows.append(DraftRequestRow(key, start, new, k, sampling, None, threshold, places))
            sent[key] = len(texts[key])
        for each in (device, host):
            assert each.features is not None
            each.features[: len(written)] = torch.tensor(written, dtype=torch.float32)
        found, expected = device.ask(rows, deadline_s=1.0), host.ask(rows, deadline_s=1.0)
        drafted = device.drafted(len(rows))
        for place, (key, one, other) in enumerate(zip(keys, found.rows, expected.rows, strict=True)):
            length = one.num_on_device
            assert drafted.token_ids[place, :length].tolist() == list(other.token_ids)
            assert drafted.confidences[place, :length].tolist() == list(other.confidences)
            assert (one.reason, one.has_probs) == (other.reason, other.has_probs)
            if other.has_probs:
                assert torch.equal(device.probs[place, :length], host.probs[place, :length])
            _, _, num_accepted, token = histories[key][1][turn]
            texts[key] += [*other.token_ids[:num_accepted], token]
        assert device.num_reads <= turn + 1
