"""One engine as a group of actors: target shards, draft and controller, each replaced when it dies.

Owns what happens when one does: a dead draft or controller is made anew and nobody notices; dead shards are all
replaced, with growing pauses while that keeps failing, and `health` says why; after too many failures in a row the
group is dead, and Serve replaces the replica. `continuation` carries requests over. Lives in the replica's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from autoscale.controller import initial_plan
from autoscale.history import HistoryView
from autoscale.replicas import ReplicaDecision, ReplicaReading
from deployments.actors import ControllerActor, actor, device_env
from deployments.backoff import Backoff
from deployments.draft_supervisor import DraftSupervisor
from deployments.engine_client import Health
from deployments.naming import CONTROLLER_NAMESPACE, controller_name
from deployments.placement import draft_bundle
from deployments.settings import AppSettings
from deployments.shard_client import ShardClient
from deployments.shard_group import ShardGroup
from engine.errors import EngineError, EngineUnavailable
from engine.ledger import Ledger, Readings, merge
from engine.metrics import SCALING_REASONS
from engine.model_config import ModelConfig
from engine.placement import threads_per_shard
from engine.plan import Plan
from engine.target_shard import ShardReady
from engine.wire import DraftStatus

CONTROLLER_CHECK_PERIOD_S = 2.0
CONTROLLER_TIMEOUT_S = 3.0
METRICS_TIMEOUT_S = 1.0
HISTORY_TIMEOUT_S = 3.0
MAX_RESTARTS = 6
"""Of the target in a row, each soon after the one before."""
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
        self._target: ShardGroup | None = None
        self._failed = asyncio.Event()  # the target that served has ended by itself
        self._up = asyncio.Event()  # a target serves, or none ever will again
        self._trouble = "loading the model"
        self._is_dead = False
        self._draft: DraftSupervisor | None = None
        self._draft_task: asyncio.Task[None] | None = None
        self._num_restarts = {"draft": 0, "target": 0, "controller": 0}
        self._last_metrics = Readings()
        self.ready: ShardReady | None = None

    async def start(self) -> ShardReady:
        """Bring everything up. Raises what the first failing actor raised, or TimeoutError."""
        self._ensure_controller()
        self.ready = await self._bring_up_target()
        self._draft = self._make_draft()
        if self._draft is not None:
            await self._draft.bring_up()
        self._supervise_draft()
        self._tasks = [asyncio.create_task(self._supervise()), asyncio.create_task(self._watch_controller())]
        return self.ready

    async def client(self, timeout_s: float) -> ShardClient:
        """The connection to the target that serves now; waits while one is being made.

        Raises:
            EngineUnavailable: none came within `timeout_s`, or none ever will.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._up.wait(), timeout_s)
        if self._is_dead or self._target is None or not self._up.is_set():
            raise EngineUnavailable(f"The engine is not available: {self._trouble}")
        return self._target.client

    async def health(self) -> Health:
        """How the engine is now."""
        draft = self._draft.state if self._draft is not None else "none"
        if self._is_dead:
            return Health(status="dead", reason=self._trouble, draft=draft)
        if not self._up.is_set():
            return Health(status="starting" if self.ready is None else "restarting", reason=self._trouble, draft=draft)
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

    async def metrics(self) -> Readings:
        """What was counted in the group's processes so far; of a shard that does not answer, what it said last."""
        ledger = Ledger()
        ledger.set("paceline_draft_up", self._draft is None or self._draft.is_up)
        for process, count in self._num_restarts.items():
            of_now = self._draft.num_restarts if process == "draft" and self._draft is not None else 0
            ledger.add("paceline_restarts_total", count + of_now, process)
        serves = self._target is not None and self._up.is_set() and not self._is_dead
        asked = [self._target.lead.metrics.remote()] if serves and self._target is not None else []
        if self._draft is not None and self._draft.is_up:
            asked.append(self._draft.metrics())
        answers = await asyncio.gather(
            *(asyncio.wait_for(answer, METRICS_TIMEOUT_S) for answer in asked), return_exceptions=True
        )
        readings = [answer for answer in answers if isinstance(answer, Readings)]
        if serves and isinstance(answers[0], Readings):
            self._last_metrics = answers[0]
            readings = readings[1:]
        await self._count_replicas(ledger)
        return merge([ledger.read(), self._last_metrics, *readings])

    async def _count_replicas(self, ledger: Ledger) -> None:
        """How many there should be, and why."""
        decision: ReplicaDecision | None = ReplicaDecision(self._settings.num_replicas, "fixed")
        if self._settings.autoscaling is not None:
            try:
                decision = await self._ask_controller("replicas", METRICS_TIMEOUT_S)
            except EngineUnavailable:
                decision = None
        if decision is not None:
            ledger.set("paceline_desired_replicas", decision.replicas)
            for reason in SCALING_REASONS:
                ledger.set("paceline_scaling_reason", reason == decision.reason, reason)

    async def outlook(self) -> ReplicaReading | None:
        """Load, and time per token at any batch; None while nothing serves."""
        if self._target is None or not self._up.is_set() or self._is_dead:
            return None
        try:
            reading: ReplicaReading = await asyncio.wait_for(self._target.lead.outlook.remote(), METRICS_TIMEOUT_S)
        except (ray.exceptions.RayError, TimeoutError):
            return None
        return reading

    async def plan(self) -> Plan:
        """The plan in force. Raises EngineUnavailable when the controller does not answer."""
        plan: Plan = await self._ask_controller("plan", CONTROLLER_TIMEOUT_S)
        return plan

    async def override(self, changes: dict[str, Any]) -> Plan:
        """Change fields of the plan; answers with the new one. Raises as `plan`."""
        plan: Plan = await self._ask_controller("override", CONTROLLER_TIMEOUT_S, **changes)
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
        if self._target is not None:
            await self._target.stop()

    async def _bring_up_target(self) -> ShardReady:
        """A new target in place of the old one, which has been stopped. Raises whatever kept it from starting."""
        self._failed.clear()
        target = self._target = ShardGroup(
            self._settings,
            folder=self._folder,
            app_name=self._app_name,
            engine_id=self._engine_id,
            node_id=self._node_id,
            placed=self._placed,
            draft=ModelConfig.load(self._draft_folder) if self._draft_folder is not None else None,
            on_draft=self._on_draft,
            on_failed=self._on_failed,
        )
        async with asyncio.timeout(self._settings.start_timeout_s):
            ready = await target.start()
        if self.ready is not None and ready.max_model_len < self.ready.max_model_len:
            raise EngineError(f"only {ready.max_model_len} tokens of context fit, {self.ready.max_model_len} before")
        if target.failure is None:
            self._up.set()
        return ready

    def _on_failed(self, reason: str) -> None:
        self._trouble = reason
        self._up.clear()
        self._failed.set()

    async def _supervise(self) -> None:
        """Replace the target each time it fails, until that itself fails too often."""
        backoff = Backoff(first_s=1.0, longest_s=60.0)
        while True:
            born_s = asyncio.get_running_loop().time()
            await self._failed.wait()
            cause = self._trouble
            backoff.lived(asyncio.get_running_loop().time() - born_s)
            while not await self._replace_target(cause, backoff):
                if backoff.num_failures >= MAX_RESTARTS:
                    self._trouble = f"{self._trouble}; given up after {backoff.num_failures} restarts"
                    self._is_dead = True
                    self._up.set()  # nobody needs to wait any more
                    return
            self._num_restarts["target"] += 1
            self._draft = self._make_draft()
            self._supervise_draft()

    async def _replace_target(self, cause: str, backoff: Backoff) -> bool:
        """One attempt, after a pause unless it is the first. Returns whether a target serves now."""
        pause_s = backoff.next_pause_s()
        self._trouble = f"{cause}; restart {backoff.num_failures} of {MAX_RESTARTS} in {pause_s:g} s"
        _log.warning("engine %s: %s", self._engine_id, self._trouble)
        try:
            await self._drop_draft()
            if self._target is not None:
                await self._target.stop()
            await asyncio.sleep(pause_s)
            await self._bring_up_target()
        except Exception as error:  # noqa: BLE001 - it may fail in any way; the next attempt comes later
            reason = str(error).splitlines()[-1] if str(error) else type(error).__name__
            self._trouble = f"{cause}; a restart failed: {reason}"
            return False
        return self._up.is_set()

    def _make_draft(self) -> DraftSupervisor | None:
        if self._draft_folder is None or self._target is None:
            return None
        return DraftSupervisor(
            self._settings.engine,
            shard=self._target.lead,
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
                await self._controller.pid.remote()
            except ray.exceptions.RayError:
                _log.warning("the controller died; making a new one")
                self._num_restarts["controller"] += 1
                self._ensure_controller()

    def _on_draft(self, status: DraftStatus) -> None:
        if self._draft is not None and not status.up:
            self._draft.lost(status.reason)
