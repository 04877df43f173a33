"""Errors as a client sees them: status, OpenAI's body and the field's name, without internal details."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest
from api_harness import CHAT, COMPLETION, LIMITS, URLS, dependencies, error_of, make_engine, post, stream_of, talk
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.http.admission import Admission
from deployments.http.app import build_api
from deployments.openai.requests import ChatBody, CompletionBody
from engine.errors import EngineError, EngineUnavailable, InvalidRequest, QueueFull, ShardDown


@pytest.mark.parametrize(
    ("url", "body", "status", "param", "code"),
    [
        ("/v1/chat/completions", {**CHAT, "model": "other"}, 404, "model", "model_not_found"),
        ("/v1/completions", {**COMPLETION, "model": "other"}, 404, "model", "model_not_found"),
        ("/v1/chat/completions", {**CHAT, "messages": []}, 400, "messages", None),
        ("/v1/chat/completions", {**CHAT, "temperature": 9}, 400, "temperature", None),
        ("/v1/chat/completions", {**CHAT, "frobnicate": 9}, 400, "frobnicate", None),
        ("/v1/completions", {**COMPLETION, "prompt": ""}, 400, "prompt", None),
        ("/v1/completions", {**COMPLETION, "prompt": [10**6]}, 400, "prompt", None),
        ("/v1/completions", {**COMPLETION, "prompt": [-1]}, 400, "prompt", None),
        ("/v1/completions", {**COMPLETION, "prompt": [5] * 256}, 400, "prompt", "context_length_exceeded"),
        (
            "/v1/chat/completions",
            {**CHAT, "messages": [{"role": "user", "content": "go " * 900}]},
            400,
            "messages",
            "context_length_exceeded",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_name_the_field_and_never_reach_the_engine(
    url: str, body: dict[str, Any], status: int, param: str, code: str | None, stream: bool
) -> None:
    engine = make_engine()
    response = post(engine, url, {**body, "stream": stream})
    error = error_of(response)
    assert (response.status_code, error["param"], error["code"]) == (status, param, code)
    assert error["type"] == "invalid_request_error"
    assert not engine.submitted


def test_the_longest_prompt_that_fits_is_served() -> None:
    body = {**COMPLETION, "prompt": [5] * 255, "max_tokens": 1}
    assert post(make_engine(), "/v1/completions", body).status_code == 200


@pytest.mark.parametrize(
    ("url", "body", "num_left"),
    [
        ("/v1/completions", {**COMPLETION, "prompt": [5] * 157, "ignore_eos": True}, 99),
        ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 10**6, "ignore_eos": True}, None),
    ],
)
@pytest.mark.parametrize("is_strict", [False, True])
def test_more_tokens_than_are_left_end_at_the_context_or_are_refused(
    url: str, body: dict[str, Any], num_left: int | None, is_strict: bool
) -> None:
    engine = make_engine()
    limits = replace(LIMITS, strict_max_tokens=is_strict)

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(build_api(dependencies(engine, limits=limits)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(url, json=body)

    response = asyncio.run(run())
    if not is_strict:
        assert response.json()["choices"][0]["finish_reason"] == "length"
        (submit,) = engine.submitted
        assert submit.sampling.max_tokens == LIMITS.max_model_len - len(submit.prompt)
        assert num_left in (None, submit.sampling.max_tokens)
        return
    assert response.status_code == 400
    assert error_of(response)["code"] == "context_length_exceeded"
    assert "maximum context length is 256 tokens" in error_of(response)["message"]


@pytest.mark.parametrize(("max_prompt_tokens", "length"), [(None, 256), (8, 9)])
def test_a_prompt_that_does_not_fit_says_so_in_the_words_that_gateways_look_for(
    max_prompt_tokens: int | None, length: int
) -> None:
    limits = replace(LIMITS, max_prompt_tokens=max_prompt_tokens)

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(build_api(dependencies(make_engine(), limits=limits)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post("/v1/completions", json={**COMPLETION, "prompt": [5] * length})

    error = error_of(asyncio.run(run()))
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith("This model's maximum context length is 256 tokens.")


@pytest.mark.parametrize(
    ("error", "status", "kind", "retry_after"),
    [
        (QueueFull("256 requests wait", retry_after_s=2.2), 429, "rate_limit_error", "3"),
        (EngineUnavailable("starting"), 503, "service_unavailable_error", "5"),
        (ShardDown("shard 1 died"), 503, "service_unavailable_error", "5"),
        (EngineError("out of luck"), 500, "server_error", None),
        (InvalidRequest("not that seed", field="seed"), 400, "invalid_request_error", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_of_the_engine_become_a_status_also_for_streams(
    error: Exception, status: int, kind: str, retry_after: str | None, stream: bool
) -> None:
    response = post(make_engine(refusal=error), "/v1/completions", {**COMPLETION, "stream": stream})
    assert response.status_code == status
    assert error_of(response)["type"] == kind
    assert error_of(response)["message"] == str(error)
    assert response.headers.get("retry-after") == retry_after


def test_a_failure_in_the_middle_is_an_error_and_never_a_short_response() -> None:
    engine = make_engine(fail_after=10, failure=EngineError("a step failed"))
    response = post(engine, "/v1/completions", COMPLETION)
    assert (response.status_code, error_of(response)["message"]) == (500, "a step failed")
    *chunks, last = stream_of(post(engine, "/v1/completions", {**COMPLETION, "stream": True}))
    assert chunks
    assert last["error"]["message"] == "a step failed"


def test_an_unexpected_exception_says_nothing_of_the_inside(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(refusal=ZeroDivisionError("secret"))
    response = post(engine, "/v1/completions", COMPLETION, headers={"x-request-id": "r9"})
    assert response.status_code == 500
    assert error_of(response)["code"] == "internal_error"
    assert "secret" not in response.text
    assert "r9" in caplog.text


@pytest.mark.parametrize(
    ("method", "url", "status"),
    [("GET", "/v2/x", 404), ("GET", "/v1/completions", 405), ("DELETE", "/v1/models", 405), ("POST", "/v1/chat", 404)],
)
def test_wrong_routes_and_methods_have_the_same_body(method: str, url: str, status: int) -> None:
    response = talk(make_engine(), lambda client: client.request(method, url))
    assert response.status_code == status
    assert url in error_of(response)["message"]
    assert ("allow" in response.headers) == (status == 405)


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{", {}, 400),
        (b"\xff\xfe", {}, 400),
        (b"", {}, 400),
        (b"[1]", {}, 400),
        (b"{}", {"content-type": "text/plain"}, 415),
        (b" " * 20_001, {}, 413),
    ],
)
def test_bad_bodies_are_refused(content: bytes, headers: dict[str, str], status: int) -> None:
    async def send(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post("/v1/completions", content=content, headers=headers)

    response = talk(make_engine(), send)
    assert response.status_code == status
    assert error_of(response)["type"] == "invalid_request_error"


def test_a_body_of_undeclared_length_is_cut_off_at_the_limit() -> None:
    num_sent = 0

    async def endless():
        nonlocal num_sent
        while True:
            num_sent += 1000
            yield b" " * 1000

    response = talk(make_engine(), lambda client: client.post("/v1/completions", content=endless()))
    assert response.status_code == 413
    assert num_sent <= LIMITS.max_body_bytes + 1000


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


fields = st.sampled_from(sorted(ChatBody.model_fields | CompletionBody.model_fields))


@pytest.mark.parametrize("kind", URLS)
def test_random_bodies_never_fail_inside(kind: str) -> None:
    url, good = URLS[kind]
    engine = make_engine()
    app = build_api(dependencies(engine))

    @settings(deadline=None, max_examples=200)
    @given(changes=st.dictionaries(fields, json_values, max_size=3), dropped=st.sets(fields, max_size=2))
    def check(changes: dict[str, Any], dropped: set[str]) -> None:
        body = {key: value for key, value in {**good, **changes}.items() if key not in dropped - changes.keys()}

        async def run() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
                return await client.post(url, content=json.dumps(body), headers={"content-type": "application/json"})

        response = asyncio.run(run())
        assert response.status_code in (200, 400, 404)
        if response.status_code != 200:
            assert error_of(response)["message"]

    check()
    assert not engine.running


def test_bodies_that_are_refused_are_counted() -> None:
    causes: list[str] = []
    bodies = [
        ("/v1/chat/completions", CHAT | {"temperature": 9}),
        ("/v1/completions", COMPLETION | {"prompt": ""}),
        ("/v1/responses", {"model": "tiny", "input": []}),
        ("/v1/chat/completions", CHAT),
    ]

    async def run() -> list[int]:
        needed = replace(dependencies(make_engine()), admission=Admission(10, on_refused=causes.append))
        transport = httpx.ASGITransport(build_api(needed))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return [(await client.post(url, json=body)).status_code for url, body in bodies]

    assert asyncio.run(run()) == [400, 400, 400, 200]
    assert causes == ["invalid_request"] * 3
