"""An `eagle` chain written as an EAGLE-3 head has the logits of the chain, in the engine and in a plain reference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from distill_fakes import open_target, write_target
from eagle3_reference import PublicHead, reference_logits
from eagle_requests import NUM_DRAFTED, features_of, make_proposer, request_row
from safetensors.torch import load_file
from tiny_eagle import DRAFT_VOCAB, make_parallel, write_eagle

from distill.convert import export_public
from distill.models.decoder import DecoderConfig, rope_tables
from distill.models.export import export_draft
from distill.models.widened import MIN_GAP, self_score
from engine.checkpoint.draft_check import check_draft
from engine.errors import ConfigError
from paceline.cli import main

LENGTHS = (21, 38, 2)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


def drafted(folder: Path, target: Path, texts: list[list[int]], features: list[torch.Tensor]) -> tuple:
    """Distributions [texts, NUM_DRAFTED, N] and tokens of seeded drafts."""
    firsts = [sum(LENGTHS[:index]) for index in range(len(texts))]
    rows = [
        request_row(key, 0, text, [-1, *range(first, first + len(text) - 1)], temperature=1.0)
        for key, (text, first) in enumerate(zip(texts, firsts, strict=True))
    ]
    probs = torch.zeros(len(texts), NUM_DRAFTED, len(DRAFT_VOCAB))
    response = make_proposer(folder, target).propose(rows, (), probs, torch.cat(features))
    return probs, [row.token_ids for row in response]


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("int8", [False, True], ids=["bfloat16 rows", "int8 rows"])
def test_the_head_has_the_distributions_of_the_chain(
    target_folder: Path, tmp_path: Path, num_layers: int, int8: bool
) -> None:
    """Committed tokens, and every step of the chain after them."""
    chain = write_eagle(target_folder, tmp_path / "chain", int8=int8, num_layers=num_layers)
    head = tmp_path / "head"
    export_public(chain, target_folder, head, dtype=torch.float32)
    seeded = torch.Generator().manual_seed(1)
    texts = [torch.randint(3, 96, (length,), generator=seeded).tolist() for length in LENGTHS]
    assert check_draft(head, target_folder).feature_layers == check_draft(chain, target_folder).feature_layers
    features = [features_of(target_folder, chain, text) for text in texts]
    expected, tokens = drafted(chain, target_folder, texts, features)
    found, same = drafted(head, target_folder, texts, features)
    assert tokens == same
    assert all(len(row) == NUM_DRAFTED for row in tokens)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    stored, config = load_file(head / "model.safetensors"), json.loads((head / "config.json").read_text())
    public = PublicHead(config["transformer_layer_config"], config, DRAFT_VOCAB, stored)
    for index, text in enumerate(texts):
        logits = reference_logits(
            public, stored["embed_tokens.weight"], text + list(tokens[index]), len(text), features[index][:-1]
        )
        torch.testing.assert_close(torch.stack(logits[:-1]).softmax(-1), expected[index], rtol=2e-3, atol=1e-5)


def test_the_default_type_rounds_only(target_folder: Path, tmp_path: Path) -> None:
    chain = write_eagle(target_folder, tmp_path / "chain")
    argv = ["distill", "export", str(target_folder), str(chain), "--out", str(tmp_path / "head")]
    assert main(argv) == 0
    stored = load_file(tmp_path / "head" / "model.safetensors")
    assert {tensor.dtype for name, tensor in stored.items() if name not in ("d2t", "t2d")} == {torch.bfloat16}
    export_public(chain, target_folder, tmp_path / "exact", dtype=torch.float32)
    exact = load_file(tmp_path / "exact" / "model.safetensors")
    assert stored.keys() == exact.keys()
    for name, tensor in exact.items():
        assert torch.equal(tensor.to(stored[name].dtype), stored[name]), name


@pytest.mark.parametrize(("dim", "theta", "max_len"), [(8, 10_000.0, 512), (64, 100_000.0, 8192), (128, 1e6, 32_768)])
def test_a_position_attends_to_itself_alone(dim: int, theta: float, max_len: int) -> None:
    config = DecoderConfig(dim, dim, 1, 1, 1, dim, 9, rope_theta=theta)
    value = self_score(config, max_len)
    cos, sin = rope_tables(config, max_len, torch.device("cpu"))
    turned = torch.cat(((cos - sin)[:, : dim // 2], (cos + sin)[:, dim // 2 :]), 1).double() * value
    scores = turned @ turned[-1] / dim**0.5
    assert scores[-1] - scores[:-1].max() > 0.99 * MIN_GAP
    assert value < 256


def test_what_has_no_such_form_is_refused(target_folder: Path, tmp_path: Path) -> None:
    parallel = tmp_path / "parallel"
    export_draft(make_parallel(open_target(target_folder), positions=3), target_folder, parallel, card="")
    with pytest.raises(ConfigError, match="is parallel; export writes chains"):
        export_public(parallel, target_folder, tmp_path / "head")
    other = write_target(tmp_path / "other", vocab_size=100)
    chain = write_eagle(target_folder, tmp_path / "chain")
    with pytest.raises(ConfigError, match="vocab_size: the draft was made for 96, the target has 100"):
        export_public(chain, other, tmp_path / "head")
    export_public(chain, target_folder, tmp_path / "head")
    with pytest.raises(ConfigError, match="'eagle3'; export writes 'eagle' drafts"):
        export_public(tmp_path / "head", target_folder, tmp_path / "again")
