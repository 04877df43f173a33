"""Medusa heads against an independent computation, from folders in either public layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from distill_fakes import VOCAB, open_target, write_target
from medusa_folders import DRAFT_VOCAB, HEADS, HIDDEN, authors_tensors, vllm_tensors, write_authors, write_vllm
from safetensors.torch import load_file, save_file

from distill.models.export import export_draft
from distill.models.medusa import MedusaDraft
from engine.checkpoint.draft_check import check_draft
from engine.checkpoint.store import resolve_model
from engine.errors import ConfigError
from engine.medusa.heads import MedusaHeads, load_heads
from engine.model.load import load_draft, load_model


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_target(tmp_path_factory.mktemp("target"))
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(4)
    tensors["model.norm.weight"] = torch.rand(HIDDEN) + 0.5  # A norm of ones would hide where it is missing.
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def load(folder: Path, target_folder: Path, **options: Any) -> MedusaHeads:
    return load_heads(folder, target_folder, **({"dtype": torch.float32} | options))


def hidden_states(target_folder: Path, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, H] of `transformers`: the output of the last layer, and the same after the final norm."""
    model = transformers.LlamaForCausalLM.from_pretrained(target_folder).float().eval()
    seen: list[torch.Tensor] = []
    handle = model.model.layers[-1].register_forward_hook(
        lambda _, __, output: seen.append(output[0] if isinstance(output, tuple) else output)
    )
    with torch.no_grad():
        final = model.model(torch.tensor([tokens])).last_hidden_state[0]
    handle.remove()
    return seen[0].reshape(len(tokens), -1), final


def published(tensors: dict[str, torch.Tensor], final: torch.Tensor, head: int, num_blocks: int) -> torch.Tensor:
    """Logits of a head by the names of the authors' layout, from the target's normed hidden states."""
    z = final.double()
    for block in range(num_blocks):
        y = z @ tensors[f"{head}.{block}.linear.weight"].double().T + tensors[f"{head}.{block}.linear.bias"].double()
        z = z + y * torch.sigmoid(y)
    return z @ tensors[f"{head}.{num_blocks}.weight"].double().T


@pytest.mark.parametrize("num_blocks", [1, 2])
@pytest.mark.parametrize("counts", [[3, 3, 3], [1, 3, 2], [1, 1, 1]])
def test_heads_of_the_authors_layout_give_the_published_logits(
    target_folder: Path, tmp_path: Path, num_blocks: int, counts: list[int]
) -> None:
    """Rows need different numbers of heads; all logits of a row come one after another."""
    tensors = authors_tensors(num_blocks)
    heads = load(write_authors(tmp_path, tensors, num_blocks), target_folder)
    features, final = hidden_states(target_folder, [5, 9, 70])
    found = heads.logits(features, np.array(counts, dtype=np.int64))
    expected = torch.cat(
        [
            published(tensors, final[row : row + 1], head, num_blocks)
            for row, count in enumerate(counts)
            for head in range(count)
        ]
    )
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    assert heads.logits(features[:0], np.zeros(0, dtype=np.int64)).shape == (0, VOCAB)


@pytest.mark.parametrize("has_biases", [False, True])
@pytest.mark.parametrize("shares_output", [False, True])
@pytest.mark.parametrize("reduced", ["no", "map", "rows of all tokens"])
def test_heads_of_the_converted_layout(
    target_folder: Path, tmp_path: Path, has_biases: bool, shares_output: bool, reduced: str
) -> None:
    tensors = vllm_tensors(has_biases=has_biases, shares_output=shares_output, reduced=reduced)
    heads = load(write_vllm(tmp_path, tensors, shares_output=shares_output, reduced=reduced != "no"), target_folder)
    features, final = hidden_states(target_folder, [5, 9, 70])
    found = heads.logits(features, np.full(3, HEADS))
    columns = torch.arange(VOCAB) if reduced == "no" else DRAFT_VOCAB
    assert heads.draft_vocab is None if reduced == "no" else torch.equal(heads.draft_vocab, DRAFT_VOCAB)  # type: ignore[arg-type]
    for head in range(HEADS):
        y = final @ tensors[f"blocks.{head}.layers.0.weight"].T
        y = y + tensors.get(f"blocks.{head}.layers.0.bias", torch.zeros(HIDDEN))
        output = tensors["lm_heads.0.weight" if shares_output else f"lm_heads.{head}.weight"]
        output = output[columns] if len(output) == VOCAB else output
        torch.testing.assert_close(found[head::HEADS], (final + y * y.sigmoid()) @ output.T, rtol=1e-4, atol=1e-4)


def test_both_layouts_of_the_same_heads_are_equal(target_folder: Path, tmp_path: Path) -> None:
    tensors = authors_tensors(1)
    renamed = {}
    for name, tensor in tensors.items():
        head, _, rest = name.split(".", 2)
        renamed[f"blocks.{head}.layers.0.{rest[7:]}" if "linear" in name else f"lm_heads.{head}.weight"] = tensor
    one = load(write_authors(tmp_path / "a", tensors, 1), target_folder)
    other = load(write_vllm(tmp_path / "b", renamed, shares_output=False, reduced=False), target_folder)
    features = torch.randn(4, HIDDEN)
    counts = np.array([1, 3, 2, 3])
    assert torch.equal(one.logits(features, counts), other.logits(features, counts))


def test_bfloat16_with_fast_layers_is_near_the_reference(target_folder: Path, tmp_path: Path) -> None:
    folder = write_authors(tmp_path, authors_tensors(1), 1)
    exact = load(folder, target_folder, kernel="reference")
    fast = load(folder, target_folder, dtype=torch.bfloat16)
    features, counts = torch.randn(6, HIDDEN), np.array([1, 2, 3, 3, 1, 2])
    expected, found = exact.logits(features, counts), fast.logits(features.bfloat16(), counts)
    assert (found - expected).abs().max() < 0.03 * expected.abs().max()
    assert fast.num_bytes * 2 == exact.num_bytes == 4 * sum(t.numel() for t in authors_tensors(1).values())


def test_trained_heads_serve_what_they_were_trained_to(target_folder: Path, tmp_path: Path) -> None:
    """The forward of training and the one that serves, over the same features."""
    target = open_target(target_folder)
    torch.manual_seed(3)
    draft = MedusaDraft(target.config, DRAFT_VOCAB, target.final_norm, num_heads=HEADS, num_layers=2)
    draft.initialise(target)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_((parameter + 0.1 * torch.randn_like(parameter)).bfloat16())  # As it is stored.
    export_draft(draft, target_folder, tmp_path, card="")
    features, _ = hidden_states(target_folder, [5, 9, 70, 11])
    normed = torch.nn.functional.rms_norm(features, (HIDDEN,), target.final_norm, target.config.rms_norm_eps)
    with torch.no_grad():
        expected = torch.stack([draft.head(draft.state(normed, head)) for head in range(HEADS)], dim=1)
    found = load(tmp_path, target_folder).logits(features, np.full(4, HEADS))
    torch.testing.assert_close(found, expected.flatten(0, 1), rtol=1e-4, atol=1e-4)


def test_the_target_gives_what_a_config_leaves_out(target_folder: Path, tmp_path: Path) -> None:
    config = check_draft(write_authors(tmp_path, authors_tensors(1), 1), target_folder)
    assert (config.architecture, config.feature_layers, config.max_model_len) == ("medusa", (1,), 512)
    assert (config.hidden_size, config.vocab_size, config.positions_per_pass) == (HIDDEN, VOCAB, HEADS)
    assert resolve_model(str(tmp_path)) == tmp_path.resolve()


def changed(**config: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        values = json.loads((folder / "config.json").read_text()) | config
        (folder / "config.json").write_text(json.dumps({key: v for key, v in values.items() if v is not ...}))

    return spoil


def tensor(name: str, value: torch.Tensor | None) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = {key: kept for key, kept in load_file(path).items() if key != name}
        save_file(tensors if value is None else tensors | {name: value}, path)

    return spoil


def as_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "medusa_lm_head.pt")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (changed(medusa_num_heads=1), "medusa_num_heads: 1 given; allowed are whole numbers from 2"),
        (changed(medusa_num_heads="3"), "medusa_num_heads: '3' is not a whole number"),
        (changed(medusa_num_heads=4), "lacks tensor blocks.3.layers.0.weight"),
        (changed(medusa_num_heads=2), "holds 1 tensors that config.json does not imply: blocks.2.layers.0.weight"),
        (changed(medusa_num_layers=2), "lacks tensor blocks.0.layers.1.weight"),
        (changed(medusa_fc_bias=True), "lacks tensor blocks.0.layers.0.bias"),
        (changed(medusa_fc_bias="yes"), "medusa_fc_bias: 'yes' is neither true nor false"),
        (changed(original_lm_head=False), "lacks tensor lm_heads.1.weight"),
        (changed(hidden_size=64), "hidden_size: the draft was made for 64, the target has 32"),
        (changed(vocab_size=97), "vocab_size: the draft was made for 97, the target has 96"),
        (changed(truncated_vocab_size=40), r"token_map has shape \[47\], but config.json implies \[40\]"),
        (changed(target={"num_hidden_layers": 30}), r"target\.num_hidden_layers: .* 30, the target has 2"),
        (tensor("token_map", None), "lacks tensor token_map"),
        (tensor("token_map", DRAFT_VOCAB * 0), "token_map must hold distinct token ids"),
        (tensor("token_map", DRAFT_VOCAB.float()), "token_map is of type torch.float32"),
        (tensor("lm_heads.0.weight", torch.zeros(5, HIDDEN)), r"lm_heads.0.weight has shape \[5, 32\]"),
        (as_pickle, r"in medusa_lm_head.pt, which would have to be unpickled. Write medusa_lm_head.safetensors"),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    target_folder: Path, tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    tensors = vllm_tensors(has_biases=False, shares_output=True, reduced="map")
    write_vllm(tmp_path, tensors, shares_output=True, reduced=True)
    load(tmp_path, target_folder)
    spoil(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, target_folder)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((48, VOCAB), "hidden_size: the heads were made for 48, the target has 32"),
        ((HIDDEN, 100), "vocab_size: the heads were made for 100, the target has 96"),
    ],
)
def test_heads_of_another_target_are_refused_where_the_config_names_no_size(
    target_folder: Path, tmp_path: Path, size: tuple[int, int], message: str
) -> None:
    folder = write_authors(tmp_path, authors_tensors(1, hidden=size[0], vocab=size[1]), 1)
    with pytest.raises(ConfigError, match=message):
        load(folder, target_folder)


def test_heads_are_no_model_and_models_are_no_heads(target_folder: Path, tmp_path: Path) -> None:
    folder = write_vllm(tmp_path, vllm_tensors(), shares_output=False, reduced=False)
    for wrong in (lambda: load_model(folder), lambda: load_draft(folder, target_folder)):
        with pytest.raises(ConfigError, match="holds Medusa heads, which are a draft and no model"):
            wrong()
    with pytest.raises(ConfigError, match="holds Medusa heads, which are a draft and no model"):
        check_draft(target_folder, folder)
    with pytest.raises(ConfigError, match="holds no Medusa heads"):
        load(target_folder, target_folder)
