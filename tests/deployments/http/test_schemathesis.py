"""Requests generated from the server's own OpenAPI document, right ones and wrong ones, over a fake engine.

Promise: no response is a 5xx or takes long, each has a documented status, type and shape, and everything that the
document forbids is refused. A few hundred requests always, thousands with slow tests; seeded, so failures repeat.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections import Counter
from dataclasses import replace
from typing import Any

import httpx
import pytest
import schemathesis
from api_harness import LIMITS, dependencies, make_engine, talk, tool_codec
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis.generation import GenerationMode

from deployments.http.app import build_api
from deployments.http.openapi import openapi_document

DEADLINE_S = 10.0
"""Bound for one request on a busy machine; the usual time is milliseconds."""
CODEC = tool_codec("hermes")
SCHEMA = schemathesis.openapi.from_dict(json.loads(openapi_document(("tiny",))))
OPERATIONS = {f"{op.method.upper()} {op.path}": op for op in (found.ok() for found in SCHEMA.get_all_operations())}
POSTS = [name for name in OPERATIONS if name.startswith("POST")]
READS = [name for name in OPERATIONS if name.startswith(("GET", "DELETE"))]


def sensible(body: Any, *, streams: bool) -> Any:
    """A valid body whose fields are also compatible; otherwise most bodies would be refused early."""
    if not isinstance(body, dict):
        return body
    body = copy.deepcopy(body)
    if streams and ("messages" in body or "prompt" in body):
        body["stream"] = True
    for turn in body.get("messages", []):
        if turn.get("role") != "assistant":
            turn.pop("reasoning_content", None)
            turn.pop("reasoning", None)
        if turn.get("role") != "tool":
            turn.pop("tool_call_id", None)
        else:
            turn.setdefault("tool_call_id", "call_1")
            turn["tool_call_id"] = turn["tool_call_id"] or "call_1"
        calls = turn.pop("tool_calls", None)
        if turn.get("role") == "assistant" and calls:
            turn["tool_calls"] = calls
            for call in calls:
                call["function"]["arguments"] = json.dumps({"a": call["function"]["arguments"]})
        turn["content"] = turn.get("content") or "go"
    guided = [name for name in body if name.startswith("guided_") or name in ("response_format", "structured_outputs")]
    if body.get("structured_outputs"):
        body["structured_outputs"] = {"choice": ["yes", "no"]}
    for name in ("reasoning_effort", "enable_thinking", "reasoning", "suffix", "text"):
        body.pop(name, None)
    if "input" in body:
        body["input"] = sensible_input(body["input"])
        body.pop("previous_response_id", None)
        body["tools"] = (body.get("tools") or [])[:1]
        if isinstance(body.get("tool_choice"), dict) or not body["tools"]:
            body.pop("tool_choice", None)
    for name in guided[1:] if "messages" not in body or not body.get("tools") else guided:
        del body[name]
    if not body.get("stream"):
        body.pop("stream_options", None)
        body.pop("stream_granularity", None)
    for name, needed in (("top_logprobs", "logprobs"), ("parallel_tool_calls", "tools"), ("tool_choice", "tools")):
        if not body.get(needed):
            body.pop(name, None)
    for name in ("max_tokens", "max_completion_tokens", "min_tokens", "continue_final_message", "best_of"):
        body.pop(name, None)
    for name in ("stop_token_ids", "tokens"):
        if body.get(name):
            body[name] = [abs(token_id) % 300 for token_id in body[name]]
    if body.get("logit_bias"):
        body["logit_bias"] = {str(int(key) % 300): value for key, value in body["logit_bias"].items()}
    if "prompt" in body:
        body["prompt"] = sensible_prompt(body["prompt"])
    return body


def sensible_input(items: Any) -> Any:
    if not isinstance(items, list):
        return items or "go"
    for item in items:
        if "arguments" in item:
            item["arguments"] = json.dumps({"a": item["arguments"]})
        if "content" in item and item.get("type") != "reasoning":
            item["content"] = item["content"] or "go"
    return [*items, {"role": "user", "content": "go"}]


def sensible_prompt(prompt: Any) -> Any:
    if isinstance(prompt, list):
        return [sensible_prompt(item) for item in prompt]
    return abs(int(prompt)) % 300 if isinstance(prompt, int | float) else prompt or "go"


async def send(app: Any, case: schemathesis.Case) -> httpx.Response:
    kwargs = case.as_transport_kwargs(base_url="http://test")
    kwargs = {
        key: value for key, value in kwargs.items() if key in ("method", "url", "headers", "json", "data", "params")
    }
    if not isinstance(kwargs.get("data"), dict | None):
        kwargs["content"] = kwargs.pop("data")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
        return await client.request(**kwargs)


def run(name: str, mode: GenerationMode, num_requests: int, *, is_sensible: bool = False) -> Counter[int]:
    """Send requests of an operation; returns the count of each status."""
    engine = make_engine(max_step=8)
    app = build_api(dependencies(engine, CODEC, replace(LIMITS, max_body_bytes=2**20)))
    checks = [
        schemathesis.checks.not_a_server_error,
        schemathesis.checks.CHECKS.get_one("status_code_conformance"),
        schemathesis.checks.CHECKS.get_one("content_type_conformance"),
        schemathesis.checks.CHECKS.get_one("response_schema_conformance"),
    ]
    if mode is GenerationMode.NEGATIVE:
        checks.append(schemathesis.checks.CHECKS.get_one("negative_data_rejection"))
    statuses: Counter[int] = Counter()

    @seed(20)
    @settings(
        max_examples=num_requests,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(case=OPERATIONS[name].as_strategy(generation_mode=mode), streams=st.booleans())
    def check(case: schemathesis.Case, streams: bool) -> None:
        if is_sensible:
            case.body = sensible(case.body, streams=streams and name.startswith("POST /v1/"))
        response = asyncio.run(asyncio.wait_for(send(app, case), DEADLINE_S))
        statuses[response.status_code] += 1
        case.validate_response(response, checks=checks)

    check()
    assert not engine.running
    return statuses


@pytest.mark.parametrize("name", READS)
def test_generated_reads(name: str) -> None:
    run(name, GenerationMode.POSITIVE, 10)


@pytest.mark.parametrize("name", POSTS)
def test_generated_requests(name: str) -> None:
    run(name, GenerationMode.POSITIVE, 30)
    statuses = run(name, GenerationMode.POSITIVE, 50, is_sensible=True)
    assert statuses[200] >= 15, f"too few reach the engine to say anything: {statuses}"


@pytest.mark.parametrize("name", POSTS)
def test_generated_wrong_requests_are_refused(name: str) -> None:
    assert run(name, GenerationMode.NEGATIVE, 40)[200] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", POSTS)
def test_thousands_of_generated_requests(name: str) -> None:
    """At least 2,400 over the four operations."""
    for mode, is_sensible in ((GenerationMode.POSITIVE, False), (GenerationMode.POSITIVE, True)):
        assert sum(run(name, mode, 200, is_sensible=is_sensible).values()) >= 200
    assert sum(run(name, GenerationMode.NEGATIVE, 200).values()) >= 200


def test_the_document_is_served_and_names_every_route_of_the_interface() -> None:
    response = talk(make_engine(), lambda client: client.get("/openapi.json"))
    assert response.json() == json.loads(openapi_document(("tiny",)))
    documented = set(response.json()["paths"])
    routes = {
        route.path.replace(":path", ""): route.methods for route in build_api().routes if hasattr(route, "methods")
    }
    assert documented <= routes.keys()
    interface = {path for path, methods in routes.items() if path.startswith("/v1") or "POST" in methods}
    assert interface <= documented
