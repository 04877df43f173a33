"""Every limit of a request: a value just beyond it is refused with the name of the field."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from typing import Any

import httpx
import pytest
from api_harness import CHAT, CODEC, COMPLETION, LIMITS, URLS, dependencies, error_of, make_engine, post
from starlette.requests import Request

from deployments.errors import BodyTooSlow, to_http
from deployments.http.app import build_api
from deployments.http.connection import read_body
from deployments.openai.fields import MAX_BIASES, MAX_CHOICES, MAX_N, MAX_PROMPTS, MAX_STOP_IDS, MAX_STOP_LEN, MAX_STOPS
from deployments.openai.generation_body import MAX_TIMEOUT_S
from deployments.openai.messages import MAX_TOOLS
from deployments.openai.prompts import encode_prompts
from deployments.openai.requests import MAX_TEMPLATE_KWARGS, CompletionBody
from deployments.openai.structured import MAX_CHOICE_STRINGS, MAX_DEPTH, MAX_GRAMMAR_LEN, MAX_REGEX_LEN
from engine.errors import InvalidRequest


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def tool(index: int) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"f{index}"}}


BEYOND: list[tuple[str, str, dict[str, Any]]] = [
    ("chat", "n", {"n": MAX_N + 1}),
    ("completion", "n", {"n": MAX_N, "prompt": ["go"] * (MAX_CHOICES // MAX_N + 1)}),
    ("completion", "prompt", {"prompt": ["go"] * (MAX_PROMPTS + 1)}),
    ("completion", "prompt", {"prompt": "go " * 1000}),
    ("chat", "stop", {"stop": [str(i) for i in range(MAX_STOPS + 1)]}),
    ("chat", "stop", {"stop": "x" * (MAX_STOP_LEN + 1)}),
    ("chat", "stop_token_ids", {"stop_token_ids": list(range(MAX_STOP_IDS + 1))}),
    ("chat", "logit_bias", {"logit_bias": {str(i): 1 for i in range(MAX_BIASES + 1)}}),
    ("chat", "logit_bias", {"logit_bias": {"1": 1e9}}),
    ("chat", "top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("completion", "logprobs", {"logprobs": 6}),
    ("chat", "tools", {"tools": [tool(i) for i in range(MAX_TOOLS + 1)]}),
    ("chat", "chat_template_kwargs", {"chat_template_kwargs": {f"k{i}": 1 for i in range(MAX_TEMPLATE_KWARGS + 1)}}),
    ("chat", "guided_regex", {"guided_regex": "a" * (MAX_REGEX_LEN + 1)}),
    ("chat", "guided_grammar", {"guided_grammar": 'root ::= "' + "a" * MAX_GRAMMAR_LEN + '"'}),
    ("chat", "guided_choice", {"guided_choice": [str(i) for i in range(MAX_CHOICE_STRINGS + 1)]}),
    ("chat", "guided_json", {"guided_json": deep(MAX_DEPTH)}),
    ("chat", "guided_json", {"guided_json": json.dumps({"description": "x" * MAX_GRAMMAR_LEN})}),
    ("chat", "timeout", {"timeout": MAX_TIMEOUT_S + 1}),
    ("chat", "timeout", {"timeout": 0}),
    ("chat", "temperature", {"temperature": 1e300}),
    ("chat", "seed", {"seed": 2**64}),
]


@pytest.mark.parametrize(("kind", "field", "extra"), BEYOND, ids=lambda value: value if isinstance(value, str) else "")
def test_beyond_a_limit(kind: str, field: str, extra: dict[str, Any]) -> None:
    url, body = URLS[kind]
    engine = make_engine()
    deps = replace(dependencies(engine), limits=replace(LIMITS, max_body_bytes=1 << 20))
    begin = time.monotonic()

    async def run() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(build_api(deps)), base_url="http://test") as client:
            return await client.post(url, json=body | extra)

    response = asyncio.run(run())
    assert response.status_code == 400
    assert (error_of(response)["param"] or "").split("[")[0] == field
    assert engine.submitted == []
    assert time.monotonic() - begin < 10


def test_bodies_are_cut_off_by_size_whatever_they_claim() -> None:
    for headers in ({}, {"content-length": "10"}):
        response = post(
            make_engine(), "/v1/completions", COMPLETION | {"user": "x" * LIMITS.max_body_bytes}, headers=headers
        )
        assert response.status_code == 413
        assert error_of(response)["code"] == "request_too_large"


def test_a_body_that_never_ends_is_given_up() -> None:
    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.02)
        return {"type": "http.request", "body": b" ", "more_body": True}

    request = Request({"type": "http", "method": "POST", "headers": []}, receive)
    with pytest.raises(BodyTooSlow, match=r"within 0\.2 s"):
        asyncio.run(read_body(request, max_bytes=1000, timeout_s=0.2))
    assert to_http(BodyTooSlow("slow")).status == 408


def test_a_server_may_take_shorter_prompts_than_its_context() -> None:
    limits = replace(LIMITS, max_prompt_tokens=4)
    body = CompletionBody.model_validate(COMPLETION | {"prompt": [1, 2, 3, 4]}, strict=True)
    assert encode_prompts(body, CODEC, limits) == ((1, 2, 3, 4),)
    longer = CompletionBody.model_validate(COMPLETION | {"prompt": [1, 2, 3, 4, 5]}, strict=True)
    with pytest.raises(InvalidRequest, match="at most 4"):
        encode_prompts(longer, CODEC, limits)


@pytest.mark.parametrize(
    "extra",
    [
        {"guided_regex": "(a{1000}){1000}"},
        {"guided_regex": "((a{0,50}){0,50}){0,50}"},
        {"guided_regex": "(((((a*)*)*)*)*)*b"},
        {
            "guided_grammar": "\n".join(
                ["root ::= r0", *(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(40)), 'r40 ::= "b"']
            )
        },
        {"guided_json": {"type": "array", "minItems": 10**9}},
        {"guided_json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(900)}}},
    ],
    ids=["repeats", "nested repeats", "nested stars", "doubling rules", "many items", "many properties"],
)
def test_grammars_made_to_be_slow_are_checked_quickly(extra: dict[str, Any]) -> None:
    """The check in the replica. The engine compiles the grammar in a separate thread."""
    begin = time.monotonic()
    response = post(make_engine(), "/v1/chat/completions", CHAT | extra)
    assert time.monotonic() - begin < 8
    assert response.status_code in (200, 400, 413)
