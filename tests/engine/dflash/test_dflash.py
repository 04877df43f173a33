"""DFlash drafts in public layouts: one forward computes what the format defines, and the output stays exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dflash_reference import BLOCK_SIZE, PublicBlock, block_logits, make_block, write_block
from eagle_requests import NUM_DRAFTED, features_of, make_proposer, request_row
from fakes import RandomPacer
from local_engine import LocalEngine
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB, write_model

from engine.checkpoint.draft_check import check_draft
from engine.checkpoint.model_config import ModelConfig
from engine.core.step import ForwardInput
from engine.dflash.architecture import DFlashArchitecture
from engine.dflash.load import load_dflash
from engine.draft.messages import DraftRequestRow
from engine.errors import ConfigError, EngineError
from engine.messages import SamplingParams, Submit
from engine.model.attention import ReferenceAttention
from engine.model.attention_padded import PaddedAttention
from engine.model.device import KernelKind
from engine.sampling.row_sampling import RowSampling

NUM_LAYERS = 8
LAYERS = (1, 3, 5)
REDUCED = torch.arange(2, VOCAB, 2)
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "authors, tied target": ("authors", "llama", {}),
    "authors, target with a head": ("authors", "qwen3", {"num_hidden_layers": 3}),
    "authors, biased": ("authors", "llama", {"attention_bias": True}),
    "speculators, reduced": ("speculators", "llama", {"draft_vocab": REDUCED}),
    "speculators, whole": ("speculators", "qwen3", {"draft_vocab": torch.arange(VOCAB), "head_dim": 16}),
}


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("targets")
    return {name: write_model(folder / name, name, num_hidden_layers=NUM_LAYERS) for name in ("llama", "qwen3")}


def draft_for(targets: dict[str, Path], folder: Path, case: str) -> tuple[PublicBlock, Path, Path]:
    layout, family, options = CASES[case]
    block = make_block(targets[family], layers=LAYERS, **options)
    return block, targets[family], write_block(block, folder / "draft", layout)


def texts_and_features(target: Path, folder: Path) -> tuple[list[list[int]], list[torch.Tensor]]:
    seeded = torch.Generator().manual_seed(1)
    texts = [torch.randint(3, VOCAB, (length,), generator=seeded).tolist() for length in (21, 38, 2)]
    return texts, [features_of(target, folder, text) for text in texts]


@pytest.mark.parametrize("chunk", [5, 40], ids=["bit by bit", "at once"])
@pytest.mark.parametrize("case", CASES)
def test_one_forward_gives_the_distributions_of_the_format(
    targets: dict[str, Path], tmp_path: Path, case: str, chunk: int
) -> None:
    """Several requests at once, in chunks, with drafts in between whose blocks must leave no trace."""
    block, target, folder = draft_for(targets, tmp_path, case)
    texts, features = texts_and_features(target, folder)
    firsts, proposer = (0, 21, 59), make_proposer(folder, target)
    probs, checked = torch.zeros(3, NUM_DRAFTED, len(block.draft_vocab)), 0
    for start in range(0, 38, chunk):
        rows = []
        for key, text in enumerate(texts):
            feature_rows = [-1, *range(firsts[key], firsts[key] + len(text) - 1)]
            if start < len(text):
                part = slice(start, start + chunk)
                rows.append(request_row(key, start, text[part], feature_rows[part], temperature=1.0))
        response = proposer.propose(rows, (), probs, torch.cat(features))
        for index, (row, found) in enumerate(zip(rows, response, strict=True)):
            known = start + len(row.new_tokens)
            expected = block_logits(block, texts[row.key][:known], features[row.key][: known - 1]).softmax(-1)
            torch.testing.assert_close(probs[index], expected, rtol=2e-3, atol=1e-5)
            assert found.confidences == pytest.approx(expected.amax(-1).tolist(), abs=1e-4)
            assert set(found.token_ids) <= set(block.draft_vocab.tolist())
            checked += len(found.token_ids)
    assert NUM_DRAFTED == BLOCK_SIZE - 1
    assert checked == NUM_DRAFTED * (3 if chunk == 40 else 5 + 8 + 1)


def test_requests_with_different_k_share_a_forward(targets: dict[str, Path], tmp_path: Path) -> None:
    """The block is whole whatever K, so a short draft is the beginning of a long one; K = 0 computes the text only."""
    _, target, folder = draft_for(targets, tmp_path, "speculators, reduced")
    texts, features = texts_and_features(target, folder)
    ring, firsts = torch.cat(features), (0, 21, 59)
    found = {}
    for ks in ((9, 9, 9), (2, 0, 1)):
        rows = [
            DraftRequestRow(
                *(key, 0, tuple(text), k, RowSampling(0.0, 1.0, 3, 1, False)),
                feature_rows=(-1, *range(first, first + len(text) - 1)),
            )
            for key, (text, first, k) in enumerate(zip(texts, firsts, ks, strict=True))
        ]
        probs = torch.zeros(3, 9, len(REDUCED))
        found[ks] = [row.token_ids for row in make_proposer(folder, target).propose(rows, (), probs, ring)]
    whole, short = found.values()
    assert [len(tokens) for tokens in whole] == [BLOCK_SIZE - 1] * 3
    assert short == [whole[0][:2], (), whole[2][:1]]


@pytest.mark.parametrize("case", ["authors, tied target", "speculators, reduced"])
def test_output_is_the_same_as_without_a_draft(targets: dict[str, Path], tmp_path: Path, case: str) -> None:
    """Greedy and seeded, fp32, K random per step, several requests with a common beginning, twice."""
    _, target, folder = draft_for(targets, tmp_path, case)
    submits = [
        Submit(
            request_id=str(i),
            prompt=(*range(3, 24 + 3 * i), 5 + i),
            sampling=SamplingParams(temperature=0.0 if i % 2 else 0.9, seed=i, max_tokens=30),
        )
        for i in range(5)
    ]
    again = [Submit(request_id=f"{s.request_id}'", prompt=s.prompt, sampling=s.sampling) for s in submits]
    with LocalEngine(target) as engine:
        plain = engine.generate(submits)
    with LocalEngine(target, draft_folder=folder, pacer=RandomPacer(4, max_k=5), speculative={"k": 5}) as engine:
        assert engine.generate(submits) == plain
        assert list(engine.generate(again).values()) == list(plain.values())
        assert sum(stats.num_drafted for stats in engine.stats) > 100
        assert engine.leader.positions_per_pass == BLOCK_SIZE - 1  # The cost model counts passes by this.


def test_there_is_no_other_forward_than_that_of_a_block(targets: dict[str, Path], tmp_path: Path) -> None:
    _, target, folder = draft_for(targets, tmp_path, "authors, tied target")
    architecture = DFlashArchitecture(load_dflash(folder, target, dtype=torch.float32), [])
    nothing = np.zeros(0, dtype=np.int32)
    with pytest.raises(EngineError, match="no forward over drafted tokens"):
        architecture.compute_drafted(ForwardInput(*[nothing] * 7), None)
    with pytest.raises(EngineError, match="needs features for committed tokens"):
        architecture.compute_committed(ForwardInput(*[nothing] * 7), None)


@pytest.mark.parametrize(("kernel", "attention"), [("auto", PaddedAttention), ("reference", ReferenceAttention)])
def test_plain_operators_attend_where_the_reference_is_asked_for(
    targets: dict[str, Path], tmp_path: Path, kernel: KernelKind, attention: type
) -> None:
    _, target, folder = draft_for(targets, tmp_path, "authors, tied target")
    assert type(load_dflash(folder, target, dtype=torch.float32, kernel=kernel)._attention[0]) is attention


def test_a_target_that_scales_its_embeddings_is_refused(tmp_path: Path) -> None:
    target = write_model(tmp_path / "target", "gemma3_text")
    folder = write_block(make_block(target, layers=(0, 1)), tmp_path / "draft", "authors")
    with pytest.raises(ConfigError, match="of a target that scales its embeddings is not supported"):
        load_dflash(folder, target, dtype=torch.float32)


@pytest.mark.parametrize(("num_layers", "expected"), [(1, [18]), (3, [1, 17, 33]), (5, [1, 9, 17, 25, 33])])
def test_layers_are_evenly_spaced_where_none_are_named(
    targets: dict[str, Path], tmp_path: Path, num_layers: int, expected: list[int]
) -> None:
    """Of a target of 36 layers, as the authors' code spaces them."""
    block = make_block(targets["llama"], layers=LAYERS, num_hidden_layers=num_layers)
    changes = {"num_target_layers": 36, "dflash_config": {"mask_token_id": 5}}
    folder = write_block(block, tmp_path, "authors", **changes)
    assert list(ModelConfig.load(folder).feature_layers) == expected


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("authors", {"block_size": 1}, "block_size: 1 given, allowed are 2 to 64"),
    ("authors", {"block_size": None}, "block_size: missing"),
    ("authors", {"layer_types": ["sliding_attention"] * 2}, "layer_types: sliding_attention is not supported"),
    ("authors", {"dflash_config": {"mask_token_id": VOCAB}}, "mask_token_id: 97 is not a token id below vocab_size"),
    ("authors", {"dflash_config": {"target_layer_ids": [1, 3, 5]}}, "mask_token_id: None is not a token id"),
    (
        "authors",
        {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 3, 7]}},
        r"target_layer_ids: \[1, 3, 7\] has the target's last layer",
    ),
    ("authors", {"dflash_config": {"mask_token_id": 1, "causal": True}}, "causal: not supported in a DFlash draft"),
    ("speculators", {"sample_from_anchor": True}, "sample_from_anchor: not supported in a DFlash draft"),
    ("speculators", {"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids: None given"),
    ("speculators", {"aux_hidden_state_layer_ids": [4, 2, 6]}, r"outputs of layers \[3, 1, 5\] given, allowed is an"),
    ("speculators", {"aux_hidden_state_layer_ids": [2, 4, 9]}, r"reads layers \[1, 3, 8\], the target has 0 to 7"),
    ("speculators", {"draft_vocab_size": VOCAB}, "lm_head.weight has shape"),
]


@pytest.mark.parametrize(("layout", "changes", "message"), REFUSED)
def test_what_would_change_the_result_is_refused_by_name(
    targets: dict[str, Path], tmp_path: Path, layout: str, changes: dict[str, Any], message: str
) -> None:
    block = make_block(targets["llama"], layers=LAYERS, draft_vocab=REDUCED if layout == "speculators" else None)
    folder = write_block(block, tmp_path, layout, **changes)
    with pytest.raises(ConfigError, match=message):
        load_dflash(folder, targets["llama"], dtype=torch.float32)


def test_missing_and_unknown_tensors_are_named(targets: dict[str, Path], tmp_path: Path) -> None:
    _, target, folder = draft_for(targets, tmp_path, "authors, tied target")
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: value for name, value in tensors.items() if "hidden_norm" not in name}, folder / "model.safetensors"
    )
    with pytest.raises(ConfigError, match=r"lacks tensor hidden_norm\.weight"):
        load_dflash(folder, target)
    save_file(tensors | {"markov.weight": torch.zeros(2)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"tensors that config.json does not imply: markov\.weight"):
        load_dflash(folder, target)
    with pytest.raises(ConfigError, match="native given, but it does not compute the blocks of a DFlash draft"):
        load_dflash(folder, target, kernel="native")


def test_a_sequence_may_be_as_long_as_the_targets(targets: dict[str, Path], tmp_path: Path) -> None:
    _, target, folder = draft_for(targets, tmp_path, "authors, tied target")
    assert check_draft(folder, target).max_model_len == 512
