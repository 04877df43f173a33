"""The controller as a replica sees it: questions with a deadline, and a replacement when the actor dies or hangs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from in_process_actors import InProcessActor, until

from autoscale.control.controller import Controller
from autoscale.control.metric_targets import MetricTarget
from autoscale.replicas.decision import ReplicaDecision
from deployments.cluster.controller_handle import ControllerHandle
from engine.core.pacing import SpeculationPlan
from engine.errors import EngineUnavailable


class ProcessController(Controller):
    def pid(self) -> int:
        return 1


class World:
    """A handle and every controller actor it created.

    Args:
        failures: errors that the next attempts to create an actor raise.
    """

    def __init__(self, failures: list[Exception] | None = None) -> None:
        self.made: list[InProcessActor] = []
        self.killed: list[InProcessActor] = []
        self.failures = failures or []
        self.handle = ControllerHandle(self._make, kill=self.killed.append, check_period_s=0.005, hang_timeout_s=0.05)

    def _make(self) -> InProcessActor:
        if self.made and self.failures:
            raise self.failures.pop(0)
        self.made.append(InProcessActor(ProcessController(SpeculationPlan(version=len(self.made)))))
        return self.made[-1]


@asynccontextmanager
async def watched(world: World) -> AsyncIterator[ControllerHandle]:
    world.handle.start()
    task = asyncio.create_task(world.handle.watch())
    try:
        async with asyncio.timeout(20):
            yield world.handle
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_questions_reach_the_controller() -> None:
    async def run() -> None:
        world = World()
        world.handle.start()
        (controller,) = world.made
        assert await world.handle.replicas() is None
        controller.instance.scaled(ReplicaDecision(3, "queue"))
        assert await world.handle.replicas() == ReplicaDecision(3, "queue")
        assert (await world.handle.override({"max_k": 2})).max_k == 2
        assert (await world.handle.plan()).max_k == 2
        assert (await world.handle.history(0.0)).plan.max_k == 2
        target = MetricTarget(address="192.0.2.1:9400", labels={}, node_id="n1")
        assert await world.handle.announce(target) == frozenset()
        assert await world.handle.targets() == (target,)

    asyncio.run(run())


@pytest.mark.parametrize("ask", ["plan", "replicas", "history"])
def test_a_dead_controller_is_an_error_at_once(ask: str) -> None:
    async def run() -> None:
        world = World()
        world.handle.start()
        world.made[0].die()
        arguments = [0.0] if ask == "history" else []
        with pytest.raises(EngineUnavailable, match="controller does not respond"):
            await asyncio.wait_for(getattr(world.handle, ask)(*arguments), 1)

    asyncio.run(run())


def test_a_stopped_controller_is_an_error_within_the_timeout() -> None:
    async def run() -> None:
        world = World()
        world.handle.start()
        world.made[0].is_stopped = True
        with pytest.raises(EngineUnavailable, match="controller does not respond"):
            await asyncio.wait_for(world.handle.replicas(), 3)

    asyncio.run(run())


def stop(actor: InProcessActor) -> None:
    actor.is_stopped = True


@pytest.mark.parametrize("fault", [InProcessActor.die, stop])
def test_a_controller_that_dies_or_hangs_is_replaced(fault: Callable[[InProcessActor], Any]) -> None:
    async def run() -> None:
        world = World()
        async with watched(world) as handle:
            fault(world.made[0])
            await until(lambda: len(world.made) == 2)
            assert world.killed == [world.made[0]]
            assert (await handle.plan()).version == 1
            assert handle.num_restarts == 1
            await asyncio.sleep(0.05)
            assert len(world.made) == 2, "a healthy controller stays"

    asyncio.run(run())


def test_the_watch_ends_when_it_is_cancelled_together_with_a_response() -> None:
    """`asyncio.wait_for` of Python 3.11 returns the response and drops the cancellation."""

    async def run() -> None:
        responses: list[asyncio.Future[int]] = []

        def ask() -> asyncio.Future[int]:
            responses.append(asyncio.get_running_loop().create_future())
            return responses[-1]

        controller = SimpleNamespace(pid=SimpleNamespace(remote=ask))
        handle = ControllerHandle(lambda: controller, kill=print, check_period_s=0.001)
        handle.start()
        task = asyncio.create_task(handle.watch())
        await until(lambda: len(responses) == 1)
        responses[0].set_result(1)
        task.cancel()
        await asyncio.wait([task], timeout=1)
        assert task.cancelled()

    asyncio.run(run())


def test_the_watch_goes_on_when_a_replacement_cannot_be_created() -> None:
    async def run() -> None:
        world = World([ValueError("the name is taken")])
        async with watched(world) as handle:
            world.made[0].die()
            await until(lambda: len(world.made) == 2)
            assert (await handle.plan()).version == 1
            assert handle.num_restarts == 1

    asyncio.run(run())
