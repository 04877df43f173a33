"""A fake engine behind the HTTP application, in process: shared by the tests of the application.

Owns the script of the engine, the limits, and helpers that read responses.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

import httpx
from fake_engine import FakeEngine
from tiny_tokenizer import byte_level

from deployments.engine_client import EngineClient
from deployments.http.app import ApiDependencies, ApiLimits, build_api
from deployments.text.tokenizer import TextCodec
from engine.sampling.grammar import checked

T = TypeVar("T")
TOKENIZER = byte_level()
EOS = TOKENIZER.eos_token_id
CODEC = TextCodec(TOKENIZER, eos_token_ids=[EOS])
TEXT = "the quick 🙂 brown fox\nstop and go, naïve café"
SCRIPT = CODEC.encode(TEXT)
LIMITS = ApiLimits(max_model_len=256, vocab_size=CODEC.vocab_size, max_body_bytes=20_000, inline_body_bytes=500)
TOOL_TEMPLATE = (
    "{% if tools %}<|start|>tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\n' + message['content'] }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }} {{ call.function.arguments | tojson }}"
    "{% endfor %}<|end|>\n{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
HERMES_HINT = "{# calls are written as <tool_call>...</tool_call> #}"
LLAMA3_HINT = "{# calls are written after <|python_tag|> #}"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "go"}]}
COMPLETION = {"model": "tiny", "prompt": "go", "max_tokens": 100}
URLS = {"chat": ("/v1/chat/completions", CHAT), "completion": ("/v1/completions", COMPLETION)}


def make_engine(**options: Any) -> FakeEngine:
    return FakeEngine(**{"script": SCRIPT, "eos_token_id": EOS, **options})


def tool_codec(form: str | None) -> TextCodec:
    """A codec of the same tokens whose chat template writes tools in `form`, or has none."""
    tokenizer = byte_level()
    if form is not None:
        tokenizer.chat_template = TOOL_TEMPLATE + {"hermes": HERMES_HINT, "llama3": LLAMA3_HINT}[form]
    return TextCodec(tokenizer, eos_token_ids=[EOS])


def dependencies(engine: EngineClient, codec: TextCodec = CODEC, limits: ApiLimits = LIMITS) -> ApiDependencies:
    return ApiDependencies(
        engine=engine,
        codec=codec,
        check_grammar=checked,
        model_name="tiny",
        created=7,
        limits=limits,
        system_fingerprint="fp",
    )


def talk(engine: FakeEngine, work: Callable[[httpx.AsyncClient], Awaitable[T]], codec: TextCodec = CODEC) -> T:
    """Run `work` with a client of a new application. With another codec the context is longer."""
    limits = LIMITS if codec is CODEC else replace(LIMITS, max_model_len=2048)

    async def run() -> T:
        transport = httpx.ASGITransport(build_api(dependencies(engine, codec, limits)))
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
