"""One engine as a group of actors: target shards, draft and controller, each replaced when it dies.

Owns how they belong together: a dead controller or draft is made anew and nobody notices; when shards die, all of them
and the draft are replaced (`target_supervisor` says when), and `health` says why; when that is given up the group is
dead, and Serve replaces the replica. `continuation` carries requests over. Lives in the replica's process.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from autoscale.control.controller import initial_plan
from autoscale.control.history import HistoryView
from autoscale.replicas.decision import ReplicaDecision, ReplicaLoad
from deployments.cluster.actors import actor, device_env
from deployments.cluster.controller_actor import ControllerActor
from deployments.cluster.draft_supervisor import DraftSupervisor
from deployments.cluster.placement import CONTROLLER_NAMESPACE, controller_name, draft_bundle
from deployments.cluster.shard_client import ShardClient
from deployments.cluster.shard_group import ShardGroup
from deployments.cluster.target_supervisor import TargetSupervisor
from deployments.engine_client import Health
from deployments.settings import AppSettings
from engine.checkpoint.model_config import ModelConfig
from engine.core.pacing import SpeculationPlan
from engine.errors import EngineUnavailable
from engine.ipc.wire import DraftStatus
from engine.metrics.counters import MetricCounters, MetricSnapshot, merge
from engine.metrics.labels import SCALING_REASONS
from engine.model.device import threads_per_shard
from engine.workers.target_shard import ShardReady

CONTROLLER_CHECK_PERIOD_S = 2.0
CONTROLLER_TIMEOUT_S = 3.0
CONTROLLER_HANG_S = 30.0
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
        self._tasks: list[asyncio.Task[None]] = []
        self._targets = TargetSupervisor(
            self._make_target,
            before=self._drop_draft,
            after=self._after_restart,
            start_timeout_s=settings.start_timeout_s,
        )
        self._draft: DraftSupervisor | None = None
        self._draft_task: asyncio.Task[None] | None = None
        self._num_restarts = {"draft": 0, "controller": 0}
        self._last_metrics = MetricSnapshot()

    async def start(self) -> ShardReady:
        """Bring everything up. Raises what the first failing actor raised, or TimeoutError."""
        self._ensure_controller()
        ready = await self._targets.start()
        self._draft = self._make_draft()
        if self._draft is not None:
            await self._draft.bring_up()
        self._supervise_draft()
        self._tasks = [asyncio.create_task(self._targets.supervise()), asyncio.create_task(self._watch_controller())]
        return ready

    async def client(self, timeout_s: float) -> ShardClient:
        """The connection to the target that serves now; waits while one is being made.

        Raises:
            EngineUnavailable: none came within `timeout_s`, or none ever will.
        """
        return (await self._targets.wait(timeout_s)).client

    async def health(self) -> Health:
        """How the engine is now."""
        draft = self._draft.state if self._draft is not None else "none"
        targets = self._targets
        if targets.is_dead:
            return Health(status="dead", reason=targets.trouble, draft=draft)
        if targets.serving is None:
            return Health(
                status="starting" if targets.ready is None else "restarting", reason=targets.trouble, draft=draft
            )
        if self._draft is not None and not self._draft.is_up:
            return Health(status="degraded", reason=f"no draft, serving without: {self._draft.reason}", draft=draft)
        return Health(status="ok", draft=draft)

    async def history(self, since_s: float) -> HistoryView:
        """The last minutes of all engines of the app, from a unix time on.

        Raises:
            EngineUnavailable: the controller is gone, or does not answer; a new one is being made.
        """
        view: HistoryView = await self._ask_controller("history", HISTORY_TIMEOUT_S, since_s)
        return view

    async def metrics(self) -> MetricSnapshot:
        """What was counted in the group's processes so far; of a shard that does not answer, what it said last."""
        counters = MetricCounters()
        counters.set("paceline_draft_up", self._draft is None or self._draft.is_up)
        counters.add("paceline_restarts_total", self._targets.num_restarts, "target")
        for process, count in self._num_restarts.items():
            of_now = self._draft.num_restarts if process == "draft" and self._draft is not None else 0
            counters.add("paceline_restarts_total", count + of_now, process)
        target = self._targets.serving
        asked = [target.lead.metrics.remote()] if target is not None else []
        if self._draft is not None and self._draft.is_up:
            asked.append(self._draft.metrics())
        answers = await asyncio.gather(
            *(asyncio.wait_for(answer, METRICS_TIMEOUT_S) for answer in asked), return_exceptions=True
        )
        snapshot = [answer for answer in answers if isinstance(answer, MetricSnapshot)]
        if target is not None and isinstance(answers[0], MetricSnapshot):
            self._last_metrics = answers[0]
            snapshot = snapshot[1:]
        await self._count_replicas(counters)
        return merge([counters.read(), self._last_metrics, *snapshot])

    async def _count_replicas(self, counters: MetricCounters) -> None:
        """How many there should be, and why."""
        decision: ReplicaDecision | None = ReplicaDecision(self._settings.num_replicas, "fixed")
        if self._settings.autoscaling is not None:
            try:
                decision = await self._ask_controller("replicas", METRICS_TIMEOUT_S)
            except EngineUnavailable:
                decision = None
        if decision is not None:
            counters.set("paceline_desired_replicas", decision.replicas)
            for reason in SCALING_REASONS:
                counters.set("paceline_scaling_reason", reason == decision.reason, reason)

    async def replica_load(self) -> ReplicaLoad | None:
        """Load, and time per token at any batch; None while nothing serves."""
        target = self._targets.serving
        if target is None:
            return None
        try:
            reading: ReplicaLoad = await asyncio.wait_for(target.lead.replica_load.remote(), METRICS_TIMEOUT_S)
        except (ray.exceptions.RayError, TimeoutError):
            return None
        return reading

    async def plan(self) -> SpeculationPlan:
        """The plan in force. Raises EngineUnavailable when the controller does not answer."""
        plan: SpeculationPlan = await self._ask_controller("plan", CONTROLLER_TIMEOUT_S)
        return plan

    async def override(self, changes: dict[str, Any]) -> SpeculationPlan:
        """Change fields of the plan; answers with the new one. Raises as `plan`."""
        plan: SpeculationPlan = await self._ask_controller("override", CONTROLLER_TIMEOUT_S, **changes)
        return plan

    async def _ask_controller(self, method: str, timeout_s: float, *values: Any, **arguments: Any) -> Any:
        try:
            call = getattr(self._controller, method).remote(*values, **arguments)
            return await asyncio.wait_for(call, timeout_s)
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise EngineUnavailable("The controller does not answer; try again soon") from error

    async def stop(self) -> None:
        """Stop everything this group made, the controller excepted (other replicas share it)."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._drop_draft()
        await self._targets.stop()

    def _make_target(self, on_failed: Callable[[str], None]) -> ShardGroup:
        return ShardGroup(
            self._settings,
            folder=self._folder,
            app_name=self._app_name,
            engine_id=self._engine_id,
            node_id=self._node_id,
            placed=self._placed,
            draft=ModelConfig.load(self._draft_folder) if self._draft_folder is not None else None,
            on_draft=self._on_draft,
            on_failed=on_failed,
        )

    def _after_restart(self) -> None:
        """The target serves already; its draft comes when it comes."""
        self._draft = self._make_draft()
        self._supervise_draft()

    def _make_draft(self) -> DraftSupervisor | None:
        target = self._targets.serving
        if self._draft_folder is None or target is None:
            return None
        return DraftSupervisor(
            self._settings.engine,
            shard=target.lead,
            folder=self._draft_folder,
            target_folder=self._folder,
            node_id=self._node_id,
            options=self._draft_options(),
        )

    def _supervise_draft(self) -> None:
        if self._draft is not None:
            self._draft_task = asyncio.create_task(self._draft.supervise())

    async def _drop_draft(self) -> None:
        """A draft belongs to one target: its buffer dies with it."""
        if self._draft_task is not None:
            self._draft_task.cancel()
            await asyncio.gather(self._draft_task, return_exceptions=True)
            self._draft_task = None
        if self._draft is not None:
            self._draft.lost("its target is being replaced")
            self._draft.kill()
            self._num_restarts["draft"] += self._draft.num_restarts
            self._draft.num_restarts = 0

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

    async def _watch_controller(self) -> None:
        while True:
            await asyncio.sleep(CONTROLLER_CHECK_PERIOD_S)
            try:
                await asyncio.wait_for(self._controller.pid.remote(), CONTROLLER_HANG_S)
            except (ray.exceptions.RayError, TimeoutError):
                _log.warning("the controller died or hangs; making a new one")
                ray.kill(self._controller)
                self._num_restarts["controller"] += 1
                self._ensure_controller()

    def _on_draft(self, status: DraftStatus) -> None:
        if self._draft is not None and not status.up:
            self._draft.lost(status.reason)
