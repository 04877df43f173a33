"""The HTTP application over a fake engine: responses, ids, and what is released when a client disconnects."""

from __future__ import annotations

import asyncio
import json
from importlib.metadata import version
from typing import Any

import httpx
import pytest
from api_harness import (
    CHAT,
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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deployments.engine_client import Health
from deployments.http.app import attach, build_api
from deployments.openai.choice_stream import ChoiceStream, read_text_deltas
from deployments.text.detokenizer import TextStream
from engine.messages import SamplingParams, Submit


def test_a_chat_completion_has_openai_shape_and_exact_usage() -> None:
    engine = make_engine()
    response = post(engine, *URLS["chat"])
    document = response.json()
    assert document.pop("created") > 10**9
    assert document.pop("id") == "chatcmpl-" + response.headers["x-request-id"]
    num_prompt, num_tokens = len(engine.submitted[0].prompt), len(SCRIPT) + 1
    usage = document.pop("usage")
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_prompt, num_tokens)
    assert usage["total_tokens"] == num_prompt + num_tokens
    assert usage["prompt_tokens_details"]["cached_tokens"] == num_prompt // 2
    drafted, accepted = usage["speculative"]["drafted"], usage["speculative"]["accepted"]
    assert drafted > accepted > 0
    assert usage["completion_tokens_details"] == {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": drafted - accepted,
        "reasoning_tokens": 0,
    }
    assert document == {
        "object": "chat.completion",
        "model": "tiny",
        "system_fingerprint": "fp",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": TEXT, "refusal": None},
                "finish_reason": "stop",
                "logprobs": None,
            }
        ],
    }


@pytest.mark.parametrize("kind", URLS)
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10**6),
    max_step=st.integers(1, 6),
    max_tokens=st.integers(1, 80),
    stop=st.sampled_from([None, "stop", ["🙂", "fox"], "go, n", "never", "quick \n"]),
)
def test_a_stream_and_a_whole_answer_agree(
    kind: str, seed: int, max_step: int, max_tokens: int, stop: str | list[str] | None
) -> None:
    engine = make_engine(seed=seed, max_step=max_step)
    url, body = URLS[kind]
    body = {**body, "max_tokens": max_tokens, "stop": stop}
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}

    async def both(client: httpx.AsyncClient) -> tuple[httpx.Response, httpx.Response]:
        return await client.post(url, json=body), await client.post(url, json=streamed)

    whole, stream = talk(engine, both)
    document, (*chunks, usage, done) = whole.json(), stream_of(stream)
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert "".join(text_of(chunk["choices"][0]) for chunk in chunks) == text_of(document["choices"][0])
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [document["choices"][0]["finish_reason"]]
    assert usage["usage"] == document["usage"]
    assert usage["choices"] == []
    assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1
    assert not engine.running
    assert document["usage"]["completion_tokens"] <= max_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_request_in_the_engine_and_counts_only_its_tokens(stream: bool) -> None:
    engine = make_engine(max_step=4)
    options = {"stream_options": {"include_usage": True}} if stream else {}
    response = post(engine, "/v1/completions", {**COMPLETION, "stop": ["fox", "café"], "stream": stream, **options})
    last = stream_of(response)[-2] if stream else response.json()
    needed = next(n for n in range(len(SCRIPT)) if "fox" in CODEC.decode(SCRIPT[:n]))
    assert last["usage"]["completion_tokens"] == needed
    assert engine.aborted == [engine.submitted[0].request_id]
    if not stream:
        assert last["choices"][0] == {
            "text": "the quick 🙂 brown ",
            "finish_reason": "stop",
            "index": 0,
            "logprobs": None,
        }


def test_a_stop_string_frees_the_engine_before_the_client_has_read_the_end() -> None:
    engine = make_engine(max_step=4)
    submit = Submit(request_id="r", prompt=(5,), sampling=SamplingParams(max_tokens=100))

    async def run() -> None:
        deltas = read_text_deltas(engine.generate(submit), ChoiceStream(TextStream(CODEC.detokenizer(), ["fox"])))
        while (await anext(deltas)).finish_reason is None:
            assert engine.running
        assert engine.aborted == ["r"]
        await deltas.aclose()

    asyncio.run(run())


def test_what_a_client_asks_for_reaches_the_engine() -> None:
    engine = make_engine()
    body = {
        **COMPLETION,
        "prompt": [5, 6, 7],
        "temperature": 0,
        "top_p": 0.5,
        "seed": -3,
        "max_tokens": 4,
        "speculative": {"enabled": False, "max_k": 2},
    }
    assert post(engine, "/v1/completions", body, headers={"x-request-id": "mine"}).status_code == 200
    (submit,) = engine.submitted
    assert (submit.request_id, submit.prompt) == ("mine", (5, 6, 7))
    assert (submit.sampling.temperature, submit.sampling.top_p) == (0, 0.5)
    assert (submit.sampling.seed, submit.sampling.max_tokens) == (-3, 4)
    assert submit.sampling.stop_token_ids == (EOS,)
    assert (submit.speculative.enabled, submit.speculative.max_k) == (False, 2)


def test_defaults_are_openai_s() -> None:
    engine = make_engine()

    async def both(client: httpx.AsyncClient) -> None:
        await client.post("/v1/chat/completions", json=CHAT)
        await client.post("/v1/completions", json={"model": "tiny", "prompt": "go"})
        await client.post("/v1/completions", json={"model": "tiny", "prompt": [5] * 250})

    talk(engine, both)
    chat, completion, clipped = engine.submitted
    assert chat.sampling.max_tokens == LIMITS.max_model_len - len(chat.prompt)
    assert (completion.sampling.max_tokens, clipped.sampling.max_tokens) == (16, 6)
    assert (chat.sampling.temperature, chat.sampling.top_p, chat.sampling.seed) == (1, 1, None)
    assert (chat.speculative.enabled, chat.speculative.max_k) == (True, None)


def test_models_are_listed_and_found_by_name() -> None:
    engine = make_engine()
    listed = talk(engine, lambda client: client.get("/v1/models")).json()
    assert listed["object"] == "list"
    (card,) = listed["data"]
    assert card == {
        "id": "tiny",
        "object": "model",
        "created": 7,
        "owned_by": "paceline",
        "max_model_len": 256,
        "root": "tiny",
        "parent": None,
    }
    assert talk(engine, lambda client: client.get("/v1/models/tiny")).json() == card
    response = talk(engine, lambda client: client.get("/v1/models/some/one"))
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")


def test_small_routes() -> None:
    assert talk(make_engine(), lambda client: client.get("/version")).json() == {"version": version("paceline")}
    for status, expected in (("ok", 200), ("starting", 503)):
        engine = make_engine(state=Health(status=status, reason="because", draft="down"))
        response = talk(engine, lambda client: client.get("/ping"))
        assert (response.status_code, response.content) == (expected, b"")
    response = post(make_engine(), "/v1/embeddings", {"model": "tiny", "input": "go"})
    assert (response.status_code, error_of(response)["code"]) == (404, "unknown_route")
    assert "no embeddings" in error_of(response)["message"]


@pytest.mark.parametrize(("status", "expected"), [("ok", 200), ("degraded", 200), ("starting", 503), ("dead", 503)])
def test_health_says_why(status: Any, expected: int) -> None:
    engine = make_engine(state=Health(status=status, reason="because", draft="down"))
    response = talk(engine, lambda client: client.get("/health"))
    assert response.status_code == expected
    assert response.json() == {"status": status, "reason": "because", "draft": "down"}


def test_dependencies_may_come_later() -> None:
    async def run() -> list[int]:
        app = build_api()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            before = [await client.get("/health"), await client.post("/v1/completions", json=COMPLETION)]
            assert error_of(before[1])["code"] == "engine_unavailable"
            attach(app, dependencies(make_engine()))
            after = [await client.get("/health"), await client.post("/v1/completions", json=COMPLETION)]
            return [response.status_code for response in before + after]

    assert asyncio.run(run()) == [503, 503, 200, 200]


@pytest.mark.parametrize(
    ("given_id", "is_kept"), [("a b~!", True), ("x" * 128, True), ("x" * 129, False), ("é", False), ("", False)]
)
def test_request_ids_are_echoed_or_made(given_id: str, is_kept: bool) -> None:
    engine = make_engine()
    headers = {"x-request-id": given_id.encode("latin-1")}
    response = talk(engine, lambda client: client.post("/v1/completions", json=COMPLETION, headers=headers))
    echoed = response.headers["x-request-id"]
    assert (echoed == given_id) == is_kept
    assert echoed
    assert engine.submitted[0].request_id == echoed


def test_two_running_requests_of_one_id_are_told_apart_and_the_id_is_free_again() -> None:
    engine = make_engine(step_s=0.001)

    async def run(client: httpx.AsyncClient) -> list[str]:
        send = lambda: client.post("/v1/completions", json=COMPLETION, headers={"x-request-id": "same"})  # noqa: E731
        responses = [*await asyncio.gather(send(), send(), send()), await send()]
        return [response.headers["x-request-id"] for response in responses]

    assert set(talk(engine, run)) == {"same"}
    assert sorted(submit.request_id for submit in engine.submitted) == ["same", "same", "same-2", "same-3"]


def test_many_streams_at_once_each_get_their_own_answer() -> None:
    engine = make_engine(step_s=0.002)
    num_streams = 32

    async def run(client: httpx.AsyncClient) -> list[httpx.Response]:
        bodies = [{**COMPLETION, "stream": True, "max_tokens": 5 + index} for index in range(num_streams)]
        return await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))

    for index, response in enumerate(talk(engine, run)):
        *chunks, _ = stream_of(response)
        text = "".join(text_of(chunk["choices"][0]) for chunk in chunks)
        assert text == CODEC.decode([*SCRIPT, EOS][: 5 + index]).rstrip("\ufffd")
    assert engine.peak_running == num_streams
    assert not engine.running


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_it_waits_frees_its_request(stream: bool) -> None:
    """Before the first byte nothing is sent, so only the watch over the connection notices."""
    engine = make_engine(step_s=3600)
    raw = json.dumps({**COMPLETION, "stream": stream}).encode()

    async def run() -> None:
        messages = [{"type": "http.request", "body": raw, "more_body": False}]

        async def receive() -> dict[str, object]:
            if messages:
                return messages.pop()
            while not engine.running:
                await asyncio.sleep(0)
            return {"type": "http.disconnect"}

        async def send(message: dict[str, object]) -> None:
            pass

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        deps = dependencies(engine)
        await asyncio.wait_for(build_api(deps)(scope, receive, send), 5)
        assert len(deps.running) == 0

    asyncio.run(run())
    assert not engine.running
    assert len(engine.aborted) == 1
