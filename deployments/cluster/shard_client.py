"""A replica's connection to its shard 0: requests out, deltas in, each to the request that waits for it.

Owns admission (how many requests may be in flight) and what every waiting request hears when the engine goes away.
Implements `EngineClient.generate`. Knows no HTTP and no Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable

from engine.errors import EngineError, EngineUnavailable, QueueFull
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

RETRY_AFTER_S = 1.0
_log = logging.getLogger(__name__)


def _ignore(reason: str) -> None:
    del reason


class ShardClient:
    """Made by `connect`.

    Args:
        capacity: requests in flight, running and waiting; more are refused with QueueFull.
        on_draft: told when the draft comes up or goes down.
        on_lost: told why, once, when the engine goes away.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        capacity: int,
        on_draft: Callable[[DraftStatus], None],
        on_lost: Callable[[str], None] = _ignore,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._capacity = capacity
        self._on_draft = on_draft
        self._on_lost = on_lost
        self._waiting: dict[str, _Inbox] = {}
        self._failure: EngineError | None = None
        self._task = asyncio.create_task(self._read())

    @classmethod
    async def connect(
        cls,
        path: str,
        *,
        capacity: int,
        on_draft: Callable[[DraftStatus], None],
        on_lost: Callable[[str], None] = _ignore,
    ) -> ShardClient:
        """Connect to the socket of shard 0."""
        reader, writer = await asyncio.open_unix_connection(path)
        return cls(reader, writer, capacity=capacity, on_draft=on_draft, on_lost=on_lost)

    @property
    def failure(self) -> EngineError | None:
        """Why the engine is gone, once it is."""
        return self._failure

    @property
    def num_requests(self) -> int:
        """Requests in flight."""
        return len(self._waiting)

    async def generate(self, submit: Submit) -> AsyncGenerator[Delta, None]:
        """See `EngineClient.generate`."""
        if self._failure is not None:
            raise self._failure
        if len(self._waiting) >= self._capacity:
            raise QueueFull(
                f"The server is at its capacity of {self._capacity} requests; try again later",
                retry_after_s=RETRY_AFTER_S,
            )
        inbox = _Inbox()
        self._waiting[submit.request_id] = inbox
        finished = False
        try:
            self._writer.write(encode_frame(SubmitCommand(submit)))
            while not finished:
                item = await inbox.get()
                finished = isinstance(item, EngineError) or item.finish_reason is not None
                if isinstance(item, EngineError):
                    raise item
                if item.finish_reason == "error":
                    raise EngineError(item.error or "The engine could not finish this request")
                yield item
        finally:
            del self._waiting[submit.request_id]
            if not finished:
                self._writer.write(encode_frame(AbortCommand(submit.request_id)))

    def give_up(self, reason: str) -> None:
        """The engine is known to be gone or stuck; whoever waits hears EngineUnavailable."""
        self._fail(EngineUnavailable(f"The engine is gone: {reason}"))

    async def close(self) -> None:
        """Hang up; whoever still waits hears EngineUnavailable."""
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
                    for delta in event.deltas:
                        # Only an engine that stops ends requests that somebody waits for; why it stops comes next.
                        if delta.finish_reason == "abort":
                            continue
                        if (inbox := self._waiting.get(delta.request_id)) is not None:
                            inbox.put(delta)
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

    def _fail(self, error: EngineError) -> None:
        if self._failure is not None:
            return
        self._failure = error
        for inbox in self._waiting.values():
            inbox.put(error)
        self._on_lost(str(error))


class _Inbox:
    """What one request has not read yet: a queue with one reader, at a third of the cost of asyncio's."""

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
