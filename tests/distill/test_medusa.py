"""Medusa heads: training computes the published formula, only the last hidden state counts, and each head learns."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from distill_fakes import VOCAB, open_target, random_batch, write_shards, write_target

from distill.data.shards import Document, ShardWriter, shard_paths
from distill.models.costs import CONTEXT, measure
from distill.models.decoder import FrozenTarget
from distill.models.export import DraftMismatchError, export_draft, load_draft, start_from
from distill.models.medusa import MedusaDraft, check_last_layer, tapped_layers
from distill.settings import TrainConfig, check_architecture, trained_steps
from distill.training.evaluate import evaluate
from distill.training.trainer import step_loss, train
from engine.errors import ConfigError

VOCABULARY = torch.arange(3, 63)
HEADS = 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> FrozenTarget:
    return open_target(write_target(tmp_path_factory.mktemp("target")))


def medusa(target: FrozenTarget, num_layers: int = 1, num_heads: int = HEADS) -> MedusaDraft:
    torch.manual_seed(num_layers)
    draft = MedusaDraft(target.config, VOCABULARY, torch.rand(32) + 0.5, num_heads=num_heads, num_layers=num_layers)
    for parameter in draft.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return draft


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("first_root", [0, 4])
def test_each_head_is_the_published_formula(target: FrozenTarget, num_layers: int, first_root: int) -> None:
    """Row by row, in plain arithmetic: norm, then z + z W sigma(z W) per block, with z W = W z + b."""
    draft, batch = medusa(target, num_layers), random_batch(2, 14)
    with torch.no_grad():
        found = draft.unroll(batch, HEADS, first_root).hidden
        assert [hidden.shape[1] for hidden in found] == [13 - first_root - step for step in range(HEADS)]
        for root in (first_root, 6, 9):
            last = batch.features[1, root, 1].double()
            normed = last / (last.square().mean() + draft.config.rms_norm_eps).sqrt() * draft.target_norm.double()
            for head in range(HEADS):
                z = normed
                for block in range(num_layers):
                    weights = dict(draft.named_parameters())
                    y = weights[f"layers.{head}.{block}.weight"].double() @ z
                    y = y + weights[f"layers.{head}.{block}.bias"].double()
                    z = z + y / (1 + (-y).exp())
                torch.testing.assert_close(found[head][1, root - first_root].double(), z, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("offset", [0, 1, 2])
@pytest.mark.parametrize("length", [3, 5, 14])
def test_sampled_roots_are_those_of_all_roots(target: FrozenTarget, length: int, offset: int) -> None:
    draft, batch = medusa(target), random_batch(2, length)
    with torch.no_grad():
        first, *later = draft.unroll(batch, HEADS).hidden
        sampled, *sampled_later = draft.unroll(batch, HEADS, offset, every=3).hidden
    torch.testing.assert_close(sampled, first)
    for all_roots, some in zip(later, sampled_later, strict=False):
        torch.testing.assert_close(some, all_roots[:, offset::3])


def test_only_the_last_layer_at_the_root_counts(target: FrozenTarget) -> None:
    draft, batch, root = medusa(target), random_batch(1, 14), 5
    features = batch.features.clone()
    features[:, :, 0] += 1
    features[:, root + 1 :] += 1
    features[:, :root] -= 1
    changed = replace(batch, tokens=torch.zeros_like(batch.tokens), features=features)
    with torch.no_grad():
        before, after = (draft.unroll(each, HEADS).hidden for each in (batch, changed))
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one[0, root], other[0, root])
        assert not torch.equal(one[0, root - 1], other[0, root - 1])


@pytest.mark.parametrize("every", [1, 3])
def test_gradients_reach_every_trained_head_and_no_other(target: FrozenTarget, every: int) -> None:
    draft, batch = medusa(target, 2), random_batch(2, 14)
    step_loss(draft, batch, TrainConfig(steps=HEADS - 1, chain_every=every))[0].backward()
    for name, parameter in draft.named_parameters():
        is_trained = not name.startswith(f"layers.{HEADS - 1}.")
        assert (parameter.grad is not None and bool(parameter.grad.abs().max() > 0)) is is_trained, name


def test_a_new_draft_predicts_what_the_target_predicts(target: FrozenTarget) -> None:
    draft, batch = MedusaDraft(target.config, VOCABULARY, target.final_norm, num_heads=3), random_batch(1, 9)
    draft.initialise(target)
    with torch.no_grad():
        last = batch.features[0, :8, 1].float()
        normed = torch.nn.functional.rms_norm(last, (32,), target.final_norm, draft.config.rms_norm_eps)
        expected = normed @ target.head_weight.T
        for step, hidden in enumerate(draft.unroll(batch, 3).hidden):
            found = draft.head(hidden[0])
            torch.testing.assert_close(found, expected[: 8 - step, VOCABULARY], rtol=0.05, atol=0.05)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_export_round_trip(target: FrozenTarget, tmp_path: Path, num_layers: int) -> None:
    draft = medusa(target, num_layers)
    export_draft(draft, target.folder, tmp_path, card="")
    loaded = load_draft(tmp_path, target)
    assert isinstance(loaded, MedusaDraft)
    assert (loaded.positions, loaded.num_blocks) == (HEADS, num_layers)
    assert torch.equal(loaded.target_norm, target.final_norm)
    for (name, value), (_, again) in zip(draft.named_parameters(), loaded.named_parameters(), strict=True):
        assert (value - again).abs().max().item() <= 0.005 * value.abs().max().item(), name


def test_the_keys_of_the_layout_are_those_that_other_engines_take(target: FrozenTarget, tmp_path: Path) -> None:
    """Every key with `num` and `heads` counts as the number of heads there, and with `layers` as that of blocks."""
    export_draft(medusa(target, 2), target.folder, tmp_path, card="")
    config = json.loads((tmp_path / "config.json").read_text())
    assert {key: value for key, value in config.items() if "num" in key} == {
        "medusa_num_heads": HEADS,
        "medusa_num_layers": 2,
    }
    assert (config["model_type"], config["truncated_vocab_size"], config["vocab_size"]) == ("medusa", 60, VOCAB)


def test_drafts_of_another_kind_or_target_are_refused(target: FrozenTarget, tmp_path: Path) -> None:
    export_draft(medusa(target), target.folder, tmp_path / "a", card="")
    with pytest.raises(DraftMismatchError, match="start_from"):
        start_from(medusa(target, num_heads=3), tmp_path / "a", target)
    with pytest.raises(ValueError, match="int8: the public layout of medusa"):
        export_draft(medusa(target), target.folder, tmp_path / "b", card="", int8=True)
    with pytest.raises(ValueError, match="heads: 1 given"):
        medusa(target, num_heads=1)
    other = open_target(write_target(tmp_path / "other", vocab_size=64))
    with pytest.raises(DraftMismatchError, match="vocab_size: the draft was made for 96"):
        load_draft(tmp_path / "a", other)
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    (tmp_path / "a" / "config.json").write_text(json.dumps(config | {"original_lm_head": False}))
    with pytest.raises(ConfigError, match="share their output layer"):
        load_draft(tmp_path / "a", target)


def test_training_continues_from_a_draft(target: FrozenTarget, tmp_path: Path) -> None:
    earlier = medusa(target)
    export_draft(earlier, target.folder, tmp_path, card="")
    draft = MedusaDraft(target.config, torch.arange(3, 80), target.final_norm, num_heads=HEADS)
    start_from(draft, tmp_path, target)
    torch.testing.assert_close(draft.head.weight[:60], earlier.head.weight, rtol=0.01, atol=0.01)
    assert isinstance(draft.layers[2], torch.nn.ModuleList)
    again = dict(draft.named_parameters())["layers.2.0.weight"]
    torch.testing.assert_close(again, dict(earlier.named_parameters())["layers.2.0.weight"], rtol=0.01, atol=0.01)


def test_features_that_end_before_the_last_layer_are_refused(target: FrozenTarget, tmp_path: Path) -> None:
    shards = write_shards(target, tmp_path / "data", count=4, shard_tokens=1000)
    check_last_layer(target, shards)
    meta = json.loads((shards[0] / "meta.json").read_text())
    (shards[0] / "meta.json").write_text(json.dumps(meta | {"feature_layers": [0]}))
    with pytest.raises(ConfigError, match=r"feature_layers: \(0,\) given; Medusa heads read layer 1"):
        check_last_layer(target, shards)
    target = FrozenTarget(target.folder, feature_layers=(0,), dtype=torch.float32)
    with pytest.raises(ConfigError, match="Medusa heads read layer 1"):
        check_last_layer(target, [])


def test_heads_are_compared_with_drafts_that_read_more_layers() -> None:
    heads = {"model_type": "medusa", "feature_layers": [29]}
    eagle, plain = {"feature_layers": [4, 14, 29]}, {"architecture": "draft_model"}
    assert tapped_layers([heads, plain]) == [(29,)]
    assert tapped_layers([heads, eagle, heads]) == [(4, 14, 29)]
    assert tapped_layers([heads, {"feature_layers": [4, 14, 28]}]) == [(4, 14, 28), (29,)]
    assert tapped_layers([{"feature_layers": [29]}, eagle]) == [(4, 14, 29), (29,)]


def test_options_of_other_architectures_are_refused() -> None:
    check_architecture("medusa", heads=3, parallel=None, int8=False)
    for architecture, heads, message in (("eagle", 3, "heads: 3 given"), ("medusa", 1, "heads: 1 given")):
        with pytest.raises(ConfigError, match=message):
            check_architecture(architecture, heads=heads, parallel=None, int8=False)
    with pytest.raises(ConfigError, match="int8"):
        check_architecture("medusa", heads=None, parallel=None, int8=True)
    with pytest.raises(ConfigError, match="parallel: 3 given with --architecture medusa"):
        check_architecture("medusa", heads=None, parallel=3, int8=False)
    assert trained_steps("medusa", heads=3, parallel=None, unroll=2) == 3
    assert trained_steps("eagle", heads=None, parallel=None, unroll=2) == 2


@pytest.mark.parametrize(("k", "num_passes"), [(1, 1), (HEADS, 1), (HEADS + 1, 2)])
def test_a_step_costs_one_pass_up_to_the_number_of_heads(target: FrozenTarget, k: int, num_passes: int) -> None:
    target = FrozenTarget(target.folder, feature_layers=(0, 1), dtype=torch.float32, max_len=2 * CONTEXT)
    assert measure(target, medusa(target), k, repeats=1).num_passes == num_passes


def test_every_head_learns_its_own_distance(target: FrozenTarget, tmp_path: Path) -> None:
    """A made-up target that counts in sevens: its hidden state says which token comes at any distance."""
    period, length = 24, 40
    torch.manual_seed(2)
    states = torch.randn(VOCAB, 1, 32).bfloat16().view(torch.uint16).numpy()
    writer = ShardWriter(tmp_path / "data", "made", {}, shard_tokens=2000)
    for start in range(200):
        tokens = (3 + (7 * (start + np.arange(length))) % period).astype(np.uint16)
        following = (3 + (tokens - 3 + 7) % period).astype(np.uint16)
        others = 3 + (following[:, None] - 3 + np.arange(period)) % period
        logprobs = np.log(np.full((length, period), 0.1 / (period - 1), np.float16))
        logprobs[:, 0] = np.log(0.9)
        document = Document(
            *("made", tokens, np.ones(length, np.uint8), states[tokens]), others.astype(np.uint16), logprobs
        )
        writer.add(document)
    writer.flush()
    shards = shard_paths([tmp_path / "data"])
    draft = MedusaDraft(target.config, torch.arange(3, 63), torch.ones(32), num_heads=3)
    draft.initialise(target)
    config = TrainConfig(
        steps=3, chain_every=1, row_len=64, batch_tokens=512, lr=1e-2, muon_lr=0.03, budget_tokens=60_000, average=0.9
    )
    before = evaluate(draft, shards[:1], k=3)["all"]
    skip = frozenset({shards[0].name})
    train(draft, [tmp_path / "data"], tmp_path / "train", config, skip=skip, compute_dtype=torch.float32)
    after = evaluate(draft, shards[:1], k=3)["all"]
    assert before.tokens_per_step < 1.5
    assert min(after.per_position) > 0.9
    assert after.tokens_per_step > 3.5
