"""Drafting with Medusa heads: one forward per draft request, any number of heads per row, exact output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from distill_fakes import open_target, write_target
from fakes import LoopbackEndpoint, ToyModel
from hypothesis import given, settings
from medusa_folders import DRAFT_VOCAB, authors_tensors, write_authors
from one_forward import CONFIGURATIONS, HISTORIES, ODDS, TOYS, check_greedy, check_on_device, check_output, sampled_odds
from toy_eagle import FeaturedToy
from toy_medusa import toy_medusa

from distill.models.export import export_draft
from distill.models.medusa import MedusaDraft
from engine.config import EngineConfig
from engine.core.packing import SpanRows, pack_spans
from engine.draft.parallel import with_masked
from engine.errors import ConfigError, EngineError
from engine.medusa.architecture import MedusaArchitecture
from engine.medusa.heads import load_heads
from engine.workers.draft_worker import DraftWorker


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


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("layout", ["own", "authors"])
def test_output_is_the_same_as_without_a_draft(
    target_folder: Path, own_folder: Path, tmp_path: Path, name: str, layout: str
) -> None:
    folder = own_folder if layout == "own" else write_authors(tmp_path, authors_tensors(1), 1)
    engine = check_output(target_folder, folder, CONFIGURATIONS[name])
    assert engine.config.speculative.method == "medusa"
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
    """Positions are drawn independently."""
    target = FeaturedToy(vocab_size=5, num_blocks=400)
    distribution = ToyModel(vocab_size=5, seed=9, blend=0.5)
    drafter, _, heads = toy_medusa(target, distribution, num_heads=3, on_device=on_device)
    assert sampled_odds(target, drafter) > ODDS
    assert heads.num_forwards > 0


def test_a_draft_request_is_one_forward_of_at_most_the_heads() -> None:
    target = FeaturedToy(vocab_size=TOYS)
    drafter, endpoint, heads = toy_medusa(target, ToyModel(vocab_size=TOYS), num_heads=3)
    observed = check_greedy(target, drafter)
    assert max(outcome.num_drafted for stats in observed for outcome in stats.outcomes) == 3
    assert heads.num_forwards == endpoint.num_requests


@settings(max_examples=60, deadline=None)
@given(histories=HISTORIES)
def test_on_a_device_they_draft_what_they_draft_on_the_host(histories: list[Any]) -> None:
    """Over several requests for the same sequences: any K, any early exit, any number of accepted tokens."""
    target = FeaturedToy(vocab_size=TOYS)

    def endpoint(on_device: bool) -> LoopbackEndpoint:
        return toy_medusa(target, ToyModel(vocab_size=TOYS), num_heads=4, on_device=on_device)[1]

    check_on_device(target, endpoint, histories)


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
