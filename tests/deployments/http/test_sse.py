"""Event streams: framing, order of events, errors after the first event, and closing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator

import pytest
from call_count import counted_calls

from deployments.http.sse import EventStreamResponse, event_bytes
from deployments.openai.response_writer import TEXT_PLACEHOLDER, ChatFormat, CompletionFormat, ResponseWriter
from deployments.openai.responses import TextDelta
from engine.errors import EngineUnavailable


def text_delta(text: str, *, finish_reason: str | None = None, num_completion: int = 1) -> TextDelta:
    return TextDelta(text, finish_reason, num_completion, num_cached=2, num_drafted=5, num_accepted=3)


class Source:
    """Deltas, then an error if there is one. Records its closing."""

    def __init__(self, *deltas: TextDelta, error: Exception | None = None, is_endless: bool = False) -> None:
        self.is_closed = False
        self._deltas, self._error, self._is_endless = deltas, error, is_endless

    async def run(self) -> AsyncGenerator[TextDelta, None]:
        try:
            for item in self._deltas:
                yield item
            if self._error:
                raise self._error
            while self._is_endless:
                yield self._deltas[-1]
        finally:
            self.is_closed = True


def writer(choice_format: ChatFormat | CompletionFormat) -> ResponseWriter:
    return ResponseWriter(choice_format, request_id="r1", created=7, model="m", system_fingerprint="fp", num_prompt=4)


def events(source: Source, choice_format=None, *, includes_usage: bool = False) -> tuple[list[bytes], list[object]]:
    """The sent items, and the decoded events."""

    async def run() -> list[bytes]:
        deltas = source.run()
        first = await anext(deltas)
        stream = event_bytes(first, deltas, writer(choice_format or ChatFormat()), includes_usage=includes_usage)
        return [item async for item in stream]

    sent = asyncio.run(run())
    blocks = b"".join(sent).decode().split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    payloads = [block.removeprefix("data: ") for block in blocks]
    return sent, [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


def test_a_chat_stream_has_role_first_finish_reason_last_then_done() -> None:
    source = Source(text_delta("one\n"), text_delta(""), text_delta("two"), text_delta("", finish_reason="stop"))
    sent, (first, second, last, done) = events(source)
    assert len(sent) == 3, "a step that shows nothing sends nothing; the last step sends all that ends the stream"
    assert first == {
        "id": "chatcmpl-r1",
        "object": "chat.completion.chunk",
        "created": 7,
        "model": "m",
        "choices": [
            {
                "delta": {"role": "assistant", "content": "one\n"},
                "finish_reason": None,
                "index": 0,
                "logprobs": None,
            }
        ],
        "system_fingerprint": "fp",
    }
    assert second["choices"][0]["delta"] == {"content": "two"}
    assert last["choices"][0] == {"delta": {}, "finish_reason": "stop", "index": 0, "logprobs": None}
    assert done == "[DONE]"
    assert source.is_closed


def test_usage_comes_in_its_own_chunk_and_is_null_before() -> None:
    source = Source(text_delta("a"), text_delta("b", finish_reason="length", num_completion=9))
    _, (first, last, usage, done) = events(source, CompletionFormat(), includes_usage=True)
    assert first["usage"] is None
    assert last["usage"] is None
    assert last["choices"] == [{"text": "b", "finish_reason": "length", "index": 0, "logprobs": None}]
    assert usage["choices"] == []
    assert usage["object"] == "text_completion"
    assert usage["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 9,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {
            "accepted_prediction_tokens": 3,
            "rejected_prediction_tokens": 2,
            "reasoning_tokens": 0,
        },
        "speculative": {"drafted": 5, "accepted": 3},
    }
    assert done == "[DONE]"


def test_an_answer_of_no_text_still_has_a_role_and_content() -> None:
    _, (only, _) = events(Source(text_delta("", finish_reason="stop")))
    assert only["choices"][0]["delta"] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (EngineUnavailable("the shard died"), "engine_unavailable", "the shard died"),
        (KeyError("secret"), "internal_error", "Internal server error"),
    ],
)
def test_an_error_in_mid_stream_is_one_event_and_no_done(error: Exception, code: str, message: str) -> None:
    source = Source(text_delta("a"), error=error)
    _, (_, last) = events(source)
    assert last["error"]["code"] == code
    assert last["error"]["message"] == message
    assert source.is_closed


async def respond(source: Source, receive, send) -> None:
    deltas = source.run()
    stream = event_bytes(await anext(deltas), deltas, writer(ChatFormat()), includes_usage=False)
    await EventStreamResponse(stream)({"type": "http"}, receive, send)


async def never() -> dict[str, object]:
    await asyncio.Event().wait()
    return {}


def test_a_client_that_leaves_closes_the_source_even_while_sending_blocks() -> None:
    """A client that reads nothing blocks `send`; the generator is then suspended outside its own code."""

    async def run() -> None:
        source, is_blocked = Source(text_delta("a"), is_endless=True), asyncio.Event()

        async def send(message: dict[str, object]) -> None:
            if message.get("body"):
                is_blocked.set()
                await asyncio.Event().wait()

        async def receive() -> dict[str, object]:
            await is_blocked.wait()
            return {"type": "http.disconnect"}

        await asyncio.wait_for(respond(source, receive, send), 5)
        assert source.is_closed

    asyncio.run(run())


def test_cancelling_the_response_closes_the_source() -> None:
    """Serve reports a client that disconnected in this way."""

    async def run() -> None:
        source, is_sending = Source(text_delta("a"), is_endless=True), asyncio.Event()

        async def send(message: dict[str, object]) -> None:
            if message.get("body"):
                is_sending.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(respond(source, never, send))
        await is_sending.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert source.is_closed

    asyncio.run(run())


def test_a_connection_that_breaks_closes_the_source() -> None:
    async def run() -> None:
        source = Source(text_delta("a"), is_endless=True)

        async def send(message: dict[str, object]) -> None:
            if message.get("body"):
                raise OSError("broken pipe")

        await respond(source, never, send)
        assert source.is_closed

    asyncio.run(run())


def test_an_event_of_text_costs_few_calls() -> None:
    """Counted in function calls. Encoding the whole chunk as JSON would show."""

    async def run() -> float:
        source = Source(text_delta("x" * 20), is_endless=True)
        deltas = source.run()
        stream = event_bytes(await anext(deltas), deltas, writer(ChatFormat()), includes_usage=False)
        await anext(stream)
        with counted_calls() as calls:
            for _ in range(200):
                await anext(stream)
        await stream.aclose()
        return calls.num / 200

    assert asyncio.run(run()) < 25


@pytest.mark.parametrize("includes_usage", [True, False])
@pytest.mark.parametrize("choice_format", [ChatFormat(), CompletionFormat()])
def test_a_chunk_of_text_is_what_the_encoder_would_have_made_of_it(
    choice_format: ChatFormat | CompletionFormat, includes_usage: bool
) -> None:
    """Text-only chunks are written from a template; the first chunk and those with more fields are not."""
    fast, slow = writer(choice_format), writer(choice_format)
    for index in range(3):
        for text in ("a", ' "quoted" \\ and\n', "naïve 🙂", "\x00\x1f\u2028", "</script>", TEXT_PLACEHOLDER):
            whole = TextDelta(text, None, 4, 1, 2, 1, index=index)
            assert fast.chunk(whole, is_first=False, includes_usage=includes_usage) == slow._full_chunk(
                whole, is_first=False, includes_usage=includes_usage
            )
