"""A run from generation to a measured draft, on a target of two small layers: acceptance must rise."""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from distill_fakes import VOCAB, open_target, write_shards, write_target
from fakes import FixedPacer
from local_engine import LocalEngine
from safetensors.torch import load_file
from tiny_tokenizer import byte_level

from distill.data.shards import token_mass
from distill.models.decoder import FrozenTarget
from distill.models.draft_model import SmallDraft
from distill.models.eagle import EagleDraft
from distill.models.eagle3 import Eagle3Draft
from distill.models.export import AnyDraft
from distill.options import add_distill_parser
from distill.settings import TrainConfig
from distill.training.evaluate import evaluate, walk
from distill.training.trainer import rate, train
from engine.errors import ConfigError
from engine.messages import SamplingParams, Submit


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> FrozenTarget:
    return open_target(write_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def shards(target: FrozenTarget, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_shards(target, tmp_path_factory.mktemp("data"), count=500, shard_tokens=3000)


@pytest.mark.parametrize("architecture", ["eagle", "eagle3", "draft_model"])
def test_acceptance_rises(target: FrozenTarget, shards: list[Path], tmp_path: Path, architecture: str) -> None:
    """Held-out first-token acceptance: near chance before training, several times that after it."""
    vocab = token_mass(shards, VOCAB).topk(64).indices.sort().values
    draft: AnyDraft
    if architecture in ("eagle", "eagle3"):
        kind = EagleDraft if architecture == "eagle" else Eagle3Draft
        draft = kind(target.config, (0, 1), vocab, target.embed)
    else:
        draft = SmallDraft(target.config, vocab, target.embed, num_layers=1)
    draft.initialise(target)
    held, used = shards[:1], shards[0].parent
    before = evaluate(draft, held, k=3)["all"]
    config = TrainConfig(
        steps=2, row_len=64, batch_tokens=512, lr=3e-3, muon=True, muon_lr=0.03, budget_tokens=120_000, seed=1
    )
    skip = frozenset({held[0].name})
    train(draft, [used], tmp_path, config, skip=skip, compute_dtype=torch.float32, report_tokens=5_000)
    after = evaluate(draft, held, k=3)["all"]
    lines = [json.loads(line) for line in (tmp_path / "curves.jsonl").read_text().splitlines()]
    assert after.first > max(0.15, 2 * before.first)
    assert after.tokens_per_step > before.tokens_per_step + 0.1
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[-1]["hits"][0] > lines[0]["hits"][0]


def test_a_stopped_run_is_continued(target: FrozenTarget, shards: list[Path], tmp_path: Path) -> None:
    vocab = torch.arange(VOCAB)
    config = TrainConfig(steps=1, row_len=64, batch_tokens=512, budget_tokens=6_000)

    def run(budget: int) -> tuple[EagleDraft, dict[str, object]]:
        draft = EagleDraft(target.config, (0, 1), vocab, target.embed)
        train(draft, [shards[0].parent], tmp_path, replace(config, budget_tokens=budget), compute_dtype=torch.float32)
        return draft, torch.load(tmp_path / "checkpoint.pt", weights_only=True)

    first, saved = run(6_000)
    again, same = run(6_000)
    assert same["tokens"] == saved["tokens"]
    for a, b in zip(first.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    _, more = run(12_000)
    assert int(more["tokens"]) >= 12_000  # type: ignore[call-overload]
    assert float(more["seconds"]) > float(saved["seconds"])  # type: ignore[arg-type]


def test_walk_takes_the_bonus_token_as_next_root() -> None:
    hits = np.array([[1, 1, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]], dtype=np.bool_)
    # Root 0 accepts one and continues at 2, which accepts none; 3 accepts two and ends the response.
    assert walk(hits) == ([1, 0, 2], 6)


@pytest.mark.parametrize("seed", range(20))
def test_walk_emits_every_token_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    hits = rng.random((4, 30)) < rng.random()
    for root in range(30):
        hits[30 - root :, root] = False if root > 26 else hits[30 - root :, root]
    lengths, emitted = walk(hits)
    assert emitted == sum(lengths) + len(lengths)
    assert 30 <= emitted <= 34


def test_rate_warms_up_and_falls() -> None:
    rates = [rate(step / 100, 0.1) for step in range(101)]
    assert max(rates) == pytest.approx(1.0, abs=0.02)
    assert rates.index(max(rates)) in range(9, 12)
    assert rates[-1] == pytest.approx(0.05)
    assert all(a >= b for a, b in itertools.pairwise(rates[11:]))


def test_the_command_makes_and_compares_drafts(tmp_path: Path) -> None:
    tokenizer = byte_level()
    folder = write_target(tmp_path / "target", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    log = tmp_path / "log.jsonl"
    log.write_text(
        "".join(json.dumps({"messages": [{"role": "user", "content": f"stop {n}"}]}) + "\n" for n in range(9))
    )
    parser = argparse.ArgumentParser()
    add_distill_parser(parser.add_subparsers())
    made = f"distill run {folder} --out {tmp_path}/draft --prompts {log} --generate 2500 --tokens 3000 --slots 8"
    made += " --max-len 128 --draft-vocab 128 --dtype float32 --device cpu --unroll 2 --batch-tokens 512"
    args = parser.parse_args(made.split())
    assert args.run(args) == 0
    asked = tmp_path / "asked.jsonl"
    asked.write_text('{"category": "qa", "turns": ["who?"]}\n{"category": "qa", "turns": ["the quick fox"]}\n')
    compared = f"distill eval {folder} {tmp_path}/draft --prompts {asked} --answers {tmp_path}/answers"
    args = parser.parse_args(f"{compared} --max-answer 24 --dtype float32 --json {tmp_path}/out.json".split())
    assert args.run(args) == 0
    figures = json.loads((tmp_path / "out.json").read_text())["draft"]
    assert figures["qa"]["num_responses"] == 2
    assert len(figures["all"]["per_position"]) == 5
    assert 1.0 <= figures["all"]["tokens_per_step"] <= 6.0


def test_an_eagle3_draft_made_by_the_command_drafts_in_the_engine(tmp_path: Path) -> None:
    """The folder is in a public layout; its drafts are accepted more often than by chance."""
    tokenizer = byte_level()
    folder = write_target(tmp_path / "target", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    parser = argparse.ArgumentParser()
    add_distill_parser(parser.add_subparsers())
    made = f"distill run {folder} --architecture eagle3 --feature-layers 0,1 --out {tmp_path}/draft --chat-share 1"
    made += " --generate 20000 --tokens 60000 --slots 16 --max-len 96 --draft-vocab 128 --dtype float32 --device cpu"
    args = parser.parse_args(f"{made} --unroll 2 --batch-tokens 512 --row-len 96".split())
    assert args.run(args) == 0
    assert json.loads((tmp_path / "draft" / "config.json").read_text())["speculators_model_type"] == "eagle3"
    submits = [
        Submit(request_id=str(i), prompt=(5 + i, 9), sampling=SamplingParams(temperature=1.0, seed=i, max_tokens=40))
        for i in range(8)
    ]
    with LocalEngine(folder) as engine:
        plain = engine.generate(submits)
    with LocalEngine(folder, draft_folder=tmp_path / "draft", pacer=FixedPacer(2), speculative={"k": 2}) as engine:
        assert engine.generate(submits) == plain
        drafted = sum(stats.num_drafted for stats in engine.stats)
        assert drafted > 100
        # A guess out of 256 tokens is right once in 256 times, and a second token counts only after a right first one.
        assert sum(stats.num_accepted for stats in engine.stats) > 10 * drafted / 256


def test_int8_storage_of_a_public_layout_is_refused_before_any_work(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_distill_parser(parser.add_subparsers())
    args = parser.parse_args(f"distill run {tmp_path} --architecture eagle3 --int8 --out {tmp_path}/draft".split())
    with pytest.raises(ConfigError, match="int8: the public layout of eagle3 drafts"):
        args.run(args)


def test_a_draft_is_cut_to_fewer_tokens_without_training(tmp_path: Path) -> None:
    tokenizer = byte_level()
    folder = write_target(tmp_path / "target", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    parser = argparse.ArgumentParser()
    add_distill_parser(parser.add_subparsers())
    common = f"distill run {folder} --chat-share 1 --generate 3000 --max-len 64 --slots 8 --dtype float32 --device cpu"
    for more in (
        f"--out {tmp_path}/wide --draft-vocab 128 --tokens 1000 --unroll 1 --batch-tokens 512",
        f"--out {tmp_path}/cut --draft-vocab 64 --tokens 0 --start-from {tmp_path}/wide",
    ):
        args = parser.parse_args(f"{common} {more}".split())
        assert args.run(args) == 0
    wide, cut = (load_file(tmp_path / name / "model.safetensors") for name in ("wide", "cut"))
    assert len(cut["draft_vocab"]) == 64
    assert torch.equal(cut["eagle.fuse.weight"], wide["eagle.fuse.weight"])
    shared = [token for token in cut["draft_vocab"].tolist() if token in wide["draft_vocab"].tolist()]
    assert len(shared) > 48
    for token in shared:
        rows = [each["lm_head.weight"][each["draft_vocab"].tolist().index(token)] for each in (wide, cut)]
        assert torch.equal(*rows)
