"""The HTTP application over a fake engine, in process: answers, errors, ids, and who is let go when a client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx
import pytest
from fake_engine import FakeEngine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_tokenizer import byte_level

from deployments.api import ApiDependencies, ApiLimits, attach, build_api
from deployments.engine_client import Health
from deployments.protocol import ChatBody, CompletionBody
from deployments.text import TextCodec
from engine.errors import EngineError, EngineUnavailable, InvalidRequest, QueueFull, ShardDown

T = TypeVar("T")

TOKENIZER = byte_level()
EOS = TOKENIZER.eos_token_id
CODEC = TextCodec(TOKENIZER, eos_token_ids=[EOS])
TEXT = "the quick 🙂 brown fox\nstop and go, naïve café"
SCRIPT = CODEC.encode(TEXT)
LIMITS = ApiLimits(max_model_len=256, vocab_size=CODEC.vocab_size, max_body_bytes=20_000, inline_body_bytes=500)
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "go"}]}
COMPLETION = {"model": "tiny", "prompt": "go", "max_tokens": 100}
URLS = {"chat": ("/v1/chat/completions", CHAT), "completion": ("/v1/completions", COMPLETION)}


def make_engine(**options: Any) -> FakeEngine:
    return FakeEngine(**{"script": SCRIPT, "eos_token_id": EOS, **options})


def dependencies(engine: FakeEngine) -> ApiDependencies:
    return ApiDependencies(
        client_provider=lambda: engine,
        codec=CODEC,
        model_name="tiny",
        created=7,
        limits=LIMITS,
        system_fingerprint="fp",
    )


def talk(engine: FakeEngine, work: Callable[[httpx.AsyncClient], Awaitable[T]]) -> T:
    """Run `work` with a client of a fresh application."""

    async def run() -> T:
        transport = httpx.ASGITransport(build_api(dependencies(engine)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await work(client)

    return asyncio.run(run())


def post(engine: FakeEngine, url: str, body: dict[str, Any], **options: Any) -> httpx.Response:
    return talk(engine, lambda client: client.post(url, json=body, **options))


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert response.json().keys() == {"error"}
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]
    return error


def stream_of(response: httpx.Response) -> list[Any]:
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def text_of(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else choice.get("message", choice.get("delta")).get("content", "")


def test_a_chat_completion_has_openai_shape_and_exact_usage() -> None:
    engine = make_engine()
    response = post(engine, *URLS["chat"])
    answer = response.json()
    assert answer.pop("created") > 10**9
    assert answer.pop("id") == "chatcmpl-" + response.headers["x-request-id"]
    num_prompt, num_tokens = len(engine.submitted[0].prompt), len(SCRIPT) + 1
    usage = answer.pop("usage")
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_prompt, num_tokens)
    assert usage["total_tokens"] == num_prompt + num_tokens
    assert usage["prompt_tokens_details"]["cached_tokens"] == num_prompt // 2
    drafted, accepted = usage["speculative"]["drafted"], usage["speculative"]["accepted"]
    assert drafted > accepted > 0
    assert usage["completion_tokens_details"] == {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": drafted - accepted,
    }
    assert answer == {
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
    answer, (*chunks, usage, done) = whole.json(), stream_of(stream)
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert "".join(text_of(chunk["choices"][0]) for chunk in chunks) == text_of(answer["choices"][0])
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [answer["choices"][0]["finish_reason"]]
    assert usage["usage"] == answer["usage"]
    assert usage["choices"] == []
    assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1
    assert not engine.running
    assert answer["usage"]["completion_tokens"] <= max_tokens


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
        ("/v1/completions", {**COMPLETION, "prompt": [5] * 157}, 400, "max_tokens", "context_length_exceeded"),
        (
            "/v1/chat/completions",
            {**CHAT, "max_completion_tokens": 256},
            400,
            "max_completion_tokens",
            "context_length_exceeded",
        ),
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


def test_the_longest_request_that_fits_is_served() -> None:
    assert post(make_engine(), "/v1/completions", {**COMPLETION, "prompt": [5] * 156}).status_code == 200
    assert (
        post(make_engine(), "/v1/completions", {**COMPLETION, "prompt": [5] * 255, "max_tokens": 1}).status_code == 200
    )


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


@pytest.mark.parametrize("failure", [EngineError("a step failed"), "a step failed"])
def test_a_failure_in_the_middle_is_an_error_and_never_a_short_answer(failure: Exception | str) -> None:
    engine = make_engine(fail_after=10, failure=failure)
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


def test_models_are_listed_and_found_by_name() -> None:
    engine = make_engine()
    listed = talk(engine, lambda client: client.get("/v1/models")).json()
    assert listed["object"] == "list"
    (card,) = listed["data"]
    assert card == {"id": "tiny", "object": "model", "created": 7, "owned_by": "paceline", "max_model_len": 256}
    assert talk(engine, lambda client: client.get("/v1/models/tiny")).json() == card
    response = talk(engine, lambda client: client.get("/v1/models/some/one"))
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")


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
        assert text == CODEC.decode([*SCRIPT, EOS][: 5 + index])
    assert engine.peak_running == num_streams
    assert not engine.running


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_it_waits_frees_its_request(stream: bool) -> None:
    """Before the first byte nothing is being sent, so only watching the connection can tell."""
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
