"""One life of a target: its shards from loading to their end, and the connection to the first of them.

Owns the order in which shards come up, the watch over them (dead, hung or disconnected is all the same: the group has
failed, and says why once) and that nothing of them is left afterwards. Does not know what follows a failure
(`engine_group`). Lives in the replica's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import ray

from deployments.cluster.actors import ShardActor, actor, device_env
from deployments.cluster.placement import shard_bundle
from deployments.cluster.shard_client import ShardClient
from deployments.settings import AppSettings
from engine.checkpoint.model_config import ModelConfig
from engine.errors import ShardDown
from engine.ipc.wire import DraftStatus
from engine.model.device import threads_per_shard
from engine.workers.target_shard import ShardReady

HEARTBEAT_PERIOD_S = 1.0
STOP_TIMEOUT_S = 2.0
KILL_TIMEOUT_S = 10.0
_log = logging.getLogger(__name__)


class ShardGroup:
    """Made, started once, stopped once.

    Args:
        settings: of the app, device resolved.
        folder: the target's, on this node.
        app_name, engine_id: for the reports to the controller.
        node_id: of this machine.
        placed: Ray options of an actor in a bundle.
        draft: of the draft that shares shard 0's device, and may read its hidden states; None without one.
        on_draft: told when the target gains or loses its draft.
        on_failed: told once, with the reason, when the group ends by itself.
    """

    def __init__(
        self,
        settings: AppSettings,
        *,
        folder: Path,
        app_name: str,
        engine_id: str,
        node_id: str,
        placed: Callable[[int], dict[str, Any]],
        draft: ModelConfig | None,
        on_draft: Callable[[DraftStatus], None],
        on_failed: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._app_name = app_name
        self._engine_id = engine_id
        self._node_id = node_id
        self._placed = placed
        self._draft = draft
        self._on_draft = on_draft
        self._on_failed = on_failed
        self._shards: list[Any] = []
        self._processes: list[psutil.Process] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._client: ShardClient | None = None
        self._is_over = False
        self.failure: str | None = None
        """Why it ended by itself, once it has."""

    @property
    def lead(self) -> Any:
        """The actor of shard 0."""
        return self._shards[0]

    @property
    def client(self) -> ShardClient:
        """The connection to shard 0. After `start`."""
        if self._client is None:
            raise ShardDown("the target's shards are not up")
        return self._client

    async def start(self) -> ShardReady:
        """Bring everything up. Raises what the first failing actor raised; `stop` is needed in any case."""
        engine = self._settings.engine
        self._shards = [self._make_shard(rank) for rank in range(engine.tensor_parallel_size)]
        pids = await asyncio.gather(*(shard.pid.remote() for shard in self._shards))
        self._processes = [psutil.Process(pid) for pid in pids]  # same node; knows a reused id by its start time
        ready = await self._load()
        self._run(self._shards[1:])  # they follow already while the first one measures
        path = await self.lead.lead.remote(self._app_name, self._engine_id)
        self._run(self._shards[:1])
        self._client = await ShardClient.connect(path, on_draft=self._on_draft, on_lost=self._fail)
        self._tasks.append(asyncio.create_task(self._watch_heart()))
        return ready

    async def stop(self) -> None:
        """End every process of the group, also one that is stopped or stuck. Idempotent."""
        self._is_over = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.close()
        if self.failure is None:
            for shard in self._shards:
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(shard.stop.remote(), STOP_TIMEOUT_S)
        for shard in self._shards:
            ray.kill(shard)
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        # Their memory must be free before others take their place.
        await asyncio.to_thread(psutil.wait_procs, self._processes, timeout=KILL_TIMEOUT_S)
        self._shards, self._processes = [], []

    async def _load(self) -> ShardReady:
        """Weights, then a cache of the size that every shard has room for."""
        port = await self.lead.open_rendezvous.remote() if len(self._shards) > 1 else None
        readies: list[ShardReady] = await asyncio.gather(*(shard.load.remote(port) for shard in self._shards))
        num_blocks = min(ready.num_blocks for ready in readies)
        block_size = self._settings.engine.kv_block_size
        max_model_len = min(readies[0].max_model_len, (num_blocks - 1) * block_size)
        await asyncio.gather(*(shard.allocate.remote(num_blocks, max_model_len) for shard in self._shards))
        for rank, shard in enumerate(self._shards[1:], start=1):
            await shard.follow.remote(await self.lead.plan_handle.remote(rank))
        return ShardReady(num_blocks, readies[0].vocab_size, max_model_len, readies[0].device)

    def _make_shard(self, rank: int) -> Any:
        engine = self._settings.engine
        options = self._placed(shard_bundle(engine, rank))
        if engine.device == "cuda":
            fraction = self._settings.draft_gpu_fraction if rank == 0 and self._draft is not None else 0.0
            options["num_gpus"] = 1.0 - fraction
        options["runtime_env"] = {"env_vars": device_env(threads_per_shard(engine))}
        options["max_concurrency"] = 8  # run() keeps one thread for good
        cls = actor(ShardActor, **options)
        feature_layers = self._draft.feature_layers if self._draft is not None else ()
        return cls.remote(engine, self._folder, rank=rank, node_id=self._node_id, feature_layers=feature_layers)

    def _run(self, shards: list[Any]) -> None:
        for shard in shards:
            self._tasks.append(asyncio.create_task(self._watch_run(shard.run.remote())))

    async def _watch_run(self, run: Any) -> None:
        """A shard's run() never ends while all is well."""
        try:
            await run
            self._fail("a target shard ended")
        except Exception as error:  # noqa: BLE001 - whatever ended it, the group is over, and `failure` says why
            self._fail(f"a target shard died: {str(error).splitlines()[-1] if str(error) else type(error).__name__}")

    async def _watch_heart(self) -> None:
        """The loop of shard 0 turns a few times a second, with or without work; a stopped process does not answer."""
        loop = asyncio.get_running_loop()
        turns, moved_s = -1, loop.time()
        while True:
            with contextlib.suppress(TimeoutError, ray.exceptions.RayError):
                beat = await asyncio.wait_for(self.lead.heartbeat.remote(), self._settings.hang_timeout_s)
                if beat != turns:
                    turns, moved_s = beat, loop.time()
            if loop.time() - moved_s > self._settings.hang_timeout_s:
                self._fail(f"the target has not moved for {self._settings.hang_timeout_s:g} s")
                return
            await asyncio.sleep(HEARTBEAT_PERIOD_S)

    def _fail(self, reason: str) -> None:
        if self._is_over or self.failure is not None:
            return
        self.failure = reason
        _log.error("engine %s: %s", self._engine_id, reason)
        if self._client is not None:
            self._client.give_up(reason)
        self._on_failed(reason)
