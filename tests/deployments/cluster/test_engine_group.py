"""The engine group over actors in this process: what is replaced, what is kept, and what health and metrics say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from in_process_actors import InProcessActor, until

from autoscale.control.controller import Controller
from autoscale.replicas.decision import ReplicaDecision, ReplicaLoad
from deployments.cluster.backoff import Backoff
from deployments.cluster.controller_handle import ControllerHandle
from deployments.cluster.draft_supervisor import DraftStarter, DraftSupervisor
from deployments.cluster.engine_group import EngineGroup
from deployments.cluster.grammar_checks import GrammarChecks
from deployments.cluster.target_supervisor import MAX_RESTARTS
from engine.core.pacing import SpeculationPlan
from engine.draft.messages import DraftInfo
from engine.errors import EngineUnavailable
from engine.ipc.wire import DraftStatus
from engine.messages import CheckedGrammar, GrammarSpec
from engine.metrics.counters import MetricCounters, MetricSnapshot
from engine.sampling.grammar import checked
from engine.workers.shard_ready import ShardReady

READY = ShardReady(10, 100, 50, "cpu")
LOAD = ReplicaLoad(num_running=1, num_waiting=0, tokens_per_s=9.0, tpot_s=(0.01,), max_running=8)


class Rank0:
    """Shard 0 of a target, with counters that a test changes."""

    def __init__(self) -> None:
        self.counters = MetricCounters()

    def open_draft_buffer(self, info: DraftInfo, epoch: int) -> int:
        return epoch

    def attach_measured_draft(self, timeout_s: float) -> None:
        assert timeout_s > 0

    def check_grammar(self, spec: GrammarSpec, before: str) -> CheckedGrammar:
        return checked(spec, before)

    def metrics(self) -> MetricSnapshot:
        return self.counters.read()

    def replica_load(self) -> ReplicaLoad:
        return LOAD


class Draft:
    def load(self) -> DraftInfo:
        return DraftInfo(draft_vocab=7, vocab=None)

    def connect(self, handle: int) -> None:
        assert handle > 0

    async def run(self) -> None:
        await asyncio.Event().wait()

    def metrics(self) -> MetricSnapshot:
        counters = MetricCounters()
        counters.add("paceline_preemptions_total", 100)
        return counters.read()


class ProcessController(Controller):
    def pid(self) -> int:
        return 1


class FakeTarget:
    """A target that starts unless `error` is set, and fails when the test calls `die`."""

    def __init__(
        self, on_draft: Callable[[DraftStatus], None], on_failed: Callable[[str], None], error: Exception | None
    ) -> None:
        self.on_draft = on_draft
        self._on_failed = on_failed
        self._error = error
        self.rank0 = InProcessActor(Rank0())
        self.client: Any = object()
        self.failure: str | None = None
        self.is_running = False

    async def start(self) -> ShardReady:
        await asyncio.sleep(0)
        if self._error is not None:
            raise self._error
        self.is_running = True
        return READY

    async def stop(self) -> None:
        self.is_running = False

    def die(self, reason: str) -> None:
        self.failure = reason
        self.rank0.die()
        self._on_failed(reason)


class World:
    """A group and everything that it created.

    Args:
        errors: by number of the target, why it does not start.
    """

    def __init__(
        self,
        errors: dict[int, Exception] | None = None,
        *,
        has_draft: bool = True,
        num_replicas: int | None = 2,
        draft_pause_s: float = 0.01,
    ) -> None:
        self._errors = errors or {}
        self._draft_pause_s = draft_pause_s
        self.targets: list[FakeTarget] = []
        self.drafts: list[InProcessActor] = []
        self.controllers: list[InProcessActor] = []
        self._starter = DraftStarter(self._start_draft, kill=InProcessActor.die)
        self.group = EngineGroup(
            make_target=self._make_target,
            make_draft=self._make_draft if has_draft else None,
            early_draft=self._starter if has_draft else None,
            controller=ControllerHandle(self._make_controller, kill=InProcessActor.die, check_period_s=0.005),
            start_timeout_s=5.0,
            num_replicas=num_replicas,
            backoff=Backoff(first_s=0.01, longest_s=0.02),
            metrics_timeout_s=0.05,
        )

    def _make_target(self, on_draft: Callable[[DraftStatus], None], on_failed: Callable[[str], None]) -> FakeTarget:
        self.targets.append(FakeTarget(on_draft, on_failed, self._errors.get(len(self.targets))))
        return self.targets[-1]

    def _make_draft(self, rank0: Any) -> DraftSupervisor:
        assert rank0 is self.targets[-1].rank0
        # The second restart of a series waits, so that the state between is visible.
        backoff = Backoff(first_s=self._draft_pause_s, longest_s=self._draft_pause_s)
        return DraftSupervisor(rank0, self._starter, kill=InProcessActor.die, backoff=backoff)

    def _start_draft(self) -> InProcessActor:
        if not self.drafts:
            assert not self.targets, "the first draft loads while the target does"
        self.drafts.append(InProcessActor(Draft()))
        return self.drafts[-1]

    def _make_controller(self) -> InProcessActor:
        self.controllers.append(InProcessActor(ProcessController(SpeculationPlan(version=len(self.controllers)))))
        return self.controllers[-1]

    @property
    def draft_up(self) -> bool:
        return bool(self.drafts) and not self.drafts[-1].is_dead

    async def status(self) -> tuple[str, str, str]:
        health = await self.group.health()
        return health.status, health.reason, health.draft


@asynccontextmanager
async def started(world: World) -> AsyncIterator[EngineGroup]:
    try:
        async with asyncio.timeout(20):
            assert await world.group.start() == READY
            await asyncio.sleep(0)
            yield world.group
    finally:
        await world.group.stop()


def run(world: World, script: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        async with started(world):
            await script(world)

    asyncio.run(main())


def test_start_and_stop() -> None:
    world = World()

    async def script(world: World) -> None:
        assert (len(world.targets), len(world.drafts), len(world.controllers)) == (1, 1, 1)
        assert await world.status() == ("ok", "", "up")
        assert await world.group.client(0.0) is world.targets[0].client
        assert await world.group.replica_load() == LOAD

    run(world, script)
    assert not world.targets[0].is_running
    assert world.drafts[0].is_dead
    assert not world.controllers[0].is_dead, "other replicas share the controller"


def test_a_grammar_is_checked_by_the_target_from_a_thread() -> None:
    async def script(world: World) -> None:
        check = GrammarChecks(world.group.check_grammar, asyncio.get_running_loop())
        for spec in (GrammarSpec(kind="regex", text="[ab]+"), GrammarSpec(kind="regex", text="(")):
            assert await asyncio.to_thread(check, spec) == checked(spec)
        spec = GrammarSpec(kind="choice", text='["yes"]')
        assert await asyncio.to_thread(check, spec, 'root ::= "a"') == checked(spec, 'root ::= "a"')
        world.targets[-1].rank0.die()
        assert await asyncio.to_thread(check, spec, 'root ::= "a"') == checked(spec, 'root ::= "a"'), "kept"
        with pytest.raises(EngineUnavailable):
            await asyncio.to_thread(check, spec)

    run(World(), script)


def test_an_engine_without_a_draft_is_healthy() -> None:
    async def script(world: World) -> None:
        assert await world.status() == ("ok", "", "none")
        assert world.drafts == []
        assert (await world.group.metrics()).number("paceline_draft_up") == 1

    run(World(has_draft=False), script)


def test_health_before_the_target_serves() -> None:
    async def main() -> None:
        world = World()
        assert await world.status() == ("starting", "loading the model", "none")
        assert await world.group.replica_load() is None
        await world.group.stop()

    asyncio.run(main())


def test_a_target_that_does_not_start_is_an_error_of_start() -> None:
    async def main() -> None:
        world = World({0: RuntimeError("no memory")})
        with pytest.raises(RuntimeError, match="no memory"):
            await world.group.start()
        await world.group.stop()
        assert all(draft.is_dead for draft in world.drafts)

    asyncio.run(main())


def test_a_lost_draft_degrades_the_engine_until_another_one_is_up() -> None:
    async def script(world: World) -> None:
        world.targets[0].on_draft(DraftStatus(up=True, reason=""))
        assert await world.status() == ("ok", "", "up")
        for number in (1, 2):  # the second restart of a series waits
            world.targets[0].on_draft(DraftStatus(up=False, reason="no draft response within 0.1 s"))
            status, reason, draft = await world.status()
            assert (status, draft) == ("degraded", "down: no draft response within 0.1 s")
            assert reason == "serving without a draft: no draft response within 0.1 s"
            assert (await world.group.metrics()).number("paceline_draft_up") == 0
            await until(lambda number=number: len(world.drafts) == number + 1 and world.draft_up)  # type: ignore[misc]
            while (await world.group.health()).status != "ok":
                await asyncio.sleep(0.001)
        snapshot = await world.group.metrics()
        assert snapshot.number("paceline_draft_up") == 1
        assert snapshot.number("paceline_restarts_total", "draft") == 2
        assert len(world.targets) == 1

    run(World(draft_pause_s=0.2), script)


def test_a_dead_target_is_replaced_together_with_its_draft() -> None:
    async def script(world: World) -> None:
        world.targets[0].on_draft(DraftStatus(up=False, reason="killed"))
        await until(lambda: len(world.drafts) == 2)
        while (await world.group.health()).status != "ok":
            await asyncio.sleep(0.001)
        world.targets[0].die("a target shard died: shot")
        status, reason, _ = await world.status()
        assert (status, reason) == ("restarting", "a target shard died: shot")
        assert await world.group.replica_load() is None
        assert await world.group.client(5.0) is world.targets[1].client
        assert not world.targets[0].is_running
        assert world.drafts[1].is_dead
        await until(lambda: len(world.drafts) == 3)
        while (await world.group.health()).status != "ok":
            await asyncio.sleep(0.001)
        snapshot = await world.group.metrics()
        assert snapshot.number("paceline_restarts_total", "target") == 1
        assert snapshot.number("paceline_restarts_total", "draft") == 2, "one of each target"
        assert len(world.controllers) == 1

    run(World(), script)


def test_a_target_that_never_starts_again_makes_the_group_dead() -> None:
    async def script(world: World) -> None:
        world.targets[0].die("shot")
        with pytest.raises(EngineUnavailable, match=f"no memory; given up after {MAX_RESTARTS} restarts"):
            await world.group.client(10.0)
        status, reason, draft = await world.status()
        assert status == "dead"
        assert "no memory" in reason
        assert draft == "down: its target is being replaced"
        assert world.drafts[0].is_dead

    run(World({number: RuntimeError("no memory") for number in range(1, 1 + MAX_RESTARTS)}), script)


def test_a_lost_controller_is_replaced_while_the_engine_serves() -> None:
    async def script(world: World) -> None:
        world.controllers[0].die()
        assert (await world.status())[0] == "ok"
        with pytest.raises(EngineUnavailable):
            await world.group.controller.plan()
        await until(lambda: len(world.controllers) == 2)
        assert (await world.group.controller.plan()).version == 1
        assert (await world.group.metrics()).number("paceline_restarts_total", "controller") == 1
        assert len(world.targets) == 1

    run(World(), script)


def test_metrics_add_up_and_keep_the_last_snapshot_of_a_shard_that_does_not_respond() -> None:
    async def script(world: World) -> None:
        rank0 = world.targets[0].rank0
        rank0.instance.counters.add("paceline_preemptions_total", 3)
        name = "paceline_preemptions_total"
        assert (await world.group.metrics()).number(name) == 103
        rank0.is_stopped = True
        rank0.instance.counters.add(name, 5)
        assert (await world.group.metrics()).number(name) == 103, "3 of the shard's last snapshot"
        assert await world.group.replica_load() is None
        world.drafts[0].is_stopped = True
        assert (await world.group.metrics()).number(name) == 3
        rank0.is_stopped = False
        assert (await world.group.metrics()).number(name) == 8

    run(World(), script)


def test_metrics_of_a_shard_that_died_are_kept() -> None:
    async def script(world: World) -> None:
        world.targets[0].rank0.instance.counters.add("paceline_preemptions_total", 3)
        await world.group.metrics()
        world.targets[0].rank0.die()
        assert (await world.group.metrics()).number("paceline_preemptions_total") == 3

    run(World(has_draft=False), script)


def test_the_wanted_number_of_replicas_is_the_configured_one() -> None:
    async def script(world: World) -> None:
        snapshot = await world.group.metrics()
        assert snapshot.number("paceline_desired_replicas") == 2
        assert snapshot.number("paceline_scaling_reason", "fixed") == 1
        assert snapshot.number("paceline_scaling_reason", "queue") == 0

    run(World(num_replicas=2), script)


def test_the_wanted_number_of_replicas_is_the_autoscaler_s() -> None:
    async def script(world: World) -> None:
        controller = world.controllers[0]
        controller.instance.scaled(ReplicaDecision(3, "queue"))
        snapshot = await world.group.metrics()
        assert snapshot.number("paceline_desired_replicas") == 3
        assert snapshot.number("paceline_scaling_reason", "queue") == 1
        assert snapshot.number("paceline_scaling_reason", "fixed") == 0
        controller.die()
        await until(lambda: len(world.controllers) == 2)
        snapshot = await world.group.metrics()
        assert snapshot.number("paceline_desired_replicas") == 3, "the new controller knows no decision yet"
        assert snapshot.number("paceline_scaling_reason", "queue") == 1

    run(World(num_replicas=None), script)
