"""One life of a target: its shards from loading to their end, and the connection to rank 0.

Owns the actors of the shards and the watch over them: a shard that is dead, hung or disconnected has failed the group,
which reports one reason and ends. After `stop` no process of the group is left. Does not know what follows a failure
(`engine_group` does). Lives in the replica's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
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
from engine.ipc.forward_broadcast import ForwardHandle
from engine.ipc.wire import DraftStatus
from engine.messages import AdapterRef
from engine.threads import threads_per_shard
from engine.workers.bring_up import bring_up
from engine.workers.shard_ready import ShardReady

HEARTBEAT_PERIOD_S = 1.0
RETIRE_PERIOD_S = 0.2
STOP_TIMEOUT_S = 2.0
KILL_TIMEOUT_S = 10.0
_log = logging.getLogger(__name__)


class ActorShard:
    """`ShardCalls` on a shard in another process.

    Args:
        handle: of its actor.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def open_rendezvous(self) -> int:
        port: int = await self._handle.open_rendezvous.remote()
        return port

    async def load(self, rendezvous_port: int | None) -> ShardReady:
        ready: ShardReady = await self._handle.load.remote(rendezvous_port)
        return ready

    async def measure(self) -> int:
        num_blocks: int = await self._handle.measure.remote()
        return num_blocks

    async def allocate(self, num_blocks: int, max_model_len: int) -> None:
        await self._handle.allocate.remote(num_blocks, max_model_len)

    async def forward_handle(self, rank: int) -> ForwardHandle:
        handle: ForwardHandle = await self._handle.forward_handle.remote(rank)
        return handle

    async def follow(self, handle: ForwardHandle) -> None:
        await self._handle.follow.remote(handle)


class ShardGroup:
    """Made, started once, stopped once.

    Args:
        settings: of the app, with the device resolved.
        folder: the target's model folder on this node.
        app_name, engine_id: name the engine in its reports to the controller.
        node_id: id of this node.
        placed: Ray options of an actor in the bundle of this number.
        draft: configuration of the draft, which shares shard 0's device and may read its hidden states; None without.
        on_draft: called when the target gains or loses its draft.
        on_failed: called once with the reason when the group ends by itself.
        prepare: awaited before the group serves, with the group; loads the adapters. None without adapters.
        quiet: awaited before costs are measured; returns when nothing else loads that would disturb the measurement.
        make_actor: makes an actor class from a class and Ray options.
        kill: ends an actor at once.
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
        prepare: Callable[[ShardGroup], Awaitable[None]] | None = None,
        quiet: Callable[[], Awaitable[None]] | None = None,
        make_actor: Callable[..., Any] = actor,
        kill: Callable[[Any], None] = ray.kill,
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
        self._prepare = prepare
        self._quiet = quiet
        self._make_actor = make_actor
        self._kill = kill
        self._shards: list[Any] = []
        self._processes: list[psutil.Process] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._client: ShardClient | None = None
        self._is_over = False
        self.failure: str | None = None
        """Why the group ended by itself; None while it has not."""

    @property
    def rank0(self) -> Any:
        """The actor of shard 0."""
        return self._shards[0]

    @property
    def client(self) -> ShardClient:
        """The connection to shard 0.

        Raises:
            ShardDown: the group has not started.
        """
        if self._client is None:
            raise ShardDown("the target's shards are not up")
        return self._client

    async def start(self) -> ShardReady:
        """Bring everything up. Call `stop` afterwards, also when this raises.

        Raises:
            Exception: what the first failing actor raised.
        """
        engine = self._settings.engine
        self._shards = [self._make_shard(rank) for rank in range(engine.tensor_parallel_size)]
        pids = await asyncio.gather(*(shard.pid.remote() for shard in self._shards))
        # All shards are on this node. psutil also compares start times, so that it never kills a reused pid.
        self._processes = [psutil.Process(pid) for pid in pids]
        ready = await bring_up([ActorShard(shard) for shard in self._shards], block_size=engine.kv_block_size)
        self._run(self._shards[1:])  # the followers must run while the leader measures costs
        if self._quiet is not None:
            await self._quiet()
        path = await self.rank0.start_leader.remote(self._app_name, self._engine_id)
        self._run(self._shards[:1])
        if self._prepare is not None:
            await self._prepare(self)
        self._client = await ShardClient.connect(path, on_draft=self._on_draft, on_lost=self._fail)
        self._tasks.append(asyncio.create_task(self._watch_heart()))
        return ready

    async def load_adapter(self, adapter: AdapterRef, folder: Path) -> None:
        """Load an adapter on all shards, then accept requests for it. Loading it again changes nothing.

        Raises:
            ConfigError: it cannot be read or does not fit the target; no shard keeps it.
        """
        number = adapter.number
        calls = [shard.load_adapter.remote(number, folder) for shard in self._shards]
        failed = [done for done in await asyncio.gather(*calls, return_exceptions=True) if done is not None]
        if failed:
            await self._drop(number)
            raise failed[0]
        await self.rank0.serve_adapter.remote(adapter)

    async def retire_adapter(self, number: int) -> None:
        """Accept no more requests for an adapter, wait until those that use it have ended, and free it."""
        await self.rank0.retire_adapter.remote(number)
        while not await self.rank0.is_unused.remote(number):
            await asyncio.sleep(RETIRE_PERIOD_S)
        await self._drop(number)

    async def _drop(self, number: int) -> None:
        await asyncio.gather(*(shard.drop_adapter.remote(number) for shard in self._shards))

    async def stop(self) -> None:
        """End every process of the group, also a suspended or a stuck one. Idempotent."""
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
            self._kill(shard)
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        # The next target needs their memory.
        await asyncio.to_thread(psutil.wait_procs, self._processes, timeout=KILL_TIMEOUT_S)
        self._shards, self._processes = [], []

    def _make_shard(self, rank: int) -> Any:
        engine = self._settings.engine
        options = self._placed(shard_bundle(engine, rank))
        if engine.device == "cuda":
            fraction = self._settings.draft_gpu_fraction if rank == 0 and self._draft is not None else 0.0
            options["num_gpus"] = 1.0 - fraction
        options["runtime_env"] = {"env_vars": device_env(threads_per_shard(engine))}
        options["max_concurrency"] = 8  # `run` occupies one thread until the shard ends
        cls = self._make_actor(ShardActor, **options)
        feature_layers = self._draft.feature_layers if self._draft is not None else ()
        return cls.remote(engine, self._folder, rank=rank, node_id=self._node_id, feature_layers=feature_layers)

    def _run(self, shards: Sequence[Any]) -> None:
        for shard in shards:
            self._tasks.append(asyncio.create_task(self._watch_run(shard.run.remote())))

    async def _watch_run(self, run: Any) -> None:
        """Fail the group when `run` of a shard ends, in whatever way."""
        try:
            await run
            self._fail("a target shard ended")
        except Exception as error:  # noqa: BLE001 - any end is a failure of the group, and `failure` keeps the reason
            self._fail(f"a target shard died: {str(error).splitlines()[-1] if str(error) else type(error).__name__}")

    async def _watch_heart(self) -> None:
        """Fail the group when the step loop stands still. It turns a few times a second, with or without requests."""
        loop = asyncio.get_running_loop()
        timeout_s = self._settings.hang_timeout_s
        num_turns, moved_s = -1, loop.time()
        while True:
            # Not `wait_for`, which may swallow the cancellation of this task in the moment that the call returns.
            with contextlib.suppress(TimeoutError, ray.exceptions.RayError):
                async with asyncio.timeout(timeout_s):
                    beat = await self.rank0.heartbeat.remote()
                if beat != num_turns:
                    num_turns, moved_s = beat, loop.time()
            if loop.time() - moved_s > timeout_s:
                self._fail(f"the target has not moved for {timeout_s:g} s")
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
