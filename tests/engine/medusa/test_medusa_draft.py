"""Drafting with Medusa heads: one forward per draft request, any number of heads per row, exact output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from distill_fakes import VOCAB, open_target, write_target
from fakes import FixedPacer, LoopbackEndpoint, RandomPacer, ToyEngine, ToyModel
from hypothesis import given, settings
from hypothesis import strategies as st
from local_engine import LocalEngine
from medusa_folders import DRAFT_VOCAB, authors_tensors, write_authors
from reference import generate, sequence_distribution
from statistic import p_value
from toy_eagle import FeaturedToy
from toy_medusa import toy_medusa

from distill.models.export import export_draft
from distill.models.medusa import MedusaDraft
from engine.config import EngineConfig
from engine.core.packing import SpanRows, pack_spans
from engine.draft.messages import DraftRequestRow
from engine.draft.parallel import with_masked
from engine.errors import ConfigError, EngineError
from engine.medusa.architecture import MedusaArchitecture
from engine.medusa.heads import load_heads
from engine.messages import SamplingParams, Submit
from engine.sampling.row_sampling import RowSampling
from engine.workers.draft_worker import DraftWorker

TOYS, ODDS = 7, 1e-6


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def own_folder(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads with a reduced vocabulary and one output layer, as `paceline distill` writes them."""
    target, folder = open_target(target_folder), tmp_path_factory.mktemp("own")
    torch.manual_seed(0)
    draft = MedusaDraft(target.config, DRAFT_VOCAB, target.final_norm, num_heads=4)
    draft.initialise(target)
    export_draft(draft, target_folder, folder, card="")
    return folder


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "tp1": {},
    "no prefix cache": {"prefix_cache": False},
    "preempting": {"kv_cache_tokens": 160, "max_model_len": 112, "prefix_cache": False, "tensor_parallel_size": 2},
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("layout", ["own", "authors"])
def test_output_is_the_same_as_without_a_draft(
    target_folder: Path, own_folder: Path, tmp_path: Path, name: str, layout: str
) -> None:
    """Greedy and seeded, fp32, K random per step, several requests with a common beginning, twice."""
    folder = own_folder if layout == "own" else write_authors(tmp_path, authors_tensors(1), 1)
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
    drafted: dict[str, Any] = {"draft_folder": folder, "pacer": RandomPacer(4, max_k=5), "speculative": {"k": 5}}
    with LocalEngine(target_folder, **drafted, **CONFIGURATIONS[name]) as engine:
        assert engine.config.speculative.method == "medusa"
        assert engine.generate(submits) == plain
        assert list(engine.generate(again).values()) == list(plain.values())
        assert sum(stats.num_drafted for stats in engine.stats) > 100
        if layout == "own":  # The heads of the other layout are random.
            assert sum(stats.num_accepted for stats in engine.stats) > 5


def test_heads_have_no_kv_cache_and_must_fit_the_cap(target_folder: Path, own_folder: Path) -> None:
    def worker(memory_fraction: float) -> DraftWorker:
        speculative = {"draft": str(own_folder), "memory_fraction": memory_fraction}
        values = {"model": str(target_folder), "device": "cpu", "dtype": "float32", "speculative": speculative}
        return DraftWorker(EngineConfig.parse(values), own_folder, target_folder, node_id="n")

    draft = worker(0.1)
    info = draft.load()
    assert (info.draft_vocab, info.feature_width, info.positions_per_pass) == (len(DRAFT_VOCAB), 32, 4)
    assert info.vocab == tuple(DRAFT_VOCAB.tolist())
    metrics = draft.metrics()
    assert set(metrics.numbers) == {"paceline_draft_memory_bytes", "paceline_draft_memory_cap_bytes"}
    heads = load_heads(own_folder, target_folder, dtype=torch.float32)
    assert metrics.number("paceline_draft_memory_bytes") == heads.num_bytes
    with pytest.raises(ConfigError, match="memory_fraction: draft weights"):
        worker(1e-9).load()


@pytest.mark.parametrize("on_device", [False, True])
def test_sampled_output_follows_the_target(on_device: bool) -> None:
    """Rejection sampling with positions drawn independently, K random per step; 1e-6 odds of a false alarm."""
    runs, sampling = 3000, SamplingParams(temperature=0.9, top_p=0.95, max_tokens=3)
    target = FeaturedToy(vocab_size=5, num_blocks=400)
    distribution = ToyModel(vocab_size=5, seed=9, blend=0.5)
    drafter, _, heads = toy_medusa(target, distribution, num_heads=3, on_device=on_device)
    engine = ToyEngine(target, drafter, RandomPacer(11, max_k=4), num_blocks=400, max_num_requests=16)
    submits = [Submit(request_id=f"r{i}", prompt=(0, 1, 0), sampling=sampling) for i in range(runs)]
    counts: dict[tuple[int, ...], int] = {}
    for tokens in engine.run(submits).values():
        counts[tuple(tokens)] = counts.get(tuple(tokens), 0) + 1
    assert p_value(counts, sequence_distribution(target.logits_after, (0, 1, 0), sampling)) > ODDS
    assert heads.num_forwards > 0


def test_a_draft_request_is_one_forward_of_at_most_the_heads() -> None:
    target = FeaturedToy(vocab_size=TOYS)
    drafter, endpoint, heads = toy_medusa(target, ToyModel(vocab_size=TOYS), num_heads=3)
    pacer = FixedPacer(5)
    engine = ToyEngine(target, drafter, pacer, max_model_len=200)
    greedy = SamplingParams(temperature=0.0, max_tokens=30)
    asked = [Submit(request_id=str(i), prompt=(1, 2, i), sampling=greedy) for i in range(3)]
    result = engine.run(asked)
    for submit in asked:
        assert result[submit.request_id] == generate(target.logits_after, submit.prompt, greedy, 200).tokens
    assert sum(stats.num_drafted for stats in pacer.stats) > 60
    assert max(outcome.num_drafted for stats in pacer.stats for outcome in stats.outcomes) == 3
    assert heads.num_forwards == endpoint.num_requests


SAMPLINGS = [RowSampling(0.0, 1.0, 1, 0, False), RowSampling(0.9, 0.8, 5, 3, False), RowSampling(1.0, 1.0, 5, 0, True)]
ROUNDS = st.lists(
    st.tuples(st.integers(0, 6), st.sampled_from([0.0, 0.3, 0.7]), st.integers(0, 6), st.integers(0, TOYS - 1)),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(histories=st.lists(st.tuples(st.sampled_from(SAMPLINGS), ROUNDS), min_size=1, max_size=4))
def test_on_a_device_they_draft_what_they_draft_on_the_host(histories: list[Any]) -> None:
    """Over several requests for the same sequences: any K, any early exit, any number of accepted tokens."""
    target = FeaturedToy(vocab_size=TOYS)

    def endpoint(*, on_device: bool) -> LoopbackEndpoint:
        return toy_medusa(target, ToyModel(vocab_size=TOYS), num_heads=4, on_device=on_device)[1]

    device, host = endpoint(on_device=True), endpoint(on_device=False)
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


def test_the_heads_read_the_feature_before_the_last_token_of_each_drafted_span() -> None:
    """Spans with K = 3, 0 and 1; the one in the middle only catches up."""

    class Recorded:
        blocks = ((),) * 3

        def logits(self, features: torch.Tensor, num_heads: Any) -> torch.Tensor:
            self.seen = (features[:, 0].tolist(), num_heads.tolist())
            return torch.arange(int(num_heads.sum()), dtype=torch.float32)[:, None]

    heads: Any = Recorded()
    spans = [
        with_masked(SpanRows([7, 8], 3, [1], 1, (4, 9)), 2),
        SpanRows([5, 6, 7], 0, [2], 0, (1, 2, 3)),
        SpanRows([5], 0, [3], 1, (1,)),
    ]
    features = torch.arange(6, dtype=torch.float32)[:, None]
    outputs = MedusaArchitecture(heads).compute_committed(pack_spans(spans, 16), features, [2, 0, 0])
    assert heads.seen == ([1.0, 5.0], [3, 1])
    assert outputs.logits.flatten().tolist() == [0.0, 3.0]
    second = outputs.select([0]).following()
    assert second is not None
    assert second.logits.flatten().tolist() == [1.0]
    with pytest.raises(EngineError, match="need features"):
        MedusaArchitecture(heads).compute_committed(pack_spans(spans, 16), None)
    with pytest.raises(EngineError, match="no forward over drafted tokens"):
        MedusaArchitecture(heads).compute_drafted(pack_spans(spans[2:], 16), None)
