"""Server-sent events: text deltas become the bytes of an event stream, which the response sends.

Owns framing, the order of events, errors after the first event, and the closing of the engine's generator as soon as
the client disconnects. Does not know the content of a chunk (`responses`) or the source of the deltas.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from deployments.errors import to_http
from deployments.http.connection import cancel, until_disconnect
from deployments.openai.response_writer import ResponseWriter
from deployments.openai.responses import TextDelta
from engine.errors import PacelineError

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


def frame(data: bytes) -> bytes:
    """One event. JSON contains no raw line breaks, so one `data:` line is enough."""
    return b"data: " + data + b"\n\n"


async def event_bytes(
    first: TextDelta,
    deltas: AsyncGenerator[TextDelta, None],
    writer: ResponseWriter,
    *,
    includes_usage: bool,
    includes_silent: bool = False,
) -> AsyncGenerator[bytes, None]:
    """The bytes of an event stream, one item per delta.

    A delta without visible text and without an end gives no event. The last item holds the final chunk, the usage chunk
    if the request asked for it, and [DONE]. An error is the last event; no [DONE] follows it.

    Args:
        first: the first delta, taken from `deltas` before, so that an earlier error could set the status line.
        writer: encodes chunks.
        includes_usage: send a usage chunk.
        includes_silent: send a chunk also for deltas without visible text.
    """
    delta = first
    begun: set[int] = set()
    lasts: dict[int, TextDelta] = {}
    try:
        while True:
            if includes_silent or not delta.is_silent:
                is_first = delta.index not in begun
                data = frame(writer.chunk(delta, is_first=is_first, includes_usage=includes_usage))
                begun.add(delta.index)
                if delta.finish_reason is not None:
                    lasts[delta.index] = delta
                if len(lasts) == writer.num_choices:
                    break
                yield data
            delta = await anext(deltas)
        if includes_usage:
            data += frame(writer.usage_chunk([lasts[index] for index in sorted(lasts)]))
        yield data + DONE
    except PacelineError as error:
        yield frame(to_http(error).body)
    except Exception as error:
        logger.exception("stream %s failed", writer.response_id)
        yield frame(to_http(error).body)
    finally:
        await deltas.aclose()


class EventStreamResponse(StreamingResponse):
    """Sends an event stream and closes `content` at once when the client disconnects or the task is cancelled.

    The base class leaves a suspended generator to the garbage collector, and the engine would run the request until
    then.
    """

    media_type = "text/event-stream"

    def __init__(self, content: AsyncGenerator[bytes, None]) -> None:
        super().__init__(content, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._content = content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send_body = scope.get("state", {}).get("send_body", send)
        sending = asyncio.ensure_future(self._send(send, send_body))
        watching = asyncio.ensure_future(until_disconnect(receive))
        try:
            await asyncio.wait((sending, watching), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                with contextlib.suppress(OSError):  # The connection broke while sending: the client has gone.
                    sending.result()
        finally:
            await cancel(sending, watching)
            await self._content.aclose()

    async def _send(self, send: Send, send_body: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._content:
            await send_body({"type": "http.response.body", "body": data, "more_body": True})
        await send_body({"type": "http.response.body", "body": b"", "more_body": False})
