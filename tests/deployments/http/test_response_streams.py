"""The deadline of a stream: deltas before it pass, later ones raise, and other cancellations still cancel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from deployments.errors import DeadlineExceeded
from deployments.http.response_streams import until
from deployments.openai.responses import TextDelta


class Source:
    """Deltas at an interval. Records its closing."""

    def __init__(self, num_pieces: int, interval_s: float) -> None:
        self._num_pieces = num_pieces
        self._interval_s = interval_s
        self.is_closed = False

    async def deltas(self) -> AsyncGenerator[TextDelta, None]:
        try:
            for number in range(self._num_pieces):
                await asyncio.sleep(self._interval_s)
                yield TextDelta(str(number), None, number, 0, 0, 0)
        finally:
            self.is_closed = True


def test_what_comes_in_time_passes_whoever_asks() -> None:
    """A separate task asks for each delta, as a request does for the first one."""
    source = Source(5, 0.001)

    async def run() -> list[str]:
        timed, texts = until(source.deltas(), timeout_s=30.0), []
        for _ in range(5):
            texts.append((await asyncio.ensure_future(anext(timed))).text)  # type: ignore[arg-type]
        with pytest.raises(StopAsyncIteration):
            await anext(timed)
        return texts

    assert asyncio.run(run()) == list("01234")
    assert source.is_closed


@pytest.mark.parametrize("interval_s", [60.0, 0.03])
def test_what_takes_too_long_is_cut_off_and_its_source_closed(interval_s: float) -> None:
    """Both without any delta and with one delta after another."""
    source = Source(1000, interval_s)

    async def run() -> None:
        with pytest.raises(DeadlineExceeded, match=r"within 0\.1 s"):
            async for _ in until(source.deltas(), timeout_s=0.1):
                pass
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        assert source.is_closed

    asyncio.run(run())


def test_time_over_while_nobody_asks_counts_too() -> None:
    async def run() -> None:
        timed = until(Source(2, 0.0).deltas(), timeout_s=0.02)
        await anext(timed)
        await asyncio.sleep(0.05)
        with pytest.raises(DeadlineExceeded):
            await anext(timed)

    asyncio.run(run())


def test_a_cancellation_from_elsewhere_is_one() -> None:
    source = Source(1, 60.0)

    async def run() -> None:
        task = asyncio.ensure_future(anext(until(source.deltas(), timeout_s=30.0)))  # type: ignore[arg-type]
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        assert source.is_closed

    asyncio.run(run())
