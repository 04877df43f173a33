"""One engine as a group of actors: brings up shards, controller and draft in order, watches them, stops them.

Owns which actor runs where and what happens when one dies: a dead draft is replaced, a dead controller is made anew, a
dead shard ends the group (`failure` says why, and the replica's health check fails). Lives in the replica's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from autoscale.controller import initial_plan
from autoscale.history import HistoryView
from deployments.actors import (
    CONTROLLER_NAMESPACE,
    ControllerActor,
    ShardActor,
    actor,
    controller_name,
    device_env,
)
from deployments.draft_supervisor import DraftSupervisor
from deployments.engine_client import Health
from deployments.placement import draft_bundle, shard_bundle
from deployments.settings import AppSettings
from deployments.shard_client import ShardClient
from engine.errors import EngineUnavailable, ShardDown
from engine.ledger import Ledger, Readings, merge
from engine.placement import threads_per_shard
from engine.plan import Plan
from engine.request import Delta, Submit
from engine.target_shard import ShardReady

CONTROLLER_CHECK_PERIOD_S = 2.0
CONTROLLER_TIMEOUT_S = 3.0
METRICS_TIMEOUT_S = 1.0
HISTORY_TIMEOUT_S = 3.0
_log = logging.getLogger(__name__)


class EngineGroup:
    """Made, then started once.

    Args:
        settings: of the app, device resolved.
        folder, draft_folder: model folders on this node.
        app_name: names the controller.
        group: the placement group of this replica.
    """

    def __init__(
        self,
        settings: AppSettings,
        *,
        folder: Path,
        draft_folder: Path | None,
        app_name: str,
        group: PlacementGroup | None,
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._draft_folder = draft_folder
        self._app_name = app_name
        self._group = group
        self._engine_id = secrets.token_hex(8)
        self._node_id = ray.get_runtime_context().get_node_id()
        self._shards: list[Any] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._client: ShardClient | None = None
        self._draft: DraftSupervisor | None = None
        self._failure: str | None = None
        self._num_controllers = 1
        self._last_metrics = Readings()
        self.ready: ShardReady | None = None

    async def start(self) -> ShardReady:
        """Bring everything up. Raises what the first failing actor raised, or TimeoutError."""
        async with asyncio.timeout(self._settings.start_timeout_s):
            self._ensure_controller()
            self._shards = [self._make_shard(rank) for rank in range(self._settings.engine.tensor_parallel_size)]
            self.ready = await self._load_shards()
            self._run_shards(self._shards[1:])  # they follow already while the first one measures
            path = await self._shards[0].lead.remote(self._app_name, self._engine_id)
            self._run_shards(self._shards[:1])
            engine = self._settings.engine
            self._client = await ShardClient.connect(
                path, capacity=engine.max_num_requests + engine.max_num_waiting, on_draft=self._on_draft
            )
            if self._draft_folder is not None:
                self._draft = DraftSupervisor(
                    engine,
                    shard=self._shards[0],
                    folder=self._draft_folder,
                    target_folder=self._folder,
                    node_id=self._node_id,
                    options=self._draft_options(),
                )
                await self._draft.bring_up()
                self._tasks.append(asyncio.create_task(self._draft.supervise()))
            self._tasks.append(asyncio.create_task(self._watch_controller()))
        return self.ready

    def generate(self, submit: Submit) -> AsyncGenerator[Delta, None]:
        """See `EngineClient.generate`."""
        if self._client is None or self._failure is not None:
            raise EngineUnavailable(self._failure or "The engine is starting; try again soon")
        return self._client.generate(submit)

    async def health(self) -> Health:
        """How the engine is now."""
        draft = self._draft.state if self._draft is not None else "none"
        failure = self._failure or (str(self._client.failure) if self._client and self._client.failure else None)
        if failure is not None:
            return Health(status="dead", reason=failure, draft=draft)
        if self._client is None:
            return Health(status="starting", reason="loading the model", draft=draft)
        if self._draft is not None and not self._draft.is_up:
            return Health(status="degraded", reason=f"no draft, serving without: {self._draft.reason}", draft=draft)
        return Health(status="ok", draft=draft)

    async def history(self, since_s: float) -> HistoryView:
        """The last minutes of all engines of the app, from a unix time on.

        Raises:
            EngineUnavailable: the controller is gone, or does not answer; a new one is being made.
        """
        try:
            view: HistoryView = await asyncio.wait_for(self._controller.history.remote(since_s), HISTORY_TIMEOUT_S)
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise EngineUnavailable("The controller does not answer; try again soon") from error
        return view

    async def metrics(self) -> Readings:
        """What was counted in the group's processes so far; of a shard that does not answer, what it said last."""
        ledger = Ledger()
        ledger.set("paceline_draft_up", self._draft is None or self._draft.is_up)
        ledger.add("paceline_restarts_total", self._draft.num_restarts if self._draft is not None else 0, "draft")
        ledger.add("paceline_restarts_total", self._num_controllers - 1, "controller")
        asked = [self._shards[0].metrics.remote()] if self._client is not None else []
        if self._draft is not None and self._draft.is_up:
            asked.append(self._draft.metrics())
        answers = await asyncio.gather(
            *(asyncio.wait_for(answer, METRICS_TIMEOUT_S) for answer in asked), return_exceptions=True
        )
        if answers and isinstance(answers[0], Readings):
            self._last_metrics = answers[0]
        draft = [answer for answer in answers[1:] if isinstance(answer, Readings)]
        return merge([ledger.read(), self._last_metrics, *draft])

    async def plan(self) -> Plan:
        """The plan in force. Raises EngineUnavailable when the controller does not answer."""
        return await self._ask_controller("plan")

    async def override(self, changes: dict[str, Any]) -> Plan:
        """Change fields of the plan; answers with the new one. Raises as `plan`."""
        return await self._ask_controller("override", **changes)

    async def _ask_controller(self, method: str, **arguments: Any) -> Plan:
        try:
            call = getattr(self._controller, method).remote(**arguments)
            plan: Plan = await asyncio.wait_for(call, CONTROLLER_TIMEOUT_S)
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise EngineUnavailable("The controller does not answer; try again soon") from error
        return plan

    async def stop(self) -> None:
        """Stop everything this group made, the controller excepted (other replicas share it)."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.close()
        if self._draft is not None:
            self._draft.kill()
        for shard in self._shards:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(shard.stop.remote(), 2.0)
        for shard in self._shards:
            ray.kill(shard)

    async def _load_shards(self) -> ShardReady:
        """Weights, then a cache of the size that every shard has room for."""
        port = await self._shards[0].open_rendezvous.remote() if len(self._shards) > 1 else None
        readies: list[ShardReady] = await asyncio.gather(*(shard.load.remote(port) for shard in self._shards))
        num_blocks = min(ready.num_blocks for ready in readies)
        block_size = self._settings.engine.kv_block_size
        max_model_len = min(readies[0].max_model_len, (num_blocks - 1) * block_size)
        await asyncio.gather(*(shard.allocate.remote(num_blocks, max_model_len) for shard in self._shards))
        for rank, shard in enumerate(self._shards[1:], start=1):
            await shard.follow.remote(await self._shards[0].plan_handle.remote(rank))
        return ShardReady(num_blocks, readies[0].vocab_size, max_model_len, readies[0].device)

    def _make_shard(self, rank: int) -> Any:
        engine = self._settings.engine
        options = self._placed(shard_bundle(engine, rank))
        if engine.device == "cuda":
            fraction = self._settings.draft_gpu_fraction if rank == 0 and self._draft_folder is not None else 0.0
            options["num_gpus"] = 1.0 - fraction
        options["runtime_env"] = {"env_vars": device_env(threads_per_shard(engine))}
        options["max_concurrency"] = 8  # run() keeps one thread for good
        cls = actor(ShardActor, **options)
        return cls.remote(engine, self._folder, rank=rank, node_id=self._node_id)

    def _draft_options(self) -> dict[str, Any]:
        engine = self._settings.engine
        options = self._placed(draft_bundle(engine))
        if engine.device == "cuda":
            options["num_gpus"] = self._settings.draft_gpu_fraction
        options["runtime_env"] = {"env_vars": device_env(threads_per_shard(engine))}
        options["max_concurrency"] = 4
        return options

    def _placed(self, bundle: int) -> dict[str, Any]:
        options: dict[str, Any] = {"num_cpus": 0}
        if self._group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=bundle
            )
        return options

    def _ensure_controller(self) -> None:
        """The app's controller, made if there is none. All replicas of an app share one."""
        options = self._placed(0)
        options |= {
            "name": controller_name(self._app_name),
            "namespace": CONTROLLER_NAMESPACE,
            "get_if_exists": True,
        }
        self._controller = actor(ControllerActor, **options).remote(initial_plan(self._settings.engine.speculative))

    def _run_shards(self, shards: list[Any]) -> None:
        for shard in shards:
            self._tasks.append(asyncio.create_task(self._watch(shard.run.remote())))

    async def _watch(self, run: Any) -> None:
        """A shard's run() never ends while all is well."""
        try:
            await run
            reason = "a target shard ended"
        except Exception as error:  # noqa: BLE001 - whatever ended it, the group is over, and health() says why
            reason = f"a target shard died: {str(error).splitlines()[-1] if str(error) else type(error).__name__}"
        _log.error("engine %s: %s", self._engine_id, reason)
        self._failure = self._failure or str(ShardDown(reason))

    async def _watch_controller(self) -> None:
        while True:
            await asyncio.sleep(CONTROLLER_CHECK_PERIOD_S)
            try:
                await self._controller.pid.remote()
            except ray.exceptions.RayError:
                _log.warning("the controller died; making a new one")
                self._num_controllers += 1
                self._ensure_controller()

    def _on_draft(self, status: Any) -> None:
        if self._draft is not None and not status.up:
            self._draft.lost(status.reason)
