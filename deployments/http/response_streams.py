"""The time a request may take. Owns nothing but the clock: what is cut off closes itself."""

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
    pieces: AsyncGenerator[TextDelta, None], *, timeout_s: float, at_end: Callable[[], None] = _nothing
) -> AsyncGenerator[TextDelta, None]:
    """Hand on what comes within `timeout_s` seconds from the first call on.

    Args:
        at_end: called once `pieces` is closed, however it ended.

    Raises:
        DeadlineExceeded: the answer was not complete by then; `pieces` is closed, so the engine is free.
    """
    loop = asyncio.get_running_loop()
    clock = _Clock()
    timer = loop.call_later(timeout_s, clock.expire)
    try:
        while True:
            try:
                piece = await clock.watch(pieces)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise DeadlineExceeded(f"The answer was not complete within {timeout_s:g} s") from None
            yield piece
    finally:
        timer.cancel()
        try:
            await pieces.aclose()
        finally:
            at_end()


class _Clock:
    """One timer for all pieces of an answer: `asyncio.timeout` would make and cancel one for each."""

    def __init__(self) -> None:
        self._is_over = False
        self._waiting: asyncio.Task[Any] | None = None

    def expire(self) -> None:
        self._is_over = True
        if self._waiting is not None:
            self._waiting.cancel()

    async def watch(self, pieces: AsyncGenerator[TextDelta, None]) -> TextDelta:
        """The next piece. Raises TimeoutError when time is over before it comes, StopAsyncIteration at the end."""
        task = asyncio.current_task()
        if self._is_over or task is None:
            raise TimeoutError
        num_cancels = task.cancelling()
        self._waiting = task
        try:
            return await anext(pieces)
        except asyncio.CancelledError:
            if self._is_over and task.uncancel() <= num_cancels:
                raise TimeoutError from None
            raise  # somebody else wants this task to end
        finally:
            self._waiting = None


BUFFERED_PER_SOURCE = 2
"""Pieces that may wait for the reader."""


async def merge_streams(sources: Sequence[AsyncGenerator[TextDelta, None]]) -> AsyncGenerator[TextDelta, None]:
    """Pieces of all sources as they come; ends when all have ended, and closes them all in any case.

    Raises:
        Exception: what a source raised; the others are cancelled first.
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
    """A source has no more pieces."""

    error: Exception | None = None


async def _pump(source: AsyncGenerator[TextDelta, None], queue: asyncio.Queue[TextDelta | _Ended]) -> None:
    try:
        async for piece in source:
            await queue.put(piece)
    except Exception as error:  # noqa: BLE001 - raised again where the pieces are read
        await queue.put(_Ended(error))
    else:
        await queue.put(_Ended())
