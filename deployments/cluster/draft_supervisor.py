"""Keeps one draft alive beside its target: makes it, exchanges handles, replaces it when it dies or hangs.

Owns the draft's actor, its epoch and the pause between attempts. The target serves at K = 0 in the meantime, so nothing
here is ever in a hurry that costs a request.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import ray

from deployments.cluster.actors import DraftActor, actor
from engine.config import EngineConfig
from engine.draft.messages import DraftInfo
from engine.metrics.counters import MetricSnapshot

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 60.0
STEADY_S = 60.0
"""A draft that lived this long was not part of a series of failures."""
OPEN_TIMEOUT_S = 30.0
_log = logging.getLogger(__name__)


class DraftSupervisor:
    """Made once per engine group.

    Args:
        engine: settings.
        shard: actor of shard 0.
        folder, target_folder: model folders.
        node_id: of this machine.
        options: Ray options of the draft's actor.
    """

    def __init__(
        self,
        engine: EngineConfig,
        *,
        shard: Any,
        folder: Path,
        target_folder: Path,
        node_id: str,
        options: dict[str, Any],
    ) -> None:
        self._engine = engine
        self._shard = shard
        self._folder = folder
        self._target_folder = target_folder
        self._node_id = node_id
        self._options = options
        self._epoch = 0
        self._actor: Any = None
        self._run: Any = None
        self._lost = asyncio.Event()
        self.is_up = False
        self.reason = "starting"
        self.num_restarts = 0

    @property
    def state(self) -> str:
        """In a word or two, for the health report."""
        return "up" if self.is_up else f"down: {self.reason}"

    async def bring_up(self) -> None:
        """Start a draft and attach it. Raises what the draft raised while loading."""
        self._epoch += 1
        self._lost.clear()
        cls = actor(DraftActor, **self._options)
        self._actor = cls.remote(self._engine, self._folder, self._target_folder, node_id=self._node_id)
        info: DraftInfo = await self._actor.load.remote()
        handle = await self._shard.open_draft_buffer.remote(info, self._epoch)
        await self._actor.connect.remote(handle)
        self._run = self._actor.run.remote()
        await self._shard.attach_measured_draft.remote(OPEN_TIMEOUT_S)
        self.is_up, self.reason = True, ""

    def lost(self, reason: str) -> None:
        """The target says the draft is dead or hung."""
        self.is_up, self.reason = False, reason
        self._lost.set()

    def kill(self) -> None:
        """End the draft's process, also one that is stopped. Idempotent."""
        if self._actor is not None:
            ray.kill(self._actor)
            self._actor = None

    async def metrics(self) -> MetricSnapshot:
        """What the draft's process says of itself. Raises what Ray raises when it is gone."""
        snapshot: MetricSnapshot = await self._actor.metrics.remote() if self._actor is not None else MetricSnapshot()
        return snapshot

    async def supervise(self) -> None:
        """Replace the draft each time it ends, with growing pauses while replacements keep failing."""
        pause_s = FIRST_PAUSE_S
        while True:
            born = asyncio.get_running_loop().time()
            if self.is_up:
                await self._until_lost()
            self.kill()
            if asyncio.get_running_loop().time() - born > STEADY_S:
                pause_s = FIRST_PAUSE_S
            _log.warning("draft down (%s); a new one in %.1f s", self.reason, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            self.num_restarts += 1
            try:
                await self.bring_up()
            except Exception as error:  # noqa: BLE001 - a draft may fail in any way; the target goes on without
                self.reason = f"restart failed: {str(error).splitlines()[-1] if str(error) else type(error).__name__}"

    async def _until_lost(self) -> None:
        """Wait until the draft's process ends or the target gives it up."""
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
            self.reason = "the draft ended"
        except ray.exceptions.RayError as error:
            self.reason = f"the draft's process died ({type(error).__name__})"
