"""Thoughts through a real engine that drafts: a random model whose template has `<think>`, behind the HTTP routes.

Promise: thoughts are split from the text, a grammar begins after them, and the answer is the same whole or streamed,
drafted or not.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from api_harness import CHAT, LIMITS, dependencies, stream_of
from fakes import RandomPacer
from local_engine import LocalEngine
from tiny_models import write_model
from tiny_tokenizer import byte_level
from tokenizers import AddedToken

from deployments.cluster.shard_client import ShardClient
from deployments.engine_client import Health
from deployments.http.app import build_api
from deployments.text.tokenizer import TextCodec

T = TypeVar("T")
OPENED = "{% if add_generation_prompt %}<think>\n{% endif %}{# </think> #}"
WRITTEN = "{# <think> </think> #}"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yz"]}},
    "required": ["a"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
SEEDS = range(4)


@dataclass
class Model:
    folder: Path
    codec: TextCodec
    marks: dict[str, int]
    """Biases that make a random model write the marks of thoughts."""


@pytest.fixture(scope="module", params=[OPENED, WRITTEN], ids=["opened", "written"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in ("<think>", "</think>")])
    tokenizer.chat_template += request.param
    eos = tokenizer.eos_token_id
    folder = write_model(
        tmp_path_factory.mktemp("model") / "qwen3",
        "qwen3",
        vocab_size=len(tokenizer),
        eos_token_id=eos,
        bos_token_id=eos,
        pad_token_id=eos,
    )
    tokenizer.save_pretrained(folder)
    names = ("<think>", "</think>") if request.param == WRITTEN else ("</think>",)
    marks = {str(tokenizer.convert_tokens_to_ids(name)): 6 for name in names}
    return Model(folder, TextCodec(tokenizer, eos_token_ids=[eos]), marks)


class ConnectedClient(ShardClient):
    """A connection to a shard that also reports a health."""

    async def health(self) -> Health:
        return Health(status="ok", draft="up")


def talk(engine: LocalEngine, codec: TextCodec, work: Callable[[httpx.AsyncClient], Awaitable[T]]) -> T:
    """Run `work` with a client of the HTTP application over a real engine."""

    async def run() -> T:
        reader, writer = await asyncio.open_unix_connection(sock=engine._socket.dup())
        client = ConnectedClient(reader, writer, on_draft=lambda status: None)
        limits = replace(LIMITS, max_model_len=400, vocab_size=codec.vocab_size)
        transport = httpx.ASGITransport(build_api(dependencies(client, codec, limits)))
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as http:
                return await work(http)
        finally:
            await client.close()

    return asyncio.run(run())


async def chat(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    """Thoughts, text and usage of a whole response."""
    response = await client.post("/v1/chat/completions", json=CHAT | fields)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    usage = response.json()["usage"]
    message = choice["message"]
    return {
        "reasoning": message.get("reasoning_content") or "",
        "text": message["content"] or "",
        "reason": choice["finish_reason"],
        "tokens": usage["completion_tokens"],
        "thoughts": usage["completion_tokens_details"]["reasoning_tokens"],
        "accepted": usage["speculative"]["accepted"],
    }


async def streamed(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    """The same of a streamed response."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    response = await client.post("/v1/chat/completions", json=CHAT | options | fields)
    assert response.status_code == 200, response.text
    *chunks, last, done = stream_of(response)
    assert done == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    return {
        "reasoning": "".join(delta.get("reasoning_content") or "" for delta in deltas),
        "text": "".join(delta.get("content") or "" for delta in deltas),
        "reason": chunks[-1]["choices"][0]["finish_reason"],
        "tokens": last["usage"]["completion_tokens"],
        "thoughts": last["usage"]["completion_tokens_details"]["reasoning_tokens"],
        "accepted": last["usage"]["speculative"]["accepted"],
    }


def without_drafts(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name != "accepted"}


@pytest.mark.parametrize("response_format", [None, FORMAT], ids=["text", "grammar"])
def test_thoughts_are_the_same_drafted_or_not_and_whole_or_streamed(
    model: Model, response_format: dict[str, Any] | None
) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        num_accepted, num_split = 0, 0
        for seed in SEEDS:
            fields = {"seed": seed, "max_tokens": 120, "logit_bias": model.marks, "response_format": response_format}
            plain = await chat(client, **fields, speculative={"enabled": False})
            whole, stream = await chat(client, **fields), await streamed(client, **fields)
            assert without_drafts(whole) == without_drafts(stream) == without_drafts(plain)
            assert plain["accepted"] == 0
            num_accepted += whole["accepted"]
            num_split += bool(whole["reasoning"] and whole["text"])
            assert 0 <= whole["thoughts"] <= whole["tokens"]
            assert "</think>" not in whole["reasoning"]
            if response_format is not None and whole["reason"] == "stop":
                assert json.loads(whole["text"])["a"] in ("x", "yz")
                assert whole["thoughts"] > 0, "the biases make it think"
        assert num_accepted > 10
        assert num_split > 0, "no response had both thoughts and text"

    with LocalEngine(
        model.folder, draft_folder=model.folder, pacer=RandomPacer(5, max_k=4), speculative={"k": 4}
    ) as engine:
        talk(engine, model.codec, work)


def test_reasoning_items_equal_the_thoughts_of_chat(model: Model) -> None:
    fields = {"seed": 1, "enable_thinking": None}

    async def respond(client: httpx.AsyncClient, **more: Any) -> httpx.Response:
        body = {"model": "tiny", "input": "go", "max_output_tokens": 60, **fields, **more}
        return await client.post("/v1/responses", json=body)

    async def work(client: httpx.AsyncClient) -> None:
        expected = await chat(client, seed=1, max_tokens=60)
        whole = (await respond(client)).json()
        events = [
            json.loads(block.split("\n")[1].removeprefix("data: "))
            for block in (await respond(client, stream=True)).text.split("\n\n")[:-1]
        ]
        final = events[-1]["response"]
        for response in (whole, final):
            texts = {item["type"]: item["content"][0]["text"] for item in response["output"]}
            assert texts.get("reasoning", "") == expected["reasoning"]
            assert texts.get("message", "") == expected["text"]
        deltas = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
        assert "".join(deltas) == expected["reasoning"]

    with LocalEngine(
        model.folder, draft_folder=model.folder, pacer=RandomPacer(5, max_k=4), speculative={"k": 4}
    ) as engine:
        talk(engine, model.codec, work)
