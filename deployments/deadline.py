"""The time a request may take. Owns nothing but the clock: what is cut off closes itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from deployments.http_errors import DeadlineExceeded
from deployments.responses import Piece


async def until(pieces: AsyncGenerator[Piece, None], *, timeout_s: float) -> AsyncGenerator[Piece, None]:
    """Hand on what comes within `timeout_s` seconds from the first call on.

    Raises:
        DeadlineExceeded: the answer was not complete by then; `pieces` is closed, so the engine is free.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    try:
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    piece = await anext(pieces)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise DeadlineExceeded(f"The answer was not complete within {timeout_s:g} s") from None
            yield piece
    finally:
        await pieces.aclose()
