"""Server-sent events: a stream of pieces becomes the bytes of an event stream, and the connection carries them.

Owns framing, the order of events, errors in mid-stream, and that the engine's generator is closed the moment the
client leaves. Does not know what a chunk says (`responses`) or where pieces come from.
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
    """One event. JSON holds no raw line breaks, so one `data:` line carries it."""
    return b"data: " + data + b"\n\n"


async def event_bytes(
    first: TextDelta,
    pieces: AsyncGenerator[TextDelta, None],
    writer: ResponseWriter,
    *,
    includes_usage: bool,
    includes_silent: bool = False,
) -> AsyncGenerator[bytes, None]:
    """Bytes to send, one item per piece: a chunk that carries all of it.

    A piece that shows nothing and ends nothing gives no event. The last item holds the final chunk, the usage chunk
    where it was asked for, and [DONE]. An error is an event of its own and the end: no [DONE] after it.

    Args:
        first: already taken from `pieces`, so that an early error could still become a status line.
        includes_silent: send a chunk also for pieces that show nothing.
    """
    piece = first
    begun: set[int] = set()
    lasts: dict[int, TextDelta] = {}
    try:
        while True:
            if includes_silent or not piece.is_silent:
                is_first = piece.index not in begun
                data = frame(writer.chunk(piece, is_first=is_first, includes_usage=includes_usage))
                begun.add(piece.index)
                if piece.finish_reason is not None:
                    lasts[piece.index] = piece
                if len(lasts) == writer.num_choices:
                    break
                yield data
            piece = await anext(pieces)
        if includes_usage:
            data += frame(writer.usage_chunk([lasts[index] for index in sorted(lasts)]))
        yield data + DONE
    except PacelineError as error:
        yield frame(to_http(error).body)
    except Exception as error:
        logger.exception("stream %s failed", writer.response_id)
        yield frame(to_http(error).body)
    finally:
        await pieces.aclose()


class EventStreamResponse(StreamingResponse):
    """Sends an event stream and closes `content` at once when the client leaves or the task is cancelled.

    The base class leaves a generator that is suspended between two items to the garbage
    collector; a request in an engine cannot wait for that.
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
                with contextlib.suppress(OSError):  # The connection broke while sending: the client has left.
                    sending.result()
        finally:
            await cancel(sending, watching)
            await self._content.aclose()

    async def _send(self, send: Send, send_body: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._content:
            await send_body({"type": "http.response.body", "body": data, "more_body": True})
        await send_body({"type": "http.response.body", "body": b"", "more_body": False})
