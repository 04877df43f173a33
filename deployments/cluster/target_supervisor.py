"""Keeps one target alive: makes it, and makes another when it fails, with growing pauses while that goes on.

Owns which target serves now and what to say while none does. After too many restarts in a row that did not even come up
it gives up, and whoever waits hears so. Does not know what a target is made of, nor what depends on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from deployments.cluster.backoff import Backoff
from engine.errors import EngineError, EngineUnavailable
from engine.workers.target_shard import ShardReady

MAX_RESTARTS = 6
"""In a row, none of which came up."""
_log = logging.getLogger(__name__)


class Target(Protocol):
    """One life of a target."""

    @property
    def failure(self) -> str | None:
        """Why it ended by itself, once it has."""
        ...

    async def start(self) -> ShardReady:
        """Bring it up; raises whatever keeps it from that."""
        ...

    async def stop(self) -> None:
        """End it in any state; idempotent."""
        ...


T = TypeVar("T", bound=Target)


class TargetSupervisor(Generic[T]):
    """Made once per engine group; `start`, then `supervise` in a task.

    Args:
        make: a new target; it calls what it is given, once, with the reason when it ends by itself.
        before: called before a failed target is taken down; ends what depends on it.
        after: called when another one serves.
        start_timeout_s: for each to come up.
        backoff: pauses before restarts.
    """

    def __init__(
        self,
        make: Callable[[Callable[[str], None]], T],
        *,
        before: Callable[[], Awaitable[None]],
        after: Callable[[], None],
        start_timeout_s: float,
        backoff: Backoff | None = None,
    ) -> None:
        self._make = make
        self._before = before
        self._after = after
        self._start_timeout_s = start_timeout_s
        self._backoff = backoff or Backoff(first_s=1.0, longest_s=60.0)
        self._target: T | None = None
        self._failed = asyncio.Event()  # the target that served has ended by itself
        self._decided = asyncio.Event()  # a target serves, or none ever will again
        self.trouble = "loading the model"
        """Why none serves, while none does."""
        self.is_dead = False
        self.num_restarts = 0
        self.ready: ShardReady | None = None
        """Of the first one; later ones hold no less."""

    @property
    def serving(self) -> T | None:
        """The target that serves now."""
        return self._target if self._decided.is_set() and not self.is_dead else None

    async def wait(self, timeout_s: float) -> T:
        """The target that serves, or the next one.

        Raises:
            EngineUnavailable: none came within `timeout_s`, or none ever will.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.serving is None and not self.is_dead:  # it may fail before this task runs
                    await self._decided.wait()
        target = self.serving
        if target is None:
            raise EngineUnavailable(f"The engine is not available: {self.trouble}")
        return target

    async def start(self) -> ShardReady:
        """The first target. Raises whatever kept it from starting."""
        self.ready = await self._bring_up()
        return self.ready

    async def supervise(self) -> None:
        """Replace the target each time it fails, until that itself fails too often."""
        clock = asyncio.get_running_loop().time
        while not self.is_dead:
            born_s = clock()
            await self._failed.wait()
            self._backoff.lived(clock() - born_s)
            await self._replace(self.trouble)

    async def stop(self) -> None:
        """End the target; after the task of `supervise` has ended."""
        if self._target is not None:
            await self._target.stop()

    async def _replace(self, cause: str) -> None:
        for _ in range(MAX_RESTARTS):
            if await self._attempt(cause):
                self.num_restarts += 1
                self._after()
                return
        self.trouble = f"{self.trouble}; given up after {MAX_RESTARTS} restarts"
        self.is_dead = True
        self._decided.set()  # nobody needs to wait any more

    async def _attempt(self, cause: str) -> bool:
        """One restart, after a pause unless it is the first. Returns whether a target serves now."""
        pause_s = self._backoff.next_pause_s()
        self.trouble = f"{cause}; restart {self._backoff.num_failures} in {pause_s:g} s"
        _log.warning("target: %s", self.trouble)
        try:
            await self._before()
            if self._target is not None:
                await self._target.stop()
            await asyncio.sleep(pause_s)
            await self._bring_up()
        except Exception as error:  # noqa: BLE001 - it may fail in any way; the next attempt comes later
            reason = str(error).splitlines()[-1] if str(error) else type(error).__name__
            self.trouble = f"{cause}; a restart failed: {reason}"
            return False
        return self._decided.is_set()

    async def _bring_up(self) -> ShardReady:
        self._failed.clear()
        target = self._target = self._make(self._on_failed)
        async with asyncio.timeout(self._start_timeout_s):
            ready = await target.start()
        if self.ready is not None and ready.max_model_len < self.ready.max_model_len:
            raise EngineError(f"only {ready.max_model_len} tokens of context fit, {self.ready.max_model_len} before")
        if target.failure is None:
            self._decided.set()
        return ready

    def _on_failed(self, reason: str) -> None:
        self.trouble = reason
        self._decided.clear()
        self._failed.set()
