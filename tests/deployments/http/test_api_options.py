"""Options that shape a response: several choices and prompts, log-probabilities, echo, granularity, stops.

The promise under all of them: text, tokens, log-probabilities and usage end at the same token, whole or streamed.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import httpx
import pytest
from api_harness import (
    CODEC,
    COMPLETION,
    EOS,
    LIMITS,
    SCRIPT,
    TEXT,
    URLS,
    dependencies,
    error_of,
    make_engine,
    post,
    stream_of,
    talk,
    text_of,
)
from fake_engine import FakeEngine, logprobs_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deployments.http.app import build_api
from deployments.text.logprobs import LOWEST, TokenRecord, chat_logprobs, completion_logprobs
from engine.errors import EngineError, QueueFull
from engine.messages import TokenLogprobs

FULL = {"stream": True, "stream_options": {"include_usage": True}}


def whole_and_stream(engine: FakeEngine, url: str, body: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """The response to a body, as one document and as events without [DONE]."""

    async def both(client: httpx.AsyncClient) -> tuple[httpx.Response, httpx.Response]:
        plain = {key: value for key, value in body.items() if key != "stream_granularity"}
        return await client.post(url, json=plain), await client.post(url, json={**body, **FULL})

    whole, stream = talk(engine, both)
    assert whole.status_code == 200, whole.text
    *events, done = stream_of(stream)
    assert done == "[DONE]"
    return whole.json(), events


def joined(chunks: list[Any], index: int) -> dict[str, Any]:
    """The chunks of one choice joined: text, finish reason, log-probabilities."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons[:-1] == [None] * (len(reasons) - 1), "nothing follows the end"
    logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    merged = {
        key: list(itertools.chain.from_iterable(part[key] for part in logprobs))
        for key in (logprobs[0] if logprobs else {})
        if logprobs[0][key] is not None
    }
    return {"text": "".join(map(text_of, choices)), "finish_reason": reasons[-1], "logprobs": merged}


def comparable(choice: dict[str, Any]) -> dict[str, Any]:
    logprobs = {key: value for key, value in (choice["logprobs"] or {}).items() if value is not None}
    return {"text": text_of(choice), "finish_reason": choice["finish_reason"], "logprobs": logprobs}


options = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 80)},
    optional={
        "n": st.integers(1, 3),
        "seed": st.integers(0, 50),
        "stop": st.sampled_from(["stop", ["🙂", "fox"], "go, n", "never", "quick \n"]),
        "stop_token_ids": st.sampled_from([[SCRIPT[7]], [SCRIPT[3], SCRIPT[12]], [EOS], []]),
        "ignore_eos": st.booleans(),
        "min_tokens": st.integers(0, 1),
        "stream_granularity": st.sampled_from(["step", "token"]),
        "num_logprobs": st.integers(0, 4),
        "echo": st.booleans(),
        "more_prompts": st.booleans(),
    },
)


@pytest.mark.parametrize("kind", URLS)
@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(options=options, steps=st.integers(0, 10**6), max_step=st.integers(1, 6))
def test_whole_and_streamed_answers_agree_in_text_tokens_logprobs_and_usage(
    kind: str, options: dict[str, Any], steps: int, max_step: int
) -> None:
    url, base = URLS[kind]
    body = {**base, **options}
    num_logprobs, echo, more = (body.pop(key, None) for key in ("num_logprobs", "echo", "more_prompts"))
    if kind == "chat" and num_logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": num_logprobs}
    elif kind == "completion":
        body |= {"logprobs": num_logprobs, "echo": echo, "prompt": ["go 🙂 now", "stop"] if more else "go 🙂 now"}
    engine = make_engine(seed=steps, max_step=max_step)
    whole, (*chunks, usage) = whole_and_stream(engine, url, body)
    assert not engine.running
    num_choices = body.get("n", 1) * (2 if kind == "completion" and more else 1)
    assert [choice["index"] for choice in whole["choices"]] == list(range(num_choices))
    assert usage["usage"] == whole["usage"]
    for choice in whole["choices"]:
        assert joined(chunks, choice["index"]) == comparable(choice)
    if num_logprobs is None:
        return
    lengths = [
        len(choice["logprobs"]["content"] if kind == "chat" else choice["logprobs"]["tokens"])
        for choice in whole["choices"]
    ]
    num_prompt = whole["usage"]["prompt_tokens"] * body.get("n", 1) if kind == "completion" and echo else 0
    assert sum(lengths) == whole["usage"]["completion_tokens"] + num_prompt


def test_choices_differ_by_seed_are_reproducible_and_keep_their_index() -> None:
    url, body = URLS["chat"]
    engine = make_engine(step_s=0.001)
    first = post(engine, url, {**body, "n": 4, "seed": 5}).json()
    second = post(engine, url, {**body, "n": 4, "seed": 5}).json()
    texts = [text_of(choice) for choice in first["choices"]]
    assert texts == [text_of(choice) for choice in second["choices"]]
    assert len(set(texts)) == 4
    alone = post(make_engine(), url, {**body, "seed": 6}).json()
    assert text_of(alone["choices"][0]) == texts[1]
    engine = make_engine()
    post(engine, url, {**body, "n": 3, "seed": 2**63 - 2})
    assert [submit.sampling.seed for submit in engine.submitted] == [2**63 - 2, 2**63 - 1, -(2**63)]


def test_usage_counts_each_prompt_once_and_sums_what_was_generated() -> None:
    engine = make_engine()
    body = {**COMPLETION, "prompt": [[5] * 10, [6] * 20], "n": 3, "max_tokens": 4}
    usage = post(engine, "/v1/completions", body).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (30, 24, 54)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 5 + 10
    assert [submit.prompt[0] for submit in engine.submitted] == [5, 5, 5, 6, 6, 6]
    assert engine.peak_running == 6
    ids = [submit.request_id for submit in engine.submitted]
    assert len(set(ids)) == 6


@pytest.mark.parametrize("kind", URLS)
@pytest.mark.parametrize("includes_usage", [True, False])
def test_continuous_usage_is_in_each_chunk_and_ends_at_the_total(kind: str, includes_usage: bool) -> None:
    url, body = URLS[kind]
    usage_options = {"include_usage": includes_usage, "continuous_usage_stats": True}
    engine = make_engine(max_step=3)
    fields = {"n": 2, "seed": 3, "stream": True, "stream_options": usage_options}
    *chunks, done = stream_of(post(engine, url, {**body, **fields}))
    assert done == "[DONE]"
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]
    whole = post(make_engine(), url, {**body, "n": 2, "seed": 3}).json()
    assert counts[-1] == whole["usage"]["completion_tokens"]
    assert all(chunk["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"] for chunk in chunks)
    assert (chunks[-1]["choices"] == []) == includes_usage


def test_streamed_choices_interleave() -> None:
    engine = make_engine(step_s=0.001)
    *chunks, _ = stream_of(post(engine, "/v1/completions", {**COMPLETION, "n": 3, "stream": True}))
    order = [chunk["choices"][0]["index"] for chunk in chunks]
    assert set(order) == {0, 1, 2}
    assert len(list(itertools.groupby(order))) > 3
    finished = [chunk["choices"][0]["finish_reason"] for chunk in chunks].count("stop")
    assert finished == 3


def test_a_client_that_leaves_frees_all_choices() -> None:
    engine = make_engine(step_s=3600)
    deps = dependencies(engine)

    async def run() -> None:
        transport = httpx.ASGITransport(build_api(deps))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            sending = asyncio.create_task(client.post("/v1/completions", json={**COMPLETION, "n": 5}))
            while len(engine.running) < 5:
                await asyncio.sleep(0.001)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        assert len(deps.running) == 0

    asyncio.run(asyncio.wait_for(run(), 10))
    assert not engine.running
    assert len(engine.aborted) == 5


def test_a_failure_of_one_choice_ends_them_all() -> None:
    class RoomForTwo(FakeEngine):
        async def generate(self, submit: Any) -> Any:
            if len(self.running) == 2:
                raise QueueFull("full", retry_after_s=1)
            async for delta in super().generate(submit):
                yield delta

    engine = RoomForTwo(script=SCRIPT, eos_token_id=EOS, step_s=0.001)
    assert post(engine, "/v1/completions", {**COMPLETION, "n": 2}).status_code == 200
    assert post(engine, "/v1/completions", {**COMPLETION, "n": 4}).status_code == 429
    engine = make_engine(fail_after=10, failure=EngineError("a step failed"), step_s=0.001)
    response = post(engine, "/v1/completions", {**COMPLETION, "n": 4})
    assert (response.status_code, error_of(response)["message"]) == (500, "a step failed")
    assert not engine.running
    *_, last = stream_of(post(engine, "/v1/completions", {**COMPLETION, "n": 4, "stream": True}))
    assert last["error"]["message"] == "a step failed"
    assert not engine.running


def test_chat_logprobs_have_each_token_s_bytes_and_alternatives() -> None:
    url, body = URLS["chat"]
    engine = make_engine()
    (choice,) = post(engine, url, {**body, "logprobs": True, "top_logprobs": 3}).json()["choices"]
    content = choice["logprobs"]["content"]
    assert engine.submitted[0].sampling.num_logprobs == 3
    tokens = [*SCRIPT, EOS]
    assert [entry["logprob"] for entry in content] == [logprobs_of(i, 0).logprob for i in tokens]
    assert b"".join(bytes(entry["bytes"] or ()) for entry in content).decode() == TEXT == text_of(choice)
    for token_id, entry in zip(tokens, content, strict=True):
        assert [top["logprob"] for top in entry["top_logprobs"]] == [value for _, value in logprobs_of(token_id, 3).top]
        assert entry["token"] == ((entry["bytes"] and bytes(entry["bytes"]).decode(errors="replace")) or "<|end|>")
    assert any("\ufffd" in entry["token"] for entry in content), "the emoji is cut, and its bytes say how"


def test_logprobs_without_alternatives_and_without_asking() -> None:
    url, body = URLS["chat"]
    (choice,) = post(make_engine(), url, {**body, "logprobs": True}).json()["choices"]
    assert all(entry["top_logprobs"] == [] for entry in choice["logprobs"]["content"])
    (choice,) = post(make_engine(), url, {**body, "logprobs": False}).json()["choices"]
    assert choice["logprobs"] is None


def test_completion_logprobs_have_openai_s_older_form() -> None:
    (choice,) = post(make_engine(), "/v1/completions", {**COMPLETION, "logprobs": 2}).json()["choices"]
    logprobs = choice["logprobs"]
    tokens = [*SCRIPT, EOS]
    assert logprobs["token_logprobs"] == [logprobs_of(i, 0).logprob for i in tokens]
    assert [len(top) for top in logprobs["top_logprobs"]] == [3] * len(tokens), "two, and the token itself"
    ends = [*logprobs["text_offset"][1:], len(choice["text"])]
    for token, start, end in zip(logprobs["tokens"], logprobs["text_offset"], ends, strict=True):
        assert token.startswith("bytes:") or token in (choice["text"][start:end], "<|end|>")
    raw = [token.removeprefix("bytes:") for token in logprobs["tokens"] if token.startswith("bytes:")]
    assert bytes.fromhex("".join(raw).replace("\\x", "")).decode() == "🙂"


def test_logprobs_end_with_the_token_that_completes_a_stop_string() -> None:
    (choice,) = post(
        make_engine(max_step=6), "/v1/completions", {**COMPLETION, "logprobs": 0, "stop": ["brown"]}
    ).json()["choices"]
    needed = next(n for n in range(len(SCRIPT)) if "brown" in CODEC.decode(SCRIPT[:n]))
    assert choice["text"] == "the quick 🙂 "
    assert len(choice["logprobs"]["tokens"]) == needed


def test_numbers_that_json_has_not_are_clamped() -> None:
    record = TokenRecord(5, 0, TokenLogprobs(logprob=float("-inf"), top=((6, float("-inf")),)))
    assert chat_logprobs([record], CODEC.name_of, 1).content[0].logprob == LOWEST
    assert completion_logprobs([record], CODEC.name_of, 1).token_logprobs == [LOWEST]


@pytest.mark.parametrize("prompt", ["go 🙂", [5, 6, EOS, 7]])
def test_echo_shows_the_prompt_and_its_logprobs(prompt: Any) -> None:
    engine = make_engine()
    body = {**COMPLETION, "prompt": prompt, "echo": True, "logprobs": 1, "stop": ["go", "fox"]}
    (choice,) = post(engine, "/v1/completions", body).json()["choices"]
    ids = engine.submitted[0].prompt
    shown = CODEC.decode(ids)
    assert choice["text"] == shown + TEXT[: TEXT.index("fox")], "a stop string in the prompt stops nothing"
    assert engine.submitted[0].sampling.num_prompt_logprobs == 1
    values = choice["logprobs"]["token_logprobs"]
    assert values[: len(ids)] == [None, *(logprobs_of(i, 0).logprob for i in ids[1:])]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"][len(ids)] == len(shown)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_can_be_scored_without_an_answer(stream: bool) -> None:
    engine = make_engine()
    body = {**COMPLETION, "prompt": "go now", "echo": True, "logprobs": 0, "max_tokens": 0}
    response = post(engine, "/v1/completions", {**body, **(FULL if stream else {})})
    document = stream_of(response)[0] if stream else response.json()
    (choice,) = document["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("go now", "length")
    assert len(choice["logprobs"]["tokens"]) == len(CODEC.encode("go now"))
    usage = (stream_of(response)[-2] if stream else document)["usage"]
    assert usage["completion_tokens"] == 0
    assert engine.submitted[0].sampling.max_tokens == 1


@pytest.mark.parametrize("kind", URLS)
def test_token_granularity_has_one_event_per_token(kind: str) -> None:
    url, body = URLS[kind]
    engine = make_engine(max_step=5)
    *chunks, _ = stream_of(post(engine, url, {**body, "stream": True, "stream_granularity": "token"}))
    assert len(chunks) == len(SCRIPT) + 1
    assert "".join(text_of(chunk["choices"][0]) for chunk in chunks) == TEXT
    *steps, _ = stream_of(post(engine, url, {**body, "stream": True}))
    assert len(steps) < len(chunks)


def test_a_stop_token_of_the_client_s_ends_the_answer_unseen_but_counted() -> None:
    stop_id = SCRIPT[6]
    index = SCRIPT.index(stop_id)
    body = {**COMPLETION, "stop_token_ids": [stop_id], "logprobs": 0}
    document = post(make_engine(max_step=4), "/v1/completions", body).json()
    assert document["choices"][0]["text"] == CODEC.decode(SCRIPT[:index]).rstrip("\ufffd")
    assert document["choices"][0]["finish_reason"] == "stop"
    assert document["usage"]["completion_tokens"] == index + 1 == len(document["choices"][0]["logprobs"]["tokens"])


def test_ignore_eos_goes_on_to_max_tokens() -> None:
    engine = make_engine()
    document = post(engine, "/v1/completions", {**COMPLETION, "ignore_eos": True}).json()
    assert engine.submitted[0].sampling.stop_token_ids == ()
    assert (document["choices"][0]["finish_reason"], document["usage"]["completion_tokens"]) == ("length", 100)


def test_min_tokens_passes_over_stop_strings_that_come_too_early() -> None:
    body = {**COMPLETION, "stop": ["o"], "logprobs": 0}
    early = post(make_engine(), "/v1/completions", body).json()
    needed = next(n for n in range(len(SCRIPT)) if "and g" in CODEC.decode(SCRIPT[:n]))
    late = post(make_engine(), "/v1/completions", {**body, "min_tokens": needed}).json()
    assert early["choices"][0]["text"] == "the quick 🙂 br"
    assert late["usage"]["completion_tokens"] >= needed
    assert late["choices"][0]["text"] == TEXT[: TEXT.index("go") + 1]


def test_every_sampling_option_reaches_the_engine() -> None:
    engine = make_engine()
    body = {
        **COMPLETION,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": -1,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {"5": -100, "6": 3.5},
        "min_tokens": 3,
        "stop_token_ids": [9, EOS],
        "best_of": 1,
    }
    assert post(engine, "/v1/completions", body).status_code == 200
    sampling = engine.submitted[0].sampling
    assert (sampling.top_k, sampling.min_p, sampling.min_tokens) == (7, 0.1, 3)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-1, 0.5)
    assert sampling.repetition_penalty == 1.2
    assert sampling.logit_bias == ((5, -100), (6, 3.5))
    assert sampling.stop_token_ids == (EOS, 9)
    assert (sampling.num_logprobs, sampling.num_prompt_logprobs, sampling.grammar) == (None, None, None)
    post(engine, "/v1/completions", {**COMPLETION, "top_k": -1})
    assert engine.submitted[1].sampling.top_k == 0


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"logit_bias": {str(LIMITS.vocab_size): 1}}, "logit_bias"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [10**30]}, "stop_token_ids"),
        ({"min_tokens": 101}, "min_tokens"),
        ({"prompt": ["go", ""]}, "prompt"),
        ({"prompt": [[5], [LIMITS.vocab_size]]}, "prompt"),
        ({"prompt": [[5], [5] * 300]}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"best_of": 2}, "best_of"),
    ],
)
def test_values_that_this_model_cannot_take_are_refused(options: dict[str, Any], field: str) -> None:
    engine = make_engine()
    response = post(engine, "/v1/completions", {**COMPLETION, **options})
    assert response.status_code == 400
    assert error_of(response)["param"] == field
    assert not engine.submitted
