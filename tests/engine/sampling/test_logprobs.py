"""Reported log-probabilities are those of plain decoding, for exactly the tokens that were emitted.

Compared with the definition on a toy, and on SmolLM2 (fp32, bound 1e-3) with plain decoding and `transformers`, up to
the context limit, where drafts are cut short.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cut_draft import cut_draft
from fakes import RandomPacer, ToyEngine, ToyModel, toy_drafter
from local_engine import LocalEngine
from reference import equal_logprobs, generate
from transformers import AutoModelForCausalLM

from engine.checkpoint.store import resolve_model
from engine.messages import Delta, SamplingParams, Submit, TokenLogprobs
from engine.sampling.logprobs import score, token_logprobs
from engine.sampling.staging import to_host

BOUND = 1e-3
VOCAB = 7


@pytest.mark.parametrize("max_model_len", [9, 12, 13, 14, 15, 30])
def test_the_last_positions_before_the_context_limit_are_scored_like_any_other(max_model_len: int) -> None:
    target = ToyModel(vocab_size=VOCAB)
    drafter = toy_drafter(ToyModel(vocab_size=VOCAB, seed=3, blend=0.2))
    engine = ToyEngine(target, drafter, RandomPacer(max_model_len, max_k=6), max_model_len=max_model_len)
    sampling = SamplingParams(temperature=0.8, seed=5, max_tokens=100, num_logprobs=4, num_prompt_logprobs=2)
    submits = [Submit(request_id=f"r{n}", prompt=(1, 2, 3, 4, 5, 6)[:n], sampling=sampling) for n in range(1, 7)]
    engine.run(submits)
    for submit in submits:
        expected = generate(target.logits_after, submit.prompt, sampling, max_model_len)
        got = engine.result_of(submit.request_id)
        assert got.tokens == expected.tokens
        assert len(got.tokens) == max_model_len - len(submit.prompt)
        assert equal_logprobs(got.logprobs, expected.logprobs, bound=1e-5)
        assert equal_logprobs(got.prompt_logprobs, expected.prompt_logprobs, bound=1e-5)


def test_a_prompt_is_scored_once_whatever_is_cached_chunked_or_preempted() -> None:
    target = ToyModel(vocab_size=VOCAB, num_blocks=13)
    engine = ToyEngine(
        target,
        toy_drafter(ToyModel(vocab_size=VOCAB)),
        RandomPacer(1, 3),
        num_blocks=13,
        max_step_tokens=5,
        max_num_requests=4,
        max_model_len=40,
    )
    prompt = tuple(i % VOCAB for i in range(23))
    plain = SamplingParams(temperature=0.0, max_tokens=20)
    scored = SamplingParams(temperature=0.0, max_tokens=20, num_prompt_logprobs=3)
    submits = [Submit(request_id=f"r{i}", prompt=prompt, sampling=scored if i % 2 else plain) for i in range(6)]
    engine.run(submits)
    assert engine.engine.scheduler.num_preempted > 0
    expected = generate(target.logits_after, prompt, scored, 40)
    for i, submit in enumerate(submits):
        got = engine.result_of(submit.request_id)
        assert got.tokens == expected.tokens
        assert equal_logprobs(got.prompt_logprobs, expected.prompt_logprobs if i % 2 else [], bound=1e-5)


def test_scores_of_chosen_rows_equal_log_softmax() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 50) * 3
    exact = logits.double().log_softmax(-1)
    rows, tokens, num_top = [4, 0, 4], [7, 49, 0], [0, 3, 5]
    scores = score(logits[rows], torch.tensor(tokens), num_top=5)
    reported = token_logprobs(*to_host(scores.tensors()), num_top)
    for row, token, num, got in zip(rows, tokens, num_top, reported, strict=True):
        assert abs(got.logprob - exact[row, token].item()) < 1e-5
        assert [t for t, _ in got.top] == exact[row].topk(num).indices.tolist()
        assert all(abs(value - exact[row, t].item()) < 1e-5 for t, value in got.top)


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model("smollm2")


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randint(300, 20000, (n,), generator=generator).tolist()) for n in (3, 33)]


def run(folder: Path, prompts: list[tuple[int, ...]], **settings: Any) -> dict[str, Delta]:
    """Joined deltas of one request per prompt, to the context limit."""
    sampling = SamplingParams(temperature=0.0, max_tokens=100, num_logprobs=5, num_prompt_logprobs=2)
    with LocalEngine(folder, max_model_len=40, **settings) as engine:
        engine.generate(
            [Submit(request_id=str(i), prompt=prompt, sampling=sampling) for i, prompt in enumerate(prompts)]
        )
        return engine.joined


def test_smollm2_reports_the_same_with_and_without_drafts(
    folder: Path, prompts: list[tuple[int, ...]], tmp_path: Path
) -> None:
    plain = run(folder, prompts)
    draft_folder = cut_draft(folder, tmp_path / "draft")
    drafted = run(folder, prompts, draft_folder=draft_folder, pacer=RandomPacer(2, 5), speculative={"k": 5})
    ngram = {"method": "ngram", "k": 5, "policy": "fixed"}
    chunked = run(folder, prompts, speculative=ngram, max_step_tokens=16, max_num_requests=4)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for i, prompt in enumerate(prompts):
        tokens = [*prompt, *plain[str(i)].token_ids]
        assert len(tokens) == 40
        with torch.inference_mode():
            exact = model(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
        own = [TokenLogprobs(logprob=exact[p - 1, tokens[p]].item()) for p in range(1, 40)]
        for result in (plain[str(i)], drafted[str(i)], chunked[str(i)]):
            assert result.token_ids == plain[str(i)].token_ids
            assert equal_logprobs(result.logprobs, plain[str(i)].logprobs, bound=BOUND)
            assert equal_logprobs(result.prompt_logprobs, plain[str(i)].prompt_logprobs, bound=BOUND)
            reported = [*result.prompt_logprobs, *result.logprobs]
            assert all(abs(a.logprob - b.logprob) < BOUND for a, b in zip(reported, own, strict=True))
