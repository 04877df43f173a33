"""A fake engine behind the HTTP application, in process: what the tests of the application share.

Owns the script the engine answers with, the limits, and small readers of answers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx
from fake_engine import FakeEngine
from tiny_tokenizer import byte_level

from deployments.api import ApiDependencies, ApiLimits, build_api
from deployments.text import TextCodec

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
