"""SmolLM2 through the whole engine: greedy fp32 output equals that of `transformers` in every configuration.

A small run of each configuration is part of `make test`; `-m slow` runs the full gate over a prompt file
(PACELINE_PROMPTS, JSON lines with `turns`), 24 prompts, 16 at once.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from cut_draft import cut_draft
from fakes import RandomPacer
from local_engine import LocalEngine
from near_tie import assert_same_or_near_tie
from transformers import AutoModelForCausalLM, AutoTokenizer

from deployments.cluster.drafts import resolve_draft
from engine.checkpoint.store import resolve_model
from engine.messages import SamplingParams, Submit

EOS = 2
PROMPTS = (
    "Repeat this line twice: the quick brown fox jumps over the lazy dog.",
    "Write a Python function that reverses a string.",
    "Translate to French: good morning, my friend.",
    "If a train covers 120 km in 1.5 hours, what is its average speed?",
)
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ngram": {"speculative": {"method": "ngram", "k": 5}},
    "draft-k1": {"draft": True, "speculative": {"k": 1}},
    "draft-k4": {"draft": True, "speculative": {"k": 4}},
    "draft-k8": {"draft": True, "speculative": {"k": 8}},
    "draft-random": {"draft": True, "speculative": {"k": 8}, "random": True},
    "no-prefix-cache": {"draft": True, "speculative": {"k": 4}, "prefix_cache": False},
    "preempting": {"draft": True, "speculative": {"k": 4}, "small_pool": True, "prefix_cache": False},
    "tp2": {"tensor_parallel_size": 2, "speculative": {"method": "ngram", "k": 5}},
    "tp2-draft-random": {"tensor_parallel_size": 2, "draft": True, "speculative": {"k": 8}, "random": True},
    "tp3": {"tensor_parallel_size": 3},
    "eagle-random": {"eagle": True, "speculative": {"k": 8}, "random": True},
    "eagle-preempting": {"eagle": True, "speculative": {"k": 4}, "small_pool": True, "prefix_cache": False},
    "tp2-eagle-random": {"tensor_parallel_size": 2, "eagle": True, "speculative": {"k": 8}, "random": True},
}


class Case:
    """Prompts with the output of `transformers`."""

    def __init__(self, folder: Path, texts: list[str], max_tokens: int) -> None:
        self.folder = folder
        self.max_tokens = max_tokens
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
            for text in texts
        ]
        self.expected = [self._reference(prompt) for prompt in self.prompts]

    def _reference(self, prompt: list[int]) -> list[int]:
        with torch.inference_mode():
            out = self.model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                do_sample=False,
                max_new_tokens=self.max_tokens,
                eos_token_id=EOS,
                pad_token_id=EOS,
            )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens

    def check(self, name: str, draft_folder: Path, *, max_num_requests: int) -> int:
        """Run one configuration over all prompts at once; returns how many outputs are identical."""
        settings = dict(CONFIGURATIONS[name])
        use_draft, use_random = settings.pop("draft", False), settings.pop("random", False)
        if settings.pop("eagle", False):
            use_draft, draft_folder = True, resolve_draft("smollm2-eagle")
        if settings.pop("small_pool", False):
            # The prompts of one batch fit in the cache, their outputs do not.
            longest = max(len(prompt) for prompt in self.prompts) + self.max_tokens + 16
            together = sum(len(prompt) for prompt in self.prompts[:max_num_requests]) + self.max_tokens // 2
            settings |= {"kv_cache_tokens": max(longest, together), "max_model_len": longest, "block_size": 4}
        greedy = SamplingParams(temperature=0.0, max_tokens=self.max_tokens, stop_token_ids=(EOS,))
        submits = [
            Submit(request_id=str(i), prompt=tuple(prompt), sampling=greedy) for i, prompt in enumerate(self.prompts)
        ]
        with LocalEngine(
            self.folder,
            draft_folder=draft_folder if use_draft else None,
            pacer=RandomPacer(1, max_k=8) if use_random else None,
            max_num_requests=max_num_requests,
            **settings,
        ) as engine:
            result = engine.generate(submits)
            if "preempting" in name:
                assert engine.num_preempted > 0
            if use_draft or "ngram" in str(settings):
                assert sum(stats.num_drafted for stats in engine.stats) > 0
            if "eagle" in name:
                assert sum(stats.num_accepted for stats in engine.stats) > 0
        return sum(
            assert_same_or_near_tie(self.model, prompt, expected, result[str(i)], f"{name}, prompt {i}")
            for i, (prompt, expected) in enumerate(zip(self.prompts, self.expected, strict=True))
        )


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model("smollm2")


@pytest.fixture(scope="module")
def draft_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cut_draft(folder, tmp_path_factory.mktemp("draft"))


@pytest.fixture(scope="module")
def small_case(folder: Path) -> Case:
    return Case(folder, list(PROMPTS), max_tokens=16)


@pytest.mark.parametrize(
    "name",
    [
        *("plain", "ngram", "draft-random", "no-prefix-cache", "preempting", "tp2-draft-random", "tp3"),
        *("eagle-preempting", "tp2-eagle-random"),
    ],
)
def test_greedy_equals_transformers(name: str, small_case: Case, draft_folder: Path) -> None:
    small_case.check(name, draft_folder, max_num_requests=3)


@pytest.fixture(scope="module")
def full_case(folder: Path) -> Case:
    path = os.environ.get("PACELINE_PROMPTS")
    if path is None:
        pytest.skip("PACELINE_PROMPTS names no prompt file")
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    texts = [line["turns"][0] for line in lines[:: max(1, len(lines) // 24)]][:24]
    return Case(folder, texts, max_tokens=64)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_full_greedy_gate(name: str, full_case: Case, draft_folder: Path) -> None:
    draft = Path(os.environ.get("PACELINE_DRAFT", draft_folder))
    same = full_case.check(name, draft, max_num_requests=16)
    print(f"{name}: {same} of {len(full_case.prompts)} identical, the others part at a near-tie")


def test_seeded_sampling_does_not_depend_on_method_or_k(small_case: Case) -> None:
    """The draft is the target itself, so coupled draws agree but for rounding."""
    sampling = SamplingParams(temperature=0.8, top_p=0.95, seed=42, max_tokens=16, stop_token_ids=(EOS,))
    submits = [Submit(request_id=str(i), prompt=tuple(p), sampling=sampling) for i, p in enumerate(small_case.prompts)]
    folder = small_case.folder
    with LocalEngine(folder) as engine:
        plain = engine.generate(submits)
    with LocalEngine(folder, draft_folder=folder, pacer=RandomPacer(3, 5), speculative={"k": 5}) as engine:
        assert engine.generate(submits) == plain
        drafted = sum(stats.num_drafted for stats in engine.stats)
        accepted = sum(sum(stats.accepted_by_position) for stats in engine.stats)
        assert drafted > 0
        assert accepted >= 0.95 * sum(sum(stats.drafted_by_position) for stats in engine.stats)


def test_rejection_accepts_what_the_target_itself_drafts(small_case: Case) -> None:
    """With q = p every draft token is accepted: both have the same distribution, and q crosses unchanged."""
    sampling = SamplingParams(temperature=0.9, top_p=0.9, max_tokens=16, stop_token_ids=(EOS,))
    submits = [Submit(request_id=str(i), prompt=tuple(p), sampling=sampling) for i, p in enumerate(small_case.prompts)]
    with LocalEngine(small_case.folder, draft_folder=small_case.folder, speculative={"k": 4}) as engine:
        engine.generate(submits)
        reached = sum(sum(stats.drafted_by_position) for stats in engine.stats)
        accepted = sum(sum(stats.accepted_by_position) for stats in engine.stats)
    assert reached > 20
    assert accepted >= 0.98 * reached
