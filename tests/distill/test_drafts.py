"""Unrolled chains equal chains run one by one; drafts are read back as written and refuse other targets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from distill_fakes import open_target, random_batch, write_target
from eagle3_reference import PublicHead, reference_logits
from safetensors.torch import load_file

from distill.data.shards import Batch
from distill.models.decoder import FrozenTarget, rms_norm, rope_tables
from distill.models.draft_model import SmallDraft
from distill.models.eagle import EagleDraft
from distill.models.eagle3 import Eagle3Draft
from distill.models.export import AnyDraft, DraftMismatchError, export_draft, load_draft, quantise_rows, start_from

VOCABULARY = torch.arange(3, 63)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> FrozenTarget:
    return open_target(write_target(tmp_path_factory.mktemp("target")))


def eagle(target: FrozenTarget, num_layers: int) -> EagleDraft:
    torch.manual_seed(num_layers)
    draft = EagleDraft(target.config, (0, 1), VOCABULARY, target.embed, num_layers=num_layers)
    for parameter in draft.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return draft


def chain_alone(draft: EagleDraft, batch: Batch, root: int, steps: int) -> list[torch.Tensor]:
    """The chain of one root of row 0, run as in serving: all tokens so far are one causal sequence."""
    eps = draft.config.rms_norm_eps
    features = F.rms_norm(batch.features[:1].float(), (32,), eps=eps) * draft.feature_norm
    tokens = draft.token(rms_norm(draft.embed[batch.tokens[:1]], draft.token_norm, eps))
    inputs = (draft.fuse(features.flatten(2))[:, :-1] + tokens[:, 1:])[:, : root + 1]
    found = []
    for step in range(steps):
        cos, sin = (t[1 : 1 + inputs.shape[1]][None, :, None] for t in rope_tables(draft.config, 64, inputs.device))
        x = inputs
        for layer in draft.layers:
            x = layer(x, cos, sin, [])
        found.append(rms_norm(x[0, -1], draft.final_norm, eps))
        following = (
            draft.carry(rms_norm(x[:, -1:], draft.carry_norm, eps)) + tokens[:, root + 2 + step : root + 3 + step]
        )
        inputs = torch.cat((inputs, following), dim=1)
    return found


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("first_root", [0, 4])
def test_unrolled_chains_equal_chains_run_alone(target: FrozenTarget, num_layers: int, first_root: int) -> None:
    draft, batch, steps = eagle(target, num_layers), random_batch(2, 14), 4
    with torch.no_grad():
        unrolled = draft.unroll(batch, steps, first_root).hidden
        for root in (first_root, 6, 9):
            alone = chain_alone(draft, batch, root, steps)
            for step in range(steps):
                torch.testing.assert_close(unrolled[step][0, root - first_root], alone[step], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("offset", [0, 1, 2])
@pytest.mark.parametrize("length", [4, 5, 14])
def test_sampled_chains_are_those_of_all_roots(target: FrozenTarget, length: int, offset: int) -> None:
    batch = random_batch(2, length)
    for draft in (eagle(target, 2), SmallDraft(target.config, VOCABULARY, target.embed, num_layers=1)):
        with torch.no_grad():
            first, *later = draft.unroll(batch, 3).hidden
            sampled, *sampled_later = draft.unroll(batch, 3, offset, every=3).hidden
        torch.testing.assert_close(sampled, first)
        for all_roots, some in zip(later, sampled_later, strict=False):
            torch.testing.assert_close(some, all_roots[:, offset::3])


def test_chains_never_see_later_features_or_tokens(target: FrozenTarget) -> None:
    draft, batch, root = eagle(target, 1), random_batch(1, 14), 5
    tokens, features = batch.tokens.clone(), batch.features.clone()
    features[:, root + 1 :] += 1
    with torch.no_grad():
        for step, before in enumerate(draft.unroll(batch, 3).hidden):
            changed = tokens.clone()
            changed[:, root + 2 + step :] = 0
            after = draft.unroll(Batch(changed, features, batch.top_ids, batch.top_logprobs, batch.weight), 3).hidden[
                step
            ]
            torch.testing.assert_close(before[0, root], after[0, root])


def test_unrolling_ends_with_the_row(target: FrozenTarget) -> None:
    found = eagle(target, 1).unroll(random_batch(1, 4), 8)
    assert [hidden.shape[1] for hidden in found.hidden] == [3, 2, 1]


def test_feature_errors_vanish_where_the_replacement_is_right(target: FrozenTarget) -> None:
    """With `carry` zeroed the replacement is zero and the relative error one; every root has one error per step."""
    draft, batch = eagle(target, 1), random_batch(2, 8)
    with torch.no_grad():
        draft.carry.weight.zero_()
        errors = draft.unroll(batch, 3).feature_errors
    assert [tuple(error.shape) for error in errors] == [(2, 7), (2, 6), (2, 5)]
    for error in errors:
        torch.testing.assert_close(error, torch.ones_like(error))


def test_small_draft_steps_are_its_causal_outputs(target: FrozenTarget) -> None:
    draft, batch = SmallDraft(target.config, VOCABULARY, target.embed, num_layers=2), random_batch(1, 10)
    with torch.no_grad():
        first, second, third = draft.unroll(batch, 3).hidden
        (later,) = draft.unroll(batch, 1, first_root=4).hidden
    torch.testing.assert_close(first[:, 2:], third)
    torch.testing.assert_close(first[:, 1:], second)
    torch.testing.assert_close(first[:, 4:], later)


def test_initialised_small_draft_of_all_layers_is_the_target(target: FrozenTarget) -> None:
    draft, batch = SmallDraft(target.config, VOCABULARY, target.embed, num_layers=2), random_batch(1, 10)
    draft.initialise(target)
    with torch.no_grad():
        logits = draft.head(draft.unroll(batch, 1).hidden[0])
    from distill.models.decoder import causal_attend

    last = target.forward(batch.tokens, torch.arange(10)[None], causal_attend)
    torch.testing.assert_close(logits, target.logits(last)[:, 1:, VOCABULARY], rtol=1e-4, atol=1e-4)


def eagle3(target: FrozenTarget, num_layers: int) -> Eagle3Draft:
    torch.manual_seed(3)
    draft = Eagle3Draft(target.config, (0, 1), VOCABULARY, target.embed, num_layers=num_layers)
    draft.initialise(target, residual_size=2.0)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return draft


@pytest.mark.parametrize("num_layers", [1, 2])
def test_an_eagle3_draft_is_what_the_public_format_defines(
    target: FrozenTarget, tmp_path: Path, num_layers: int
) -> None:
    """The exported tensors and options, in a plain implementation of the format, give the logits of the module."""
    draft = eagle3(target, num_layers)
    export_draft(draft, target.folder, tmp_path, card="")
    config = json.loads((tmp_path / "config.json").read_text())
    tensors = load_file(tmp_path / "model.safetensors")
    ids = tensors["d2t"] + torch.arange(len(VOCABULARY))
    assert ids.tolist() == VOCABULARY.tolist() == tensors["t2d"].nonzero()[:, 0].tolist()
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2]
    layer = config["transformer_layer_config"]
    head = PublicHead(layer, config, ids, {name: tensor.float() for name, tensor in tensors.items()})
    loaded, batch = load_draft(tmp_path, target), random_batch(1, 14)
    tokens, known = batch.tokens[0].tolist(), 10
    features = batch.features[0].flatten(1).float()
    expected = reference_logits(head, target.embed.float(), tokens[: known + 3], known, features[: known - 1])
    with torch.inference_mode():
        found = [loaded.head(hidden[0, known - 2]) for hidden in loaded.unroll(batch, 4).hidden]
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-4, atol=1e-5)


def test_eagle3_drafts_are_not_stored_as_int8(target: FrozenTarget, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="int8: the public layout"):
        export_draft(eagle3(target, 1), target.folder, tmp_path, card="", int8=True)


@pytest.mark.parametrize(
    ("architecture", "int8"),
    [("eagle", False), ("eagle", True), ("draft_model", False), ("draft_model", True), ("eagle3", False)],
)
def test_export_round_trip(target: FrozenTarget, tmp_path: Path, architecture: str, int8: bool) -> None:
    drafts: dict[str, Callable[[], AnyDraft]] = {
        "eagle": lambda: eagle(target, 2),
        "eagle3": lambda: eagle3(target, 2),
        "draft_model": lambda: SmallDraft(target.config, VOCABULARY, target.embed, num_layers=2),
    }
    draft = drafts[architecture]()
    export_draft(draft, target.folder, tmp_path / "draft", card="# card\n", int8=int8)
    loaded = load_draft(tmp_path / "draft", target)
    assert type(loaded) is type(draft)
    assert loaded.vocabulary.draft_vocab.tolist() == VOCABULARY.tolist()
    for (name, value), (_, again) in zip(draft.named_parameters(), loaded.named_parameters(), strict=True):
        bound = 0.02 * value.abs().max().item() if int8 else 0.005 * value.abs().max().item()
        assert (value - again).abs().max().item() <= bound, name


def test_a_draft_starts_from_an_earlier_one(target: FrozenTarget, tmp_path: Path) -> None:
    earlier = eagle(target, 1)
    export_draft(earlier, target.folder, tmp_path / "earlier", card="")
    vocabulary = torch.cat([VOCABULARY[1:], torch.tensor([t for t in range(96) if t not in VOCABULARY.tolist()][:2])])
    wider = EagleDraft(target.config, target.feature_layers, vocabulary, target.embed, num_layers=1)
    start_from(wider, tmp_path / "earlier", target)
    assert torch.allclose(wider.fuse.weight, earlier.fuse.weight, atol=0.01)
    assert torch.allclose(wider.head.weight[:-2], earlier.head.weight[1:], atol=0.01)
    fresh, rows = wider.head.weight[-1], target.head_weight
    assert torch.allclose(fresh - 0.7 * (rows[vocabulary[-1]] - rows.mean(0)), earlier.head.weight.mean(0), atol=0.01)
    with pytest.raises(DraftMismatchError, match=r"start_from: .* is eagle of 1 layers, expected is eagle of 2"):
        start_from(eagle(target, 2), tmp_path / "earlier", target)


def test_quantised_rows_are_off_by_half_a_step_at_most() -> None:
    torch.manual_seed(0)
    weight = torch.randn(7, 33)
    values, scale = quantise_rows(weight)
    assert ((values * scale[:, None] - weight).abs() <= scale[:, None] * 0.5001).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 512}, "vocab_size: the draft was made for 512, the target has 96"),
        ({"target": {"vocabulary_sha256": "abc"}}, "vocabulary_sha256: the draft was made for 'abc'"),
        ({"feature_layers": [0]}, r"feature_layers: the draft needs \(0,\), the target yields \(0, 1\)"),
        ({"hidden_size": 64}, "hidden_size"),
    ],
)
def test_a_draft_of_another_target_is_refused(
    target: FrozenTarget, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    export_draft(eagle(target, 1), target.folder, tmp_path, card="")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(DraftMismatchError, match=message):
        load_draft(tmp_path, target)


def test_vocabulary_outside_the_target_is_refused(target: FrozenTarget) -> None:
    with pytest.raises(ValueError, match=r"draft_vocab: needs distinct tokens in 0\.\.95"):
        EagleDraft(target.config, (0, 1), torch.arange(90, 100), target.embed)
