"""Streams of text deltas: a deadline for one, and the merge of several into one.

Owns the timer, and that every source is closed however the stream ends. Does not know what a delta says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from deployments.errors import DeadlineExceeded
from deployments.http.connection import cancel
from deployments.openai.responses import TextDelta


def _nothing() -> None:
    pass


async def until(
    deltas: AsyncGenerator[TextDelta, None], *, timeout_s: float, at_end: Callable[[], None] = _nothing
) -> AsyncGenerator[TextDelta, None]:
    """The same deltas, as long as they come within `timeout_s` seconds of the first call.

    Args:
        at_end: called once after `deltas` is closed, however it ended.

    Raises:
        DeadlineExceeded: the stream did not end in time. `deltas` is closed, so the engine is free.
    """
    loop = asyncio.get_running_loop()
    clock = _Clock()
    timer = loop.call_later(timeout_s, clock.expire)
    try:
        while True:
            try:
                delta = await clock.watch(deltas)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise DeadlineExceeded(f"The response was not complete within {timeout_s:g} s") from None
            yield delta
    finally:
        timer.cancel()
        try:
            await deltas.aclose()
        finally:
            at_end()


class _Clock:
    """One timer for a whole stream. `asyncio.timeout` would create and cancel one for each delta."""

    def __init__(self) -> None:
        self._is_over = False
        self._waiting: asyncio.Task[Any] | None = None

    def expire(self) -> None:
        self._is_over = True
        if self._waiting is not None:
            self._waiting.cancel()

    async def watch(self, deltas: AsyncGenerator[TextDelta, None]) -> TextDelta:
        """The next delta. Raises TimeoutError when the timer expires first, StopAsyncIteration at the end."""
        task = asyncio.current_task()
        if self._is_over or task is None:
            raise TimeoutError
        num_cancels = task.cancelling()
        self._waiting = task
        try:
            return await anext(deltas)
        except asyncio.CancelledError:
            if self._is_over and task.uncancel() <= num_cancels:
                raise TimeoutError from None
            raise  # the task is also cancelled from outside
        finally:
            self._waiting = None


BUFFERED_PER_SOURCE = 2
"""Number of deltas per source that may wait for the reader."""


async def merge_streams(sources: Sequence[AsyncGenerator[TextDelta, None]]) -> AsyncGenerator[TextDelta, None]:
    """The deltas of all sources as they come. Ends when all sources have ended, and closes all of them in any case.

    Raises:
        Exception: the first exception of a source; the other sources are closed first.
    """
    queue: asyncio.Queue[TextDelta | _Ended] = asyncio.Queue(BUFFERED_PER_SOURCE * len(sources))
    pumps = [asyncio.ensure_future(_pump(source, queue)) for source in sources]
    num_running = len(pumps)
    try:
        while num_running:
            item = await queue.get()
            if isinstance(item, TextDelta):
                yield item
                continue
            if item.error is not None:
                raise item.error
            num_running -= 1
    finally:
        await cancel(*pumps)
        for source in sources:
            await source.aclose()


@dataclass(frozen=True, slots=True)
class _Ended:
    """The end of a source."""

    error: Exception | None = None
    """The exception that ended it; None after its last delta."""


async def _pump(source: AsyncGenerator[TextDelta, None], queue: asyncio.Queue[TextDelta | _Ended]) -> None:
    try:
        async for delta in source:
            await queue.put(delta)
    except Exception as error:  # noqa: BLE001 - `merge_streams` raises it
        await queue.put(_Ended(error))
    else:
        await queue.put(_Ended())
