"""A replica's connection to its shard 0: requests out, deltas in, each delta to the request it belongs to.

Owns the socket and the end of every request in flight when the engine goes away. Implements `EngineClient.generate`.
Does not limit the number of requests (`http.admission` does). Knows no HTTP and no Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable

from deployments.errors import failure_of
from engine.errors import EngineError, EngineUnavailable
from engine.ipc.wire import (
    HEADER,
    AbortCommand,
    DraftStatus,
    EngineFailed,
    StepDeltas,
    SubmitCommand,
    decode_event,
    encode_frame,
    frame_len,
)
from engine.messages import Delta, Submit

_log = logging.getLogger(__name__)


def _ignore(reason: str) -> None:
    del reason


class ShardClient:
    """The connection to one shard 0, created by `connect`.

    Args:
        on_draft: called when the draft comes up or goes down.
        on_lost: called once with the reason when the connection ends.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        on_draft: Callable[[DraftStatus], None],
        on_lost: Callable[[str], None] = _ignore,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._on_draft = on_draft
        self._on_lost = on_lost
        self._in_flight: dict[str, _Inbox] = {}
        self._failure: EngineError | None = None
        self._task = asyncio.create_task(self._read())

    @classmethod
    async def connect(
        cls, path: str, *, on_draft: Callable[[DraftStatus], None], on_lost: Callable[[str], None] = _ignore
    ) -> ShardClient:
        """Connect to the unix socket of shard 0 at `path`. Raises OSError when nothing listens there."""
        reader, writer = await asyncio.open_unix_connection(path)
        return cls(reader, writer, on_draft=on_draft, on_lost=on_lost)

    @property
    def failure(self) -> EngineError | None:
        """Why the connection ended; None while it is open."""
        return self._failure

    @property
    def num_requests(self) -> int:
        """Number of requests in flight."""
        return len(self._in_flight)

    async def generate(self, submit: Submit) -> AsyncGenerator[Delta, None]:
        """See `EngineClient.generate`."""
        if self._failure is not None:
            raise self._failure
        inbox = _Inbox()
        self._in_flight[submit.request_id] = inbox
        finished = False
        try:
            self._writer.write(encode_frame(SubmitCommand(submit)))
            while not finished:
                item = await inbox.get()
                finished = isinstance(item, EngineError) or item.finish_reason is not None
                if isinstance(item, EngineError):
                    raise item
                if item.finish_reason == "error":
                    raise failure_of(item)
                yield item
        finally:
            del self._in_flight[submit.request_id]
            if not finished:
                self._writer.write(encode_frame(AbortCommand(submit.request_id)))

    def give_up(self, reason: str) -> None:
        """End every request in flight with EngineUnavailable, because the engine is dead or hangs."""
        self._fail(EngineUnavailable(f"The engine is gone: {reason}"))

    async def close(self) -> None:
        """Close the connection and end every request in flight with EngineUnavailable."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._fail(EngineUnavailable("The server is shutting down"))
        self._writer.close()

    async def _read(self) -> None:
        try:
            while True:
                header = await self._reader.readexactly(HEADER.size)
                event = decode_event(await self._reader.readexactly(frame_len(header)))
                if isinstance(event, StepDeltas):
                    self._deliver(event)
                elif isinstance(event, DraftStatus):
                    self._on_draft(event)
                elif isinstance(event, EngineFailed):
                    self._fail(EngineUnavailable(f"The engine is gone: {event.reason}"))
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            self._fail(EngineUnavailable("The engine is gone: its process died"))
        except EngineError as error:
            _log.exception("bad message from shard 0")
            self._fail(EngineUnavailable(f"The engine is gone: {error}"))

    def _deliver(self, event: StepDeltas) -> None:
        for delta in event.deltas:
            # An engine that stops ends its requests with `abort`. EngineFailed follows and carries the reason.
            if delta.finish_reason == "abort":
                continue
            if (inbox := self._in_flight.get(delta.request_id)) is not None:
                inbox.put(delta)

    def _fail(self, error: EngineError) -> None:
        if self._failure is not None:
            return
        self._failure = error
        for inbox in self._in_flight.values():
            inbox.put(error)
        self._on_lost(str(error))


class _Inbox:
    """Unread items of one request: a queue with one reader, at a third of the cost of `asyncio.Queue`."""

    __slots__ = ("_items", "_waiter")

    def __init__(self) -> None:
        self._items: deque[Delta | EngineError] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Delta | EngineError) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Delta | EngineError:
        if not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._items.popleft()
