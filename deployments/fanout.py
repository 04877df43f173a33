"""Several answers at once as one stream of pieces.

Owns that they progress side by side, that a slow reader slows them all, and that they all end together when one fails
or the reader goes. Does not know what a piece says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from deployments.connection import cancel
from deployments.responses import Piece

BUFFERED_PER_SOURCE = 2
"""Pieces that may wait for the reader."""


async def merge(sources: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[Piece, None]:
    """Pieces of all sources as they come; ends when all have ended, and closes them all in any case.

    Raises:
        Exception: what a source raised; the others are cancelled first.
    """
    queue: asyncio.Queue[Piece | _Ended] = asyncio.Queue(BUFFERED_PER_SOURCE * len(sources))
    pumps = [asyncio.ensure_future(_pump(source, queue)) for source in sources]
    num_running = len(pumps)
    try:
        while num_running:
            item = await queue.get()
            if isinstance(item, Piece):
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


async def _pump(source: AsyncGenerator[Piece, None], queue: asyncio.Queue[Piece | _Ended]) -> None:
    try:
        async for piece in source:
            await queue.put(piece)
    except Exception as error:  # noqa: BLE001 - raised again where the pieces are read
        await queue.put(_Ended(error))
    else:
        await queue.put(_Ended())
