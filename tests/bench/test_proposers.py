"""`paceline bench proposers`: what names stand for, how cells add up, and that all variants give the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from step_stats import step_stats
from tiny_models import write_model

from bench.proposers.local import Seen, open_bench
from bench.proposers.run import Cell, StepKind, settle, table
from bench.proposers.variants import parse_variant
from engine.errors import ConfigError, EngineUnavailable
from engine.messages import SamplingParams

DRAFTS = {"head": ("eagle", Path("/drafts/head")), "small": ("draft_model", Path("/drafts/small"))}


def test_a_name_says_who_drafts_and_how() -> None:
    off = parse_variant("off", DRAFTS)
    assert (off.settings.method, off.settings.policy, off.draft, off.width) == ("none", "off", None, 1)
    lookup = parse_variant("ngram@3", DRAFTS)
    assert (lookup.settings.method, lookup.settings.k, lookup.settings.policy) == ("ngram", 3, "fixed")
    assert lookup.settings.shared_lookup == "off"
    alone = parse_variant("head@4", DRAFTS)
    assert (alone.settings.method, alone.settings.draft, alone.settings.lookup) == ("eagle", "/drafts/head", False)
    merged = parse_variant("small+shared+tree@9x4:goodput", DRAFTS)
    assert (merged.draft, merged.width, merged.settings.k, merged.settings.policy) == ("small", 4, 9, "goodput")
    assert (merged.settings.lookup, merged.settings.shared_lookup) == (True, "all")


@pytest.mark.parametrize("name", ["", "tree", "eagle", "head+small", "off+ngram", "ngram@", "ngram:best", "ngram@99"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"--variants|k: |policy: "):
        parse_variant(name, DRAFTS)


def seen(emitted: int, step_s: float, draft_s: float) -> Seen:
    """Two decode steps and one with a prompt, which does not count."""
    one = step_stats(num_decodes=2, num_prefill_tokens=0, num_emitted=emitted, step_s=step_s)
    prompt = step_stats(num_decodes=1, num_prefill_tokens=9, num_emitted=70, step_s=99.0)
    return Seen((one, prompt, one), (draft_s, 50.0, draft_s), ((1,),))


def test_a_table_has_ratios_to_the_first_variant() -> None:
    cells = [Cell(kind, 1, name) for kind in ("qa", "rag") for name in ("off", "head")]
    for cell, run in zip(
        cells, [seen(2, 1.0, 0.0), seen(5, 2.0, 0.5), seen(2, 1.0, 0.0), seen(6, 1.0, 0.1)], strict=True
    ):
        cell.add(run)
        settle([cell])
    assert (cells[1].emitted, cells[1].request_steps) == (10, 4)
    lines = table(cells, 1).splitlines()
    assert lines[0] == "| proposer | qa | rag | all |"
    assert lines[2] == "| off | 1.00 (0 %; 1.00) | 1.00 (0 %; 1.00) | 1.00 (0 %; 1.00) |"
    assert lines[3] == "| head | 2.50 (25 %; 1.25) | 3.00 (10 %; 3.00) | 2.75 (20 %; 1.83) |"


def test_a_step_counts_with_the_usual_duration_of_its_kind() -> None:
    """Of four steps without a model one was disturbed; the single step with one is as long as it was."""
    cells = [Cell(kind, 1, "head") for kind in ("qa", "rag")]
    few, many = StepKind(3, 0), StepKind(3, 2)
    times = [(few, 1.0, 0.1), (few, 1.2, 0.2), (few, 8.0, 4.0), (few, 1.1, 0.1), (many, 2.0, 0.5)]
    cells[0].steps, cells[1].steps = times[:3], times[3:]
    settle(cells)
    assert [cell.usual_s for cell in cells] == pytest.approx([3 * 1.1, 1.1 + 2.0])
    assert [cell.draft_s for cell in cells] == pytest.approx([3 * 0.1, 0.1 + 0.5])


def test_every_variant_generates_the_same_tokens(tmp_path: Path) -> None:
    folder, draft = (write_model(tmp_path / name, "llama", seed=seed) for name, seed in (("target", 0), ("draft", 1)))
    drafts = {"small": ("draft_model", draft)}
    settings = {"model": str(folder), "device": "cpu", "dtype": "float32", "kv_cache_tokens": 4096}
    settings["max_num_requests"] = 4
    prompts = [(1, 2, 3, 1, 2), (4, 5, 6)]
    sampling = SamplingParams(temperature=0.0, max_tokens=20)
    with open_bench(settings, folder, draft) as bench:
        runs = {}
        for name in ("off", "ngram@4", "ngram+tree@6", "small@3", "small+ngram+tree@6", "small+ngram+tree@6:goodput"):
            variant = parse_variant(name, drafts)
            bench.prepare(variant)
            runs[name] = bench.run(variant, prompts, sampling, streams=2)
        again = bench.run(parse_variant("small@3", drafts), prompts, sampling, streams=1)
    expected = runs["off"].tokens
    assert [len(tokens) for tokens in expected] == [20, 20]
    assert {name for name, run in runs.items() if run.tokens != expected} == set()
    assert again.tokens == expected
    assert sum(step.num_drafted for step in runs["off"].stats) == 0
    for name in ("ngram@4", "small@3", "small+ngram+tree@6"):
        assert sum(step.num_drafted for step in runs[name].stats) > 8, name
    assert max(step.num_decodes for step in runs["off"].stats) == 2
    assert max(step.num_decodes for step in again.stats) == 1
    assert all(len(run.stats) == len(run.draft_s) for run in runs.values())


def test_a_variant_without_its_draft_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "target", "llama")
    settings = {"model": str(folder), "device": "cpu", "dtype": "float32", "kv_cache_tokens": 512}
    with open_bench(settings, folder, None) as bench, pytest.raises(EngineUnavailable, match="has no draft"):
        bench.prepare(parse_variant("small@2", {"small": ("draft_model", folder)}))
