"""Keeps one target running: starts it, and replaces it when it fails, with growing pauses while failures go on.

Owns which target serves now, and the reason while none does. It gives up after too many restarts in a row that did not
start, and every waiting request gets an error. Does not know the parts of a target or what depends on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from deployments.cluster.backoff import Backoff
from engine.errors import EngineError, EngineUnavailable
from engine.workers.shard_ready import ShardReady

MAX_RESTARTS = 6
"""Number of restarts in a row that may fail to start."""
_log = logging.getLogger(__name__)


class Target(Protocol):
    """A target from its start to its end."""

    @property
    def failure(self) -> str | None:
        """Why it failed; None while it has not."""
        ...

    async def start(self) -> ShardReady:
        """Start it. Raises the error that prevents the start."""
        ...

    async def stop(self) -> None:
        """End it in any state. Calling it twice has no effect."""
        ...


T = TypeVar("T", bound=Target)


class TargetSupervisor(Generic[T]):
    """Created once per engine group. Call `start`, then run `supervise` as a task.

    Args:
        make: creates a target, not started. The target calls the argument once with the reason when it fails.
        before: called before a failed target is stopped; ends what depends on it.
        after: called when a replacement serves.
        start_timeout_s: seconds that a target may take to start.
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
        self._failed = asyncio.Event()  # set when the serving target fails
        self._decided = asyncio.Event()  # set while a target serves, or when the supervisor gave up
        self.trouble = "loading the model"
        """Why no target serves, while none does."""
        self.is_dead = False
        """Whether the supervisor gave up."""
        self.num_restarts = 0
        """Number of replacements that served."""
        self.ready: ShardReady | None = None
        """Result of the first start; None before it. A replacement with a shorter context is not accepted."""

    @property
    def serving(self) -> T | None:
        """The target that serves now; None while none does."""
        return self._target if self._decided.is_set() and not self.is_dead else None

    async def wait(self, timeout_s: float) -> T:
        """The target that serves now, or the next one.

        Raises:
            EngineUnavailable: no target serves within `timeout_s` seconds, or the supervisor gave up.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.serving is None and not self.is_dead:  # a target may fail before this task runs
                    await self._decided.wait()
        target = self.serving
        if target is None:
            raise EngineUnavailable(f"The engine is not available: {self.trouble}")
        return target

    async def start(self) -> ShardReady:
        """Start the first target. Raises the error that prevents the start."""
        self.ready = await self._bring_up()
        return self.ready

    async def supervise(self) -> None:
        """Replace the target each time it fails. Returns when it gives up."""
        clock = asyncio.get_running_loop().time
        while not self.is_dead:
            born_s = clock()
            await self._failed.wait()
            self._backoff.lived(clock() - born_s)
            await self._replace(self.trouble)

    async def stop(self) -> None:
        """End the target. Call it after the task of `supervise` has ended."""
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
        self._decided.set()  # wakes the waiting requests

    async def _attempt(self, cause: str) -> bool:
        """Restart once, after the pause of the backoff. Returns whether a target serves now."""
        pause_s = self._backoff.next_pause_s()
        self.trouble = f"{cause}; restart {self._backoff.num_failures} in {pause_s:g} s"
        _log.warning("target: %s", self.trouble)
        try:
            await self._before()
            if self._target is not None:
                await self._target.stop()
            await asyncio.sleep(pause_s)
            await self._bring_up()
        except Exception as error:  # noqa: BLE001 - any failure is a reason for the next attempt
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
