"""A server for clients: the real HTTP application over a scripted engine, under uvicorn on loopback.

Owns what the engine answers: a tool call where a grammar requires one, JSON where a schema does, else text. A second
answer after a tool result is text, so agents come to an end.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace

import uvicorn
from api_harness import EOS, LIMITS, dependencies
from fake_engine import FakeEngine
from tiny_tokenizer import byte_level

from deployments.http.access import Access
from deployments.http.app import build_api
from deployments.text.tokenizer import TextCodec
from engine.messages import Delta, Submit

CODEC = TextCodec(byte_level(), eos_token_ids=[EOS], generic_tools=True)
TEXT = "The capital of France is Paris. 🙂"
JSON = '{"city": "Paris", "days": 3}'
DSPY = "[[ ## answer ## ]]\nParis\n\n[[ ## completed ## ]]"
"""The form that dspy's chat adapter reads."""
CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
TOOLS = {
    "weather": '{"city": "Paris"}',
    "final_answer": '{"answer": "sunny"}',
    "final_result": JSON,
    "Place": JSON,
}
"""Arguments by the names of tools that the clients define; those of libraries' own tools for results included."""


class ScriptedEngine(FakeEngine):
    """Answers by what the request asks for."""

    async def generate(self, submit: Submit) -> AsyncGenerator[Delta, None]:
        engine = FakeEngine(script=CODEC.encode(answer_to(submit)), eos_token_id=EOS, max_step=3)
        async with contextlib.aclosing(engine.generate(submit)) as deltas:
            async for delta in deltas:
                yield delta


def answer_to(submit: Submit) -> str:
    """What the engine answers."""
    grammar, prompt = submit.sampling.grammar, CODEC.decode(submit.prompt)
    if grammar is None:
        return DSPY if "[[ ##" in prompt else TEXT
    if "tool_call" not in grammar.text:
        return JSON
    names = [name for name in TOOLS if f'"name": "{name}"' in prompt]
    if "<tool_response>\n" in prompt:
        names = [name for name in names if name.startswith("final")]
    return CALL % (names[0], TOOLS[names[0]]) if names else TEXT


@contextlib.contextmanager
def serve(origins: tuple[str, ...] = ()) -> Iterator[str]:
    """Base URL of a running server.

    Args:
        origins: of web pages that may call it.
    """
    limits = replace(LIMITS, max_model_len=1 << 16, max_body_bytes=1 << 20)
    engine = ScriptedEngine(script=(), eos_token_id=EOS)
    app = build_api(dependencies(engine, CODEC, limits), Access(origins=origins))
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off", ws="none"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started:
        assert time.monotonic() < deadline, "the server does not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join(10)
