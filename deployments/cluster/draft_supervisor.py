"""Keeps one draft running for its target: starts it, exchanges buffer handles, replaces it when it dies or hangs.

Owns the draft's actor, its epoch and the pauses between restarts. The target serves at K = 0 in the meantime, so no
request waits for a draft. Does not know where the actor is placed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

from deployments.cluster.backoff import Backoff
from engine.draft.messages import DraftInfo
from engine.metrics.counters import MetricSnapshot

ATTACH_TIMEOUT_S = 30.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadingDraft:
    """A draft's actor that was told to load."""

    actor: Any
    info: Any
    """The result of `load`, to be awaited."""


class DraftStarter:
    """Starts the processes of drafts. The first one may load while its target does.

    Args:
        make: starts the actor of a draft and returns its handle.
        kill: ends an actor.
    """

    def __init__(self, make: Callable[[], Any], *, kill: Callable[[Any], None] = ray.kill) -> None:
        self._make = make
        self._kill = kill
        self._begun: LoadingDraft | None = None

    def begin(self) -> None:
        """Start a draft for the next call of `start`."""
        self._begun = self._new()

    async def until_loaded(self) -> None:
        """Wait for the draft of `begin` to load or fail; return at once without one."""
        if self._begun is not None:
            with contextlib.suppress(Exception):  # `DraftSupervisor.bring_up` raises it
                await self._begun.info

    def start(self) -> LoadingDraft:
        """The draft of `begin`, or a new one."""
        draft, self._begun = self._begun or self._new(), None
        return draft

    def discard(self) -> None:
        """End the draft of `begin` that nobody has taken. Idempotent."""
        if self._begun is not None:
            self._kill(self._begun.actor)
            self._begun = None

    def _new(self) -> LoadingDraft:
        actor = self._make()
        return LoadingDraft(actor, actor.load.remote())


class DraftSupervisor:
    """Created once per target. Call `bring_up`, then run `supervise` as a task.

    Args:
        rank0: actor of the target's shard 0.
        starter: starts drafts.
        kill: ends an actor.
        backoff: pauses before restarts.
    """

    def __init__(
        self,
        rank0: Any,
        starter: DraftStarter,
        *,
        kill: Callable[[Any], None] = ray.kill,
        backoff: Backoff | None = None,
    ) -> None:
        self._rank0 = rank0
        self._starter = starter
        self._kill = kill
        self._backoff = backoff or Backoff(first_s=1.0, longest_s=60.0)
        self._epoch = 0
        self._actor: Any = None
        self._run: Any = None
        self._lost = asyncio.Event()
        self.is_up = False
        """Whether the target drafts with it."""
        self.reason = "starting"
        """Why the draft is down; empty while it is up."""
        self.num_restarts = 0
        """Number of attempts to replace the draft."""

    @property
    def state(self) -> str:
        """`up`, or `down` with the reason, for the health report."""
        return "up" if self.is_up else f"down: {self.reason}"

    async def bring_up(self) -> None:
        """Start a draft and attach it to the target. Raises what the draft raised while loading."""
        self._epoch += 1
        self._lost.clear()
        loading = self._starter.start()
        self._actor = loading.actor
        info: DraftInfo = await loading.info
        handle = await self._rank0.open_draft_buffer.remote(info, self._epoch)
        await self._actor.connect.remote(handle)
        self._run = self._actor.run.remote()
        await self._rank0.attach_measured_draft.remote(ATTACH_TIMEOUT_S)
        self.is_up, self.reason = True, ""

    def lost(self, reason: str) -> None:
        """Record that the target gave the draft up, because it died or hangs."""
        self.is_up, self.reason = False, reason
        self._lost.set()

    def kill(self) -> None:
        """End the draft's process, even if it is stopped. Calling it twice has no effect."""
        if self._actor is not None:
            self._kill(self._actor)
            self._actor = None

    async def metrics(self) -> MetricSnapshot:
        """The metrics of the draft's process; empty without one. Raises RayError when the process is dead."""
        snapshot: MetricSnapshot = await self._actor.metrics.remote() if self._actor is not None else MetricSnapshot()
        return snapshot

    async def supervise(self) -> None:
        """Replace the draft each time it ends, with growing pauses while replacements fail. Runs until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            begin_s = clock()
            if self.is_up:
                await self._until_lost()
            self._backoff.lived(clock() - begin_s)
            self.kill()
            pause_s = self._backoff.next_pause_s()
            _log.warning("the draft is down (%s); starting another in %.1f s", self.reason, pause_s)
            await asyncio.sleep(pause_s)
            self.num_restarts += 1
            try:
                await self.bring_up()
            except Exception as error:  # noqa: BLE001 - any failure of a draft costs speculation only
                self.reason = f"restart failed: {str(error).splitlines()[-1] if str(error) else type(error).__name__}"

    async def _until_lost(self) -> None:
        """Wait until the draft's process ends or the target gives the draft up."""
        lost = asyncio.ensure_future(self._lost.wait())
        ended = asyncio.ensure_future(self._ended())
        try:
            await asyncio.wait([lost, ended], return_when=asyncio.FIRST_COMPLETED)
        finally:
            lost.cancel()
            ended.cancel()
        self.is_up = False

    async def _ended(self) -> None:
        try:
            await self._run
            self.reason = "the draft's process ended"
        except ray.exceptions.RayError as error:
            self.reason = f"the draft's process died ({type(error).__name__})"
