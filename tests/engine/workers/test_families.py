"""Families with windows, experts or norms of outputs through the whole engine, in float32.

Promise: greedy output is token-identical with and without drafts, for any K per step, and is the output of
`transformers`.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import transformers
from fakes import RandomPacer
from local_engine import LocalEngine
from quantised_models import FORMATS, quantise
from tiny_models import VOCAB, write_model

from engine.messages import SamplingParams, Submit

NUM_TOKENS = 40
WINDOW = 20


def submits() -> list[Submit]:
    """Requests shorter and longer than the windows, before and after their output."""
    rng = random.Random(5)
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    return [
        Submit(request_id=str(length), prompt=tuple(rng.randrange(3, VOCAB) for _ in range(length)), sampling=greedy)
        for length in (3, WINDOW - 1, WINDOW + 1, 70)
    ]


def expected(folder: Path) -> dict[str, list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    out = {}
    for submit in submits():
        tokens = list(submit.prompt)
        for _ in range(NUM_TOKENS):
            with torch.inference_mode():
                tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        out[submit.request_id] = tokens[len(submit.prompt) :]
    return out


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_moe", "mistral-window"])
def test_greedy_output_is_the_same_with_and_without_drafts(tmp_path: Path, family: str) -> None:
    folder = write_model(tmp_path / "target", family)
    wanted = expected(folder)
    assert len({tuple(tokens) for tokens in wanted.values()}) == 4
    with LocalEngine(folder, max_num_requests=3) as engine:
        assert engine.generate(submits()) == wanted
    other = write_model(tmp_path / "draft", "llama", seed=1)
    for draft, hits in ((folder, True), (other, False)):
        with LocalEngine(
            folder, draft_folder=draft, speculative={"k": 6}, pacer=RandomPacer(1, max_k=6), max_num_requests=3
        ) as engine:
            assert engine.generate(submits()) == wanted
            assert sum(stats.num_drafted for stats in engine.stats) > 50
            if hits:
                assert sum(stats.num_accepted for stats in engine.stats) > 50


def test_two_shards_of_experts(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "target", "qwen3_moe")
    with LocalEngine(folder, tensor_parallel_size=2, pacer=RandomPacer(2, max_k=4), max_num_requests=3) as engine:
        assert engine.generate(submits()) == expected(folder)


def test_a_quantised_target_with_a_quantised_draft(tmp_path: Path) -> None:
    plain = write_model(tmp_path / "target", "llama")
    folder, dequantised = quantise(plain, tmp_path, FORMATS["AWQ, 4-bit"])
    with LocalEngine(
        folder, draft_folder=folder, speculative={"k": 6}, pacer=RandomPacer(3, max_k=6), max_num_requests=3
    ) as engine:
        assert engine.generate(submits()) == expected(dequantised)
        assert sum(stats.num_accepted for stats in engine.stats) > 50


@pytest.mark.parametrize(("family", "shards"), [("gemma3_text", 1), ("llama", 2)])
def test_trees_give_the_same_greedy_output(tmp_path: Path, family: str, shards: int) -> None:
    """The llama's draft is its own quantised copy: near it, so that paths through branches are accepted and moved. Its
    trees are merged with prompt lookup."""
    folder = write_model(tmp_path / "target", family)
    wanted = expected(folder)
    draft = write_model(tmp_path / "draft", "llama", seed=1)
    if family == "llama":
        draft, _ = quantise(folder, tmp_path, FORMATS["AWQ, 4-bit"])
    with LocalEngine(
        folder,
        draft_folder=draft,
        speculative={"k": 12, "tree": "auto", "tree_width": 4, "lookup": family == "llama"},
        pacer=RandomPacer(1, max_k=12),
        max_num_requests=3,
        tensor_parallel_size=shards,
    ) as engine:
        assert engine.generate(submits()) == wanted
        outcomes = [outcome for stats in engine.stats for outcome in stats.outcomes]
    assert any(outcome.parents for outcome in outcomes)
    if family == "llama":
        assert any(outcome.left_first_path for outcome in outcomes)
