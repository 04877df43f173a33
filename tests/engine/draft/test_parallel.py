"""Parallel drafting: one forward per draft request, the trained distributions, and output that does not change.

The slow twin runs the trained module over the whole text and its masked positions, without a cache.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from distill_fakes import VOCAB, open_target, write_target
from eagle_requests import NUM_DRAFTED, features_of, make_proposer, request_row
from fakes import LoopbackEndpoint, ToyModel
from hypothesis import given, settings
from one_forward import CONFIGURATIONS, HISTORIES, ODDS, TOYS, check_greedy, check_on_device, check_output, sampled_odds
from safetensors.torch import load_file, save_file
from tiny_eagle import DRAFT_VOCAB, make_parallel, write_eagle
from toy_eagle import FeaturedToy
from toy_parallel import toy_parallel

from distill.data.shards import Batch
from distill.models.export import export_draft
from distill.models.export import load_draft as load_trained
from distill.models.parallel import ParallelDraft
from engine.core.packing import SpanRows
from engine.draft.messages import DraftRequestRow
from engine.draft.parallel import with_masked
from engine.errors import ConfigError
from engine.model.load import load_draft


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


def write_parallel(target_folder: Path, where: Path, *, positions: int = NUM_DRAFTED, num_layers: int = 1) -> Path:
    draft = make_parallel(open_target(target_folder), positions=positions, num_layers=num_layers)
    export_draft(draft, target_folder, where, card="")
    return where


@pytest.fixture(scope="module")
def draft_folder(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_parallel(target_folder, tmp_path_factory.mktemp("draft"))


def trained_distributions(draft: ParallelDraft, tokens: list[int], features: torch.Tensor) -> torch.Tensor:
    """[positions, draft_vocab] after all `tokens`, from the forward that trains."""
    pad = draft.positions  # The forward of training needs tokens that the positions are compared with.
    width = len(draft.feature_layers)
    batch = Batch(
        tokens=torch.tensor([[*tokens, *[0] * pad]]),
        features=torch.cat((features, torch.zeros(pad, features.shape[1]))).view(1, len(tokens) + pad, width, -1),
        top_ids=torch.zeros(0),
        top_logprobs=torch.zeros(0),
        weight=torch.zeros(0),
    )
    hidden = draft.unroll(batch, draft.positions, len(tokens) - 2).hidden
    return draft.head(torch.stack([each[0, 0] for each in hidden])).softmax(-1)


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("chunk", [3, 40], ids=["bit by bit", "at once"])
@torch.no_grad()
def test_one_forward_gives_the_trained_distributions(
    target_folder: Path, tmp_path: Path, num_layers: int, chunk: int
) -> None:
    """Several requests at once, sent in chunks, with drafts in between whose masked rows must leave no trace."""
    folder = write_parallel(target_folder, tmp_path, num_layers=num_layers)
    proposer = make_proposer(folder, target_folder)
    trained = load_trained(folder, open_target(target_folder))
    assert isinstance(trained, ParallelDraft)
    seeded = torch.Generator().manual_seed(1)
    texts = [torch.randint(3, VOCAB, (length,), generator=seeded).tolist() for length in (21, 38, 2)]
    features = [features_of(target_folder, folder, text) for text in texts]
    ring, firsts = torch.cat(features), (0, 21, 59)
    probs = torch.zeros(3, NUM_DRAFTED, len(DRAFT_VOCAB))
    checked = 0
    for start in range(0, max(map(len, texts)), chunk):
        rows = []
        for key, text in enumerate(texts):
            feature_rows = [-1, *range(firsts[key], firsts[key] + len(text) - 1)]
            if start < len(text):
                part = slice(start, start + chunk)
                rows.append(request_row(key, start, text[part], feature_rows[part], temperature=1.0))
        for row_index, (row, found) in enumerate(zip(rows, proposer.propose(rows, (), probs, ring), strict=True)):
            num_known = start + len(row.new_tokens)
            expected = trained_distributions(trained, texts[row.key][:num_known], features[row.key][:num_known])
            torch.testing.assert_close(probs[row_index], expected, rtol=2e-3, atol=1e-5)
            assert found.confidences == pytest.approx(expected.amax(-1).tolist(), abs=1e-4)
            checked += len(found.token_ids)
    assert checked == NUM_DRAFTED * (3 if chunk == 40 else 7 + 13 + 1)


def test_a_shared_prefix_has_no_masked_rows(target_folder: Path, draft_folder: Path) -> None:
    """The block that masked rows were written to is shared once committed tokens fill it."""
    text = torch.randint(3, VOCAB, (50,), generator=torch.Generator().manual_seed(2)).tolist()
    ring = features_of(target_folder, draft_folder, text)
    feature_rows = [-1, *range(49)]
    probs = torch.zeros(1, NUM_DRAFTED, len(DRAFT_VOCAB))
    proposer = make_proposer(draft_folder, target_folder)
    for start, stop in ((0, 30), (30, 34), (34, 50)):  # Masked rows reach over the end of a block of 16.
        proposer.propose([request_row(1, start, text[start:stop], feature_rows[start:stop])], (), probs, ring)
    shared = [request_row(2, 0, text, [-1] * 33 + feature_rows[33:])]
    (found,) = proposer.propose(shared, (1,), probs, ring)
    (alone,) = make_proposer(draft_folder, target_folder).propose(
        [request_row(3, 0, text, feature_rows)], (), probs, ring
    )
    assert found.token_ids == alone.token_ids
    assert found.confidences == pytest.approx(alone.confidences, abs=1e-5)


def test_k_ends_with_the_trained_positions_and_with_the_confidence(target_folder: Path, tmp_path: Path) -> None:
    folder = write_parallel(target_folder, tmp_path, positions=3)
    ring = features_of(target_folder, folder, [5, 6, 7])
    probs = torch.zeros(1, NUM_DRAFTED, len(DRAFT_VOCAB))
    row = request_row(1, 0, [5, 6, 7], [-1, 0, 1])
    (found,) = make_proposer(folder, target_folder).propose([row], (), probs, ring)
    assert len(found.token_ids) == 3
    threshold = found.confidences[0] * (1 + found.confidences[1]) / 2
    exits = DraftRequestRow(row.key, 0, row.new_tokens, row.k, row.sampling, None, threshold, row.feature_rows)
    (cut,) = make_proposer(folder, target_folder).propose([exits], (), probs, ring)
    assert cut.token_ids == found.token_ids[:2]


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_output_is_the_same_as_without_a_draft(target_folder: Path, draft_folder: Path, name: str) -> None:
    engine = check_output(target_folder, draft_folder, CONFIGURATIONS[name])
    assert sum(stats.num_accepted for stats in engine.stats) > 5


@pytest.mark.parametrize("on_device", [False, True])
def test_sampled_output_follows_the_target(on_device: bool) -> None:
    """Positions are drawn independently."""
    target = FeaturedToy(vocab_size=5, num_blocks=400)
    distribution = ToyModel(vocab_size=5, seed=9, blend=0.5)
    drafter, _, model = toy_parallel(target, distribution, num_blocks=400, on_device=on_device)
    assert sampled_odds(target, drafter) > ODDS
    assert model.num_forwards > 0


def test_a_draft_request_is_one_forward() -> None:
    target = FeaturedToy(vocab_size=TOYS)
    drafter, endpoint, model = toy_parallel(target, ToyModel(vocab_size=TOYS))
    check_greedy(target, drafter)
    assert model.num_forwards == endpoint.num_requests


@settings(max_examples=60, deadline=None)
@given(histories=HISTORIES)
def test_on_a_device_it_drafts_what_it_drafts_on_the_host(histories: list[Any]) -> None:
    """Over several requests for the same sequences: any K, any early exit, any number of accepted tokens."""
    target = FeaturedToy(vocab_size=TOYS)

    def endpoint(on_device: bool) -> LoopbackEndpoint:
        return toy_parallel(target, ToyModel(vocab_size=TOYS), positions=5, on_device=on_device)[1]

    check_on_device(target, endpoint, histories)


def test_masked_rows_go_on_after_the_span() -> None:
    found = with_masked(SpanRows([7, 8], 3, [1, 2], 1, (4, 9), (0, -1)), 2)
    assert (list(found.token_ids), found.start, found.num_logits) == ([7, 8, 0, 0], 3, 3)
    assert (list(found.positions or ()), list(found.places or ())) == ([4, 9, 10, 11], [0, -1, -1, -1])
    assert list(with_masked(SpanRows([7, 8], 3, [1], 1), 1).positions or ()) == [3, 4, 5]


def changed(folder: Path, out: Path, *, config: dict[str, Any], without: str = "") -> Path:
    out.mkdir(exist_ok=True)
    given_config = json.loads((folder / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(given_config | config))
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if name != without}, out / "model.safetensors")
    return out


def test_a_draft_that_is_not_what_it_says_is_refused(target_folder: Path, draft_folder: Path, tmp_path: Path) -> None:
    for spoiled, message in (
        (changed(draft_folder, tmp_path / "a", config={"positions_per_pass": 0}), "positions_per_pass: 0 is not"),
        (changed(draft_folder, tmp_path / "b", config={"positions_per_pass": 1}), r"eagle\.mask_"),
        (changed(draft_folder, tmp_path / "c", config={}, without="eagle.mask_state"), r"eagle\.mask_state"),
        (
            changed(draft_folder, tmp_path / "d", config={"architecture": "draft_model"}),
            "positions_per_pass: 5 given, but only",
        ),
        (
            changed(write_eagle(target_folder, tmp_path / "e"), tmp_path / "f", config={"positions_per_pass": 4}),
            r"eagle\.mask_embedding",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            load_draft(spoiled, target_folder)
