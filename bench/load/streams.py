"""A continuous load: a number of chat streams, each of which sends the next prompt when its response ends.

Owns the number of streams and the order of prompts. Records errors only. Tokens are measured in the server while the
load continues and policies change; see `bench.load.meter`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from types import TracebackType

import aiohttp

from bench.load.servers import Server
from bench.load.workload import Workload

TIMEOUT_S = 600.0
RETRY_PAUSE_S = 0.2


class Streams:
    """An async context manager around a load. It starts with no stream.

    Args:
        server: the server under load.
        workload: its prompts are repeated in a random order that depends on the seed alone.
        max_tokens: upper bound of the length of a response.
        seed: of the order.
    """

    def __init__(self, server: Server, workload: Workload, *, max_tokens: int, seed: int = 0) -> None:
        self._server = server
        self._workload = workload
        self._max_tokens = max_tokens
        self._restart(seed)
        self._tasks: list[asyncio.Task[None]] = []
        self._session: aiohttp.ClientSession | None = None
        self.errors: list[str] = []
        """Messages of failed requests."""

    async def __aenter__(self) -> Streams:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.resize(0)
        if self._session is not None:
            await self._session.close()

    async def resize(self, number: int) -> None:
        """Change the number of streams. Streams past it close their connections, which ends their requests."""
        while len(self._tasks) < number:
            self._tasks.append(asyncio.create_task(self._run()))
        over = self._tasks[number:]
        del self._tasks[number:]
        for task in over:
            task.cancel()
        await asyncio.gather(*over, return_exceptions=True)

    async def restart(self, seed: int) -> None:
        """Restart all streams from the first prompt in the order of this seed.

        Every policy then gets the same prompts. The first response of each stream ends early, each at another length,
        as in a load that has run for long. Otherwise streams that start together would end together.
        """
        number = len(self._tasks)
        await self.resize(0)
        self._restart(seed)
        await self.resize(number)

    def _restart(self, seed: int) -> None:
        self._prompts = _forever(self._workload, seed)
        self._chance = random.Random(seed)

    async def _run(self) -> None:
        share: float | None = self._chance.random()
        for prompt in self._prompts:
            try:
                await self._send(prompt, share)
                share = None
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                self.errors.append(f"{type(error).__name__}: {error}"[:300])
                await asyncio.sleep(RETRY_PAUSE_S)

    async def _send(self, prompt: str, share: float | None) -> None:
        """Send one prompt and read the response.

        Args:
            prompt: the user message.
            share: share of `max_tokens` after which the response ends; None for all of it.

        Raises:
            ValueError: the server responds with an error.
        """
        if self._session is None:
            raise ValueError("the load is not entered; use it in `async with`")
        request = {
            "model": self._server.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": self._max_tokens if share is None else max(1, round(share * self._max_tokens)),
            "stream": True,
        }
        body = request | self._workload.body
        async with self._session.post(f"{self._server.url}/chat/completions", json=body) as response:
            if response.status != 200:
                raise ValueError(f"{response.status}: {(await response.text())[:200]}")
            async for part in response.content.iter_any():
                if b'data: {"error"' in part:
                    raise ValueError(part[:200].decode(errors="replace"))


def _forever(workload: Workload, seed: int) -> Iterator[str]:
    order = list(workload.prompts)
    chance = random.Random(seed)
    while True:
        chance.shuffle(order)
        yield from order
