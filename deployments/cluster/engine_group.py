"""One engine as a group of actors: target shards, draft and controller, each replaced when it dies.

Owns how they depend on each other. A dead controller or draft is replaced while requests go on. When a shard dies, all
shards and the draft are replaced (`target_supervisor`), and `failover` continues the requests. When that is given up
the group is dead, and Serve replaces the replica. Lives in the replica's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from autoscale.control.controller import initial_plan
from autoscale.replicas.decision import ReplicaDecision, ReplicaLoad
from deployments.cluster.actors import DraftActor, actor, draft_options
from deployments.cluster.backoff import Backoff
from deployments.cluster.controller_handle import ControllerHandle, start_controller
from deployments.cluster.draft_supervisor import DraftStarter, DraftSupervisor
from deployments.cluster.placement import draft_bundle
from deployments.cluster.shard_client import ShardClient
from deployments.cluster.shard_group import ShardGroup
from deployments.cluster.target_supervisor import Target, TargetSupervisor
from deployments.engine_client import AdapterTarget, Health, HealthStatus
from deployments.settings import AppSettings
from engine.checkpoint.draft_check import check_draft
from engine.errors import EngineUnavailable
from engine.ipc.wire import DraftStatus
from engine.messages import CheckedGrammar, GrammarSpec
from engine.metrics.counters import MetricCounters, MetricSnapshot, merge
from engine.metrics.labels import SCALING_REASONS
from engine.workers.shard_ready import ShardReady

T = TypeVar("T")
METRICS_TIMEOUT_S = 1.0
PATIENCE_S = 30.0

OnDraft = Callable[[DraftStatus], None]
OnFailed = Callable[[str], None]


class GroupTarget(Target, AdapterTarget, Protocol):
    """A target as the group uses it; see `ShardGroup`."""

    @property
    def rank0(self) -> Any:
        """The actor of shard 0."""
        ...

    @property
    def client(self) -> ShardClient:
        """The connection to shard 0."""
        ...


class EngineGroup:
    """Call `start` once, and `stop` at the end. `engine_group_on_ray` makes the real one.

    Args:
        make_target: creates a target, not started. It calls the first argument when its draft comes up or goes down,
            and the second once with the reason when it fails.
        make_draft: creates the supervisor of a draft for the actor of shard 0; None for an engine without a draft.
        early_draft: starts the first draft, which loads while the target does; None to load it afterwards.
        controller: the app's controller, not started.
        start_timeout_s: seconds that a target may take to start.
        num_replicas: the configured number of replicas; None if Serve's autoscaler decides.
        backoff: pauses before restarts of the target.
        metrics_timeout_s: seconds to wait for the metrics of each process.
        patience_s: seconds that the check of a grammar may wait for a target.
    """

    def __init__(
        self,
        *,
        make_target: Callable[[OnDraft, OnFailed], GroupTarget],
        make_draft: Callable[[Any], DraftSupervisor] | None,
        early_draft: DraftStarter | None = None,
        controller: ControllerHandle,
        start_timeout_s: float,
        num_replicas: int | None,
        backoff: Backoff | None = None,
        metrics_timeout_s: float = METRICS_TIMEOUT_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.controller = controller
        """The controller of the app."""
        self._make_draft = make_draft
        self._early_draft = early_draft
        self._num_replicas = num_replicas
        self._metrics_timeout_s = metrics_timeout_s
        self._patience_s = patience_s
        self._tasks: list[asyncio.Task[None]] = []
        self._targets = TargetSupervisor(
            lambda on_failed: make_target(self._on_draft, on_failed),
            before=self._drop_draft,
            after=self._after_restart,
            start_timeout_s=start_timeout_s,
            backoff=backoff,
        )
        self._draft: DraftSupervisor | None = None
        self._draft_task: asyncio.Task[None] | None = None
        self._num_draft_restarts = 0  # of the drafts of earlier targets
        self._target_metrics = MetricSnapshot()
        self._decision = ReplicaDecision(num_replicas, "fixed") if num_replicas is not None else None

    async def start(self) -> ShardReady:
        """Start everything. Raises what the first failing actor raised, or TimeoutError."""
        self.controller.start()
        if self._early_draft is not None:
            self._early_draft.begin()
        ready = await self._targets.start()
        self._attach_draft()
        if self._draft is not None:
            await self._draft.bring_up()
        self._supervise_draft()
        self._tasks = [asyncio.create_task(self._targets.supervise()), asyncio.create_task(self.controller.watch())]
        return ready

    async def stop(self) -> None:
        """Stop everything except the controller, which other replicas share."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._drop_draft()
        await self._targets.stop()

    async def client(self, timeout_s: float) -> ShardClient:
        """The connection to the target that serves now, or to the next one.

        Raises:
            EngineUnavailable: no target serves within `timeout_s` seconds, or the group is dead.
        """
        return (await self.target(timeout_s)).client

    async def target(self, timeout_s: float) -> GroupTarget:
        """The target itself, as `client`."""
        return await self._targets.wait(timeout_s)

    async def health(self) -> Health:
        """The state of the engine. Does not wait for any process."""
        draft = self._draft.state if self._draft is not None else "none"
        targets = self._targets
        if targets.is_dead:
            return Health(status="dead", reason=targets.trouble, draft=draft)
        if targets.serving is None:
            status: HealthStatus = "starting" if targets.ready is None else "restarting"
            return Health(status=status, reason=targets.trouble, draft=draft)
        if self._draft is not None and not self._draft.is_up:
            return Health(status="degraded", reason=f"serving without a draft: {self._draft.reason}", draft=draft)
        return Health(status="ok", draft=draft)

    async def check_grammar(self, spec: GrammarSpec, before: str) -> CheckedGrammar:
        """The result of `engine.sampling.grammar.checked`, from the target that serves now or the next one.

        Raises:
            EngineUnavailable: there is none in time.
        """
        target = await self._targets.wait(self._patience_s)
        try:
            async with asyncio.timeout(self._patience_s):
                found: CheckedGrammar = await target.rank0.check_grammar.remote(spec, before)
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise EngineUnavailable("The engine cannot check the grammar now; try again soon") from error
        return found

    async def replica_load(self) -> ReplicaLoad | None:
        """Load and expected time per token; None while no target serves or its shard 0 does not respond."""
        target = self._targets.serving
        return None if target is None else await self._in_time(target.rank0.replica_load.remote())

    async def metrics(self) -> MetricSnapshot:
        """The metrics of all processes of the group. A shard 0 that does not respond counts with its last snapshot."""
        counters = MetricCounters()
        draft = self._draft
        counters.set("paceline_draft_up", draft is None or draft.is_up)
        num_restarts = {
            "target": self._targets.num_restarts,
            "draft": self._num_draft_restarts + (draft.num_restarts if draft is not None else 0),
            "controller": self.controller.num_restarts,
        }
        for process, count in num_restarts.items():
            counters.add("paceline_restarts_total", count, process)
        of_target, of_draft, _ = await asyncio.gather(
            self._read_target(), self._read_draft(), self._count_replicas(counters)
        )
        return merge([counters.read(), of_target, of_draft])

    async def _read_target(self) -> MetricSnapshot:
        target = self._targets.serving
        if target is not None:
            self._target_metrics = await self._in_time(target.rank0.metrics.remote()) or self._target_metrics
        return self._target_metrics

    async def _read_draft(self) -> MetricSnapshot:
        if self._draft is None or not self._draft.is_up:
            return MetricSnapshot()
        return await self._in_time(self._draft.metrics()) or MetricSnapshot()

    async def _in_time(self, reply: Awaitable[T]) -> T | None:
        """The reply of a process; None if it is dead or does not respond in time."""
        try:
            async with asyncio.timeout(self._metrics_timeout_s):
                return await reply
        except (ray.exceptions.RayError, TimeoutError):
            return None

    async def _count_replicas(self, counters: MetricCounters) -> None:
        """Enter the last known decision on the number of replicas."""
        if self._num_replicas is None:
            with contextlib.suppress(EngineUnavailable):
                # A new controller knows no decision until the next report of the autoscaler.
                self._decision = await self.controller.replicas() or self._decision
        if self._decision is not None:
            counters.set("paceline_desired_replicas", self._decision.replicas)
            for reason in SCALING_REASONS:
                counters.set("paceline_scaling_reason", reason == self._decision.reason, reason)

    def _after_restart(self) -> None:
        """A new target serves. Its draft starts in the background."""
        self._attach_draft()
        self._supervise_draft()

    def _attach_draft(self) -> None:
        target = self._targets.serving
        self._draft = None if self._make_draft is None or target is None else self._make_draft(target.rank0)

    def _supervise_draft(self) -> None:
        if self._draft is not None:
            self._draft_task = asyncio.create_task(self._draft.supervise())

    async def _drop_draft(self) -> None:
        """End the draft together with its target, because its buffer lives in the target."""
        if self._draft_task is not None:
            self._draft_task.cancel()
            await asyncio.gather(self._draft_task, return_exceptions=True)
            self._draft_task = None
        if self._early_draft is not None:
            self._early_draft.discard()
        if self._draft is not None:
            self._draft.lost("its target is being replaced")
            self._draft.kill()
            self._num_draft_restarts += self._draft.num_restarts
            self._draft.num_restarts = 0

    def _on_draft(self, status: DraftStatus) -> None:
        if self._draft is not None and not status.up:
            self._draft.lost(status.reason)


def engine_group_on_ray(
    settings: AppSettings,
    *,
    folder: Path,
    draft_folder: Path | None,
    app_name: str,
    group: PlacementGroup | None,
    prepare: Callable[[ShardGroup], Awaitable[None]] | None = None,
) -> EngineGroup:
    """The engine group of this replica, with its actors in the replica's placement group.

    Args:
        settings: of the app, with `device` resolved.
        folder, draft_folder: model folders on this node.
        app_name: the Serve application, which names the controller.
        group: the placement group of this replica; None outside of Serve.
        prepare: as of `ShardGroup`.
    """
    node_id = ray.get_runtime_context().get_node_id()
    engine_id = secrets.token_hex(8)
    draft = check_draft(draft_folder, folder) if draft_folder is not None else None

    def placed(bundle: int) -> dict[str, Any]:
        options: dict[str, Any] = {"num_cpus": 0}
        if group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=bundle
            )
        return options

    def start_draft() -> Any:
        options = placed(draft_bundle(settings.engine)) | draft_options(settings)
        return actor(DraftActor, **options).remote(settings.engine, draft_folder, folder, node_id=node_id)

    drafts = DraftStarter(start_draft) if draft is not None else None

    def make_target(on_draft: OnDraft, on_failed: OnFailed) -> ShardGroup:
        return ShardGroup(
            settings,
            folder=folder,
            app_name=app_name,
            engine_id=engine_id,
            node_id=node_id,
            placed=placed,
            draft=draft,
            on_draft=on_draft,
            on_failed=on_failed,
            prepare=prepare,
            quiet=drafts.until_loaded if drafts is not None else None,
        )

    return EngineGroup(
        make_target=make_target,
        make_draft=(lambda rank0: DraftSupervisor(rank0, drafts)) if drafts is not None else None,
        early_draft=drafts,
        controller=ControllerHandle(
            lambda: start_controller(app_name, initial_plan(settings.engine.speculative), placed(0))
        ),
        start_timeout_s=settings.start_timeout_s,
        patience_s=settings.resume_timeout_s,
        num_replicas=settings.num_replicas if settings.autoscaling is None else None,
    )
