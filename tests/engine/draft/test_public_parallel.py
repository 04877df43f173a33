"""P-EAGLE heads in public layouts: one forward computes what the format defines, and the output stays exact."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle3_reference import PublicHead, make_head, parallel_logits, write_head
from eagle_requests import NUM_DRAFTED, features_of, make_proposer, request_row
from fakes import RandomPacer
from local_engine import LocalEngine
from safetensors.torch import load_file
from tiny_models import VOCAB, write_model

from engine.checkpoint.model_config import ModelConfig
from engine.errors import ConfigError
from engine.messages import SamplingParams, Submit

NUM_LAYERS = 8
REDUCED = torch.arange(2, VOCAB, 2)
MASK_TOKEN = 11
LAYOUTS = [("authors", "llama"), ("speculators", "qwen3")]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "four layers, own embedding": {"own_embedding": True, "layer": {"num_hidden_layers": 4}},
    "norm before fc and residual": {"norm_before_fc": True, "norm_before_residual": True},
    "norm of each feature": {"fc_norm": True, "norm_output": True},
    "whole vocabulary": {"draft_vocab": torch.arange(VOCAB)},
}


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("targets")
    return {name: write_model(folder / name, name, num_hidden_layers=NUM_LAYERS) for name in ("llama", "qwen3")}


def head_for(target: Path, *, positions: int = NUM_DRAFTED, **options: Any) -> PublicHead:
    head = make_head(target, **({"draft_vocab": REDUCED, "mask_token_id": MASK_TOKEN} | options))
    return replace(head, positions=positions)


@pytest.mark.parametrize("chunk", [5, 40], ids=["bit by bit", "at once"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("layout", "family"), LAYOUTS)
def test_one_forward_gives_the_distributions_of_the_format(
    targets: dict[str, Path], tmp_path: Path, variant: str, layout: str, family: str, chunk: int
) -> None:
    """Several requests at once, in chunks, with drafts in between. A second forward would raise an error."""
    target = targets[family]
    head = head_for(target, **VARIANTS[variant])
    folder = write_head(head, tmp_path / "head", layout)
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    seeded = torch.Generator().manual_seed(1)
    texts = [torch.randint(3, VOCAB, (length,), generator=seeded).tolist() for length in (21, 38, 2)]
    features = [features_of(target, folder, text) for text in texts]
    firsts, proposer = (0, 21, 59), make_proposer(folder, target)
    probs, checked = torch.zeros(3, NUM_DRAFTED, len(head.draft_vocab)), 0
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
            expected = parallel_logits(
                head, embedding, texts[row.key][:known], features[row.key][: known - 1], NUM_DRAFTED
            )
            torch.testing.assert_close(probs[index], expected.softmax(-1), rtol=2e-3, atol=1e-5)
            assert set(found.token_ids) <= set(head.draft_vocab.tolist())
            checked += len(found.token_ids)
    assert checked == NUM_DRAFTED * (3 if chunk == 40 else 5 + 8 + 1)


@pytest.mark.parametrize(("layout", "family"), LAYOUTS)
def test_output_is_the_same_as_without_a_draft(
    targets: dict[str, Path], tmp_path: Path, layout: str, family: str
) -> None:
    """Greedy and seeded, fp32, K random per step."""
    target = targets[family]
    folder = write_head(head_for(target), tmp_path / "head", layout)
    submits = [
        Submit(
            request_id=str(i),
            prompt=tuple(range(3 + i, 12 + 2 * i)),
            sampling=SamplingParams(temperature=0.0 if i % 2 else 0.9, seed=i, max_tokens=30),
        )
        for i in range(5)
    ]
    with LocalEngine(target) as engine:
        plain = engine.generate(submits)
    with LocalEngine(target, draft_folder=folder, pacer=RandomPacer(4, max_k=5), speculative={"k": 5}) as engine:
        assert engine.generate(submits) == plain
        assert sum(stats.num_drafted for stats in engine.stats) > 100
        # The cost model counts passes by this.
        assert engine.leader.positions_per_pass == (8 if layout == "authors" else NUM_DRAFTED)


def test_positions_are_those_of_the_training(targets: dict[str, Path], tmp_path: Path) -> None:
    """The speculators layout says how many; the authors' layout does not, so it is the paper's number."""
    for layout, expected in (("speculators", 3), ("authors", 8)):
        folder = write_head(head_for(targets["llama"], positions=3), tmp_path / layout, layout)
        config = ModelConfig.load(folder)
        assert (config.positions_per_pass, config.eagle3 and config.eagle3.mask_token_id) == (expected, MASK_TOKEN)
    config_file = tmp_path / "speculators" / "config.json"
    values = json.loads(config_file.read_text())
    values["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 1
    config_file.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="speculative_tokens: 1 given, a parallel draft has at least 2"):
        ModelConfig.load(tmp_path / "speculators")
