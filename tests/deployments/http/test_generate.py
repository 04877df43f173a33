"""Grammars that cannot be enforced: HTTP 400 with the name of the client's field, whichever process refuses them.

The replica checks that a grammar parses. Only the engine can compile it for the model's tokens. Here the engine's model
has no tokenizer.json, so the real step loop behind a real socket refuses every grammar that the replica lets through.
"""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_harness import CHAT, COMPLETION, LIMITS, dependencies, error_of, tool_codec
from fakes import FixedPacer, ToyEngine, ToyModel

from deployments.cluster.shard_client import ShardClient
from deployments.engine_client import Health
from deployments.http.app import build_api
from engine.core.drafter import NoDrafter
from engine.ipc.replica_socket import ShardSocket
from engine.ipc.wire import StepDeltas
from engine.messages import Delta
from engine.sampling.grammar import Grammars
from engine.sampling.vocabulary import load_tokenizer_info

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


class SocketEngine(ToyEngine):
    """A toy engine whose deltas leave through the socket of a shard."""

    def __init__(self, folder: Path) -> None:
        grammars = Grammars(lambda: load_tokenizer_info(folder, LIMITS.vocab_size, (2,)))
        super().__init__(ToyModel(vocab_size=7, num_blocks=64), NoDrafter(), FixedPacer(0), grammars=grammars)
        self.socket = ShardSocket(submit=self.engine.submit, abort=self.engine.abort, abandon=self.engine.abort_all)

    def _collect(self, deltas: tuple[Delta, ...]) -> None:
        self.socket.send(StepDeltas(deltas))


class ConnectedClient(ShardClient):
    """A connection to a shard that also reports a health."""

    async def health(self) -> Health:
        return Health(status="ok")


def post(folder: Path, url: str, body: dict[str, Any]) -> httpx.Response:
    engine, stop = SocketEngine(folder), threading.Event()
    loop = threading.Thread(target=engine.engine.run, args=(stop,))
    loop.start()

    async def run() -> httpx.Response:
        client = ConnectedClient(*await asyncio.open_unix_connection(engine.socket.path), on_draft=print)
        try:
            transport = httpx.ASGITransport(build_api(dependencies(client, tool_codec("hermes"))))
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
                return await http.post(url, json=body)
        finally:
            await client.close()

    try:
        return asyncio.run(run())
    finally:
        stop.set()
        loop.join(10)
        engine.socket.close()
        assert not loop.is_alive()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("url", "body", "field"),
    [
        ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object"}}, "response_format"),
        ("/v1/chat/completions", {**CHAT, "tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ("/v1/completions", {**COMPLETION, "guided_regex": "[a-z]+"}, "guided_regex"),
        ("/v1/completions", {**COMPLETION, "guided_choice": ["yes", "no"], "n": 2}, "guided_choice"),
    ],
)
def test_a_grammar_that_only_the_engine_refuses(
    tmp_path: Path, url: str, body: dict[str, Any], field: str, stream: bool
) -> None:
    response = post(tmp_path, url, {**body, "max_tokens": 8, "stream": stream})
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert (error["type"], error["param"]) == ("invalid_request_error", field)
    assert error["message"].startswith(f"{field}: ")
    assert "tokenizer.json" in error["message"]


@pytest.mark.parametrize(
    ("field", "value"), [("guided_regex", "(["), ("guided_grammar", "root ::="), ("guided_json", '{"type": "banana"}')]
)
def test_a_grammar_that_the_replica_refuses(tmp_path: Path, field: str, value: str) -> None:
    response = post(tmp_path, "/v1/completions", {**COMPLETION, field: value})
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == field
    assert "tokenizer.json" not in response.text
