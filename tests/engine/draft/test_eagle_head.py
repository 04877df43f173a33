"""An exported EAGLE draft in the engine: it has the distribution of the trained module, and misfits are refused.

The slow twin runs the trained module over the whole text for each drafted token, without a cache.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distill_fakes import VOCAB, open_target, write_target
from eagle_requests import NUM_DRAFTED, features_of, make_proposer, request_row
from one_forward import check_output
from safetensors.torch import load_file, save_file
from tiny_eagle import DRAFT_VOCAB, write_eagle

from deployments.cluster.drafts import resolve_draft, with_draft
from deployments.settings import AppSettings
from distill.models.decoder import rms_norm, rope_tables
from distill.models.eagle import EagleDraft
from distill.models.export import load_draft as load_trained
from engine.checkpoint.draft_check import check_draft
from engine.checkpoint.store import resolve_model
from engine.errors import ConfigError
from engine.model.load import load_draft


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def draft_folder(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_eagle(target_folder, tmp_path_factory.mktemp("draft"))


def distributions_along(
    draft: EagleDraft, tokens: list[int], num_known: int, features: torch.Tensor
) -> list[torch.Tensor]:
    """The draft's distributions of the tokens after the first `num_known` ones.

    Args:
        tokens: [T] known tokens, then drafted ones.
        features: [num_known - 1, width].
    """
    eps, hidden = draft.config.rms_norm_eps, draft.config.hidden_size
    cos, sin = (table[None, :, None] for table in rope_tables(draft.config, len(tokens) + 1, torch.device("cpu")))
    normed = F.rms_norm(features.view(num_known - 1, -1, hidden), (hidden,), eps=eps) * draft.feature_norm
    sources = list(draft.fuse(normed.flatten(1)))
    distributions = []
    for known in range(num_known, len(tokens) + 1):
        embedded = draft.token(rms_norm(draft.embed[torch.tensor(tokens[1:known])], draft.token_norm, eps))
        x = (torch.stack(sources) + embedded)[None]
        for layer in draft.layers:
            x = layer(x, cos[:, 1:known], sin[:, 1:known], [])
        distributions.append(draft.head(rms_norm(x[0, -1], draft.final_norm, eps)).softmax(-1))
        sources.append(draft.carry(rms_norm(x[0, -1], draft.carry_norm, eps)))
    return distributions


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("chunk", [3, 40], ids=["bit by bit", "at once"])
@torch.no_grad()
def test_drafts_have_the_trained_distributions(
    target_folder: Path, tmp_path: Path, num_layers: int, chunk: int
) -> None:
    """Several requests at once, sent in chunks, with drafts in between that are discarded."""
    folder = write_eagle(target_folder, tmp_path, num_layers=num_layers)
    proposer = make_proposer(folder, target_folder)
    trained = load_trained(folder, open_target(target_folder))
    assert isinstance(trained, EagleDraft)
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
                rows.append(
                    request_row(
                        key, start, text[start : start + chunk], feature_rows[start : start + chunk], temperature=1.0
                    )
                )
        for row_index, (row, response_row) in enumerate(
            zip(rows, proposer.propose(rows, (), probs, ring), strict=True)
        ):
            num_known = start + len(row.new_tokens)
            tokens = texts[row.key][:num_known] + list(response_row.token_ids)
            distributions = distributions_along(trained, tokens, num_known, features[row.key][: num_known - 1])
            torch.testing.assert_close(probs[row_index], torch.stack(distributions[:-1]), rtol=2e-3, atol=1e-5)
            assert response_row.confidences == pytest.approx(
                [distribution.max().item() for distribution in distributions[:-1]], abs=1e-4
            )
            checked += len(response_row.token_ids)
    assert checked == NUM_DRAFTED * (3 if chunk == 40 else 7 + 13 + 1)


def test_a_shared_prefix_is_computed_once_and_drafts_are_the_same(target_folder: Path, draft_folder: Path) -> None:
    text = torch.randint(3, VOCAB, (50,), generator=torch.Generator().manual_seed(2)).tolist()
    ring = features_of(target_folder, draft_folder, text)
    feature_rows = [-1, *range(49)]
    proposer = make_proposer(draft_folder, target_folder)
    probs = torch.zeros(1, NUM_DRAFTED, len(DRAFT_VOCAB))
    (first,) = proposer.propose([request_row(1, 0, text, feature_rows)], (), probs, ring)
    # The target found 32 tokens in its own cache: it has features from there on only.
    (second,) = proposer.propose([request_row(2, 0, text, [-1] * 33 + feature_rows[33:])], (1,), probs, ring)
    (alone,) = make_proposer(draft_folder, target_folder).propose(
        [request_row(3, 0, text, [-1] * 33 + feature_rows[33:])], (), probs, ring
    )
    assert first.token_ids == second.token_ids
    assert first.confidences == pytest.approx(second.confidences, abs=1e-5)
    assert first.confidences != pytest.approx(alone.confidences, abs=1e-5), "without the prefix it knows less"
    assert len(alone.token_ids) == NUM_DRAFTED


def test_without_features_of_the_last_token_nothing_is_drafted(target_folder: Path, draft_folder: Path) -> None:
    proposer = make_proposer(draft_folder, target_folder)
    probs = torch.zeros(1, NUM_DRAFTED, len(DRAFT_VOCAB))
    (response_row,) = proposer.propose([request_row(1, 0, [5, 6, 7], [-1, 0, -1])], (), probs, torch.zeros(4, 64))
    assert (response_row.token_ids, response_row.reason) == ((), "catch_up")


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "tp1": {},
    "tp2": {"tensor_parallel_size": 2},
    "no prefix cache": {"prefix_cache": False},
    "small steps": {"max_step_tokens": 16, "max_num_requests": 4},
    "preempting": {"kv_cache_tokens": 160, "max_model_len": 112, "prefix_cache": False, "tensor_parallel_size": 2},
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_output_is_the_same_as_without_a_draft(target_folder: Path, draft_folder: Path, name: str) -> None:
    engine = check_output(target_folder, draft_folder, CONFIGURATIONS[name])
    assert sum(stats.num_accepted for stats in engine.stats) > 5
    if name == "preempting":
        assert engine.num_preempted > 0


def test_int8_weights_are_read(target_folder: Path, draft_folder: Path, tmp_path: Path) -> None:
    exact = load_draft(draft_folder, target_folder, dtype=torch.float32)
    rounded = load_draft(write_eagle(target_folder, tmp_path, int8=True), target_folder, dtype=torch.float32)
    assert exact.head is not None
    assert rounded.head is not None
    x, features = torch.randn(4, 32), torch.randn(4, 64)
    ours, theirs = (head.committed_inputs(head.project_tokens(x), features) for head in (exact.head, rounded.head))
    assert 0 < (ours - theirs).abs().max() < 0.05 * ours.abs().max()


def changed_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        target = config["target"] | changes.pop("target", {})
        (folder / "config.json").write_text(json.dumps(config | changes | {"target": target}))

    return change


def changed_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        save_file({**tensors, name: change(tensors[name])}, folder / "model.safetensors")

    return changed


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (changed_config(target={"vocabulary_sha256": "abc"}), r"target\.vocabulary_sha256: .*'abc', the target has ''"),
        (changed_config(target={"num_hidden_layers": 30}), r"target\.num_hidden_layers: .* 30, the target has 2"),
        (changed_config(vocab_size=128), r"vocab_size: .* 128, the target has 96"),
        (changed_config(hidden_size=64), r"hidden_size: .* 64, the target has 32"),
        (changed_config(feature_layers=[0, 7]), r"feature_layers: it reads layers \[0, 7\], the target has 0 to 1"),
        (changed_config(feature_layers=[1, 0]), r"feature_layers: \[1, 0\] given, allowed is an ascending list"),
        (changed_config(feature_layers=[1]), r"eagle\.fuse\.weight has shape \[32, 64\], but .* implies \[32, 32\]"),
        (changed_config(architecture="hydra"), r"architecture: 'hydra' is not supported"),
        (
            changed_tensor("draft_vocab", lambda ids: ids + 20),
            r"draft_vocab .* within \[0, 96\), given are 47 from 23 to 115",
        ),
        (changed_tensor("draft_vocab", lambda ids: ids * 0), r"draft_vocab must hold distinct"),
        (changed_tensor("eagle.carry.weight", lambda w: w[:5]), r"eagle\.carry\.weight has shape \[5, 32\]"),
    ],
)
def test_a_draft_that_does_not_fit_is_refused(
    target_folder: Path, draft_folder: Path, tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    folder = tmp_path / "draft"
    shutil.copytree(draft_folder, folder)
    spoil(folder)
    with pytest.raises(ConfigError, match=message):
        load_draft(folder, target_folder)


def test_the_folder_says_which_method_it_is(target_folder: Path, draft_folder: Path) -> None:
    def settings(**speculative: Any) -> AppSettings:
        return AppSettings.parse({"engine": {"model": "m", "speculative": speculative}})

    chosen, folder = with_draft(settings(draft=str(draft_folder)), target_folder)
    assert (chosen.engine.speculative.method, folder) == ("eagle", draft_folder)
    chosen, _ = with_draft(settings(draft=str(target_folder)), target_folder)
    assert chosen.engine.speculative.method == "draft_model"
    assert with_draft(settings(method="ngram"), target_folder) == (settings(method="ngram"), None)
    with pytest.raises(ConfigError, match=r"speculative\.method: eagle given, but .* holds a draft_model"):
        with_draft(settings(method="eagle", draft=str(target_folder)), target_folder)


def test_the_shipped_draft_fits_the_default_model() -> None:
    config = check_draft(resolve_draft("smollm2-eagle"), resolve_model("smollm2"))
    assert config.architecture == "eagle"
