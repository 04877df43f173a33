"""A draft beside its target: attached in order, replaced when it dies or hangs, with pauses while it fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from in_process_actors import InProcessActor, until

from deployments.cluster.backoff import Backoff
from deployments.cluster.draft_supervisor import DraftStarter, DraftSupervisor
from engine.draft.messages import DraftInfo
from engine.metrics.counters import MetricCounters, MetricSnapshot

INFO = DraftInfo(draft_vocab=7, vocab=None)


class Rank0:
    """What a draft needs of the target's shard 0; records the calls of both."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def open_draft_buffer(self, info: DraftInfo, epoch: int) -> str:
        self.calls.append(("open", info, epoch))
        return f"buffer {epoch}"

    def attach_measured_draft(self, timeout_s: float) -> None:
        assert timeout_s > 0
        self.calls.append("attach")


class Draft:
    """A draft's process: `run` ends when `ended` is set."""

    def __init__(self, calls: list[Any], *, loads: bool) -> None:
        self._calls = calls
        self._loads = loads
        self.ended = asyncio.Event()

    def load(self) -> DraftInfo:
        if not self._loads:
            raise RuntimeError("traceback\nno such file")
        return INFO

    def connect(self, handle: str) -> None:
        self._calls.append(("connect", handle))

    async def run(self) -> None:
        self._calls.append("run")
        await self.ended.wait()

    def metrics(self) -> MetricSnapshot:
        counters = MetricCounters()
        counters.set("paceline_draft_up", 1)
        return counters.read()


class World:
    """A supervisor and every draft it started.

    Args:
        loads: by number of the draft, whether it loads; later ones do.
    """

    def __init__(self, loads: list[bool] | None = None) -> None:
        self.made: list[InProcessActor] = []
        self.killed: list[InProcessActor] = []
        self.made_s: list[float] = []
        self.states: list[str] = []  # of the supervisor whenever it starts a draft
        self.rank0 = Rank0()
        self._loads = loads or []
        self.starter = DraftStarter(self._make)
        self.supervisor = DraftSupervisor(
            InProcessActor(self.rank0),
            self.starter,
            kill=self.killed.append,
            backoff=Backoff(first_s=0.02, longest_s=0.04),
        )

    def _make(self) -> InProcessActor:
        number = len(self.made)
        loads = self._loads[number] if number < len(self._loads) else True
        self.made.append(InProcessActor(Draft(self.rank0.calls, loads=loads)))
        self.made_s.append(asyncio.get_running_loop().time())
        self.states.append(self.supervisor.state)
        return self.made[-1]


@asynccontextmanager
async def supervised(world: World) -> AsyncIterator[DraftSupervisor]:
    await world.supervisor.bring_up()
    task = asyncio.create_task(world.supervisor.supervise())
    await asyncio.sleep(0)
    try:
        async with asyncio.timeout(20):
            yield world.supervisor
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_bring_up_hands_the_buffer_over_before_the_target_attaches() -> None:
    async def run() -> None:
        world = World()
        assert world.supervisor.state == "down: starting"
        await world.supervisor.bring_up()
        await asyncio.sleep(0)
        assert world.rank0.calls == [("open", INFO, 1), ("connect", "buffer 1"), "run", "attach"]
        assert (world.supervisor.is_up, world.supervisor.state) == (True, "up")
        assert (await world.supervisor.metrics()).number("paceline_draft_up") == 1

    asyncio.run(run())


def test_a_draft_that_does_not_load_is_an_error_of_the_first_bring_up() -> None:
    async def run() -> None:
        world = World([False])
        with pytest.raises(RuntimeError, match="no such file"):
            await world.supervisor.bring_up()
        assert not world.supervisor.is_up

    asyncio.run(run())


@pytest.mark.parametrize("fault", ["dies", "ends", "hangs"])
def test_a_draft_that_goes_away_is_replaced_with_a_new_epoch(fault: str) -> None:
    async def run() -> None:
        world = World()
        async with supervised(world) as supervisor:
            first = world.made[0]
            if fault == "dies":
                first.die()
            elif fault == "ends":
                first.instance.ended.set()
            else:
                first.is_stopped = True
                supervisor.lost("no draft response within 0.1 s")
                assert supervisor.state == "down: no draft response within 0.1 s"
            await until(lambda: len(world.made) == 2 and supervisor.is_up)
            assert world.killed == [first]
            assert ("open", INFO, 2) in world.rank0.calls
            assert supervisor.num_restarts == 1

    asyncio.run(run())


def test_the_state_names_the_cause_of_each_restart() -> None:
    async def run() -> None:
        world = World([True, False])
        async with supervised(world) as supervisor:
            world.made[0].die()
            await until(lambda: supervisor.is_up and len(world.made) == 3)
        assert world.states == [
            "down: starting",
            "down: the draft's process died (ActorDiedError)",
            "down: restart failed: no such file",
        ]

    asyncio.run(run())


def test_replacements_that_fail_are_repeated_with_growing_pauses() -> None:
    async def run() -> None:
        world = World([True, False, False, False])
        async with supervised(world) as supervisor:
            world.made[0].die()
            await until(lambda: supervisor.is_up and len(world.made) == 5)
            assert supervisor.num_restarts == 4
            assert world.killed == world.made[:4], "a draft that failed to load leaves no process"
        pauses = [later - earlier for earlier, later in zip(world.made_s[1:], world.made_s[2:], strict=False)]
        assert pauses[0] >= 0.02
        assert min(pauses[1:]) >= 0.04

    asyncio.run(run())


def test_kill_ends_the_process_once() -> None:
    async def run() -> None:
        world = World()
        await world.supervisor.bring_up()
        world.supervisor.kill()
        world.supervisor.kill()
        assert world.killed == world.made
        assert await world.supervisor.metrics() == MetricSnapshot()

    asyncio.run(run())


def test_a_draft_that_was_begun_early_is_the_one_that_comes_up() -> None:
    world = World()

    async def main() -> None:
        await world.starter.until_loaded()  # nothing has begun
        world.starter.begin()
        await world.starter.until_loaded()
        assert len(world.made) == 1
        await world.supervisor.bring_up()
        assert len(world.made) == 1
        await world.supervisor.bring_up()
        assert len(world.made) == 2

    asyncio.run(main())


def test_a_draft_that_was_begun_early_and_does_not_load_raises_when_it_is_brought_up() -> None:
    world = World(loads=[False])

    async def main() -> None:
        world.starter.begin()
        await world.starter.until_loaded()
        with pytest.raises(RuntimeError, match="no such file"):
            await world.supervisor.bring_up()

    asyncio.run(main())
