"""Targets that fail: replaced with growing pauses, given up after too many failed starts, always with the reason."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from deployments.cluster.backoff import Backoff
from deployments.cluster.target_supervisor import MAX_RESTARTS, TargetSupervisor
from engine.errors import EngineUnavailable
from engine.workers.shard_ready import ShardReady


class FakeTarget:
    """A target that starts if `comes_up`, and fails in `die`."""

    def __init__(self, on_failed: Callable[[str], None], *, comes_up: bool, max_model_len: int) -> None:
        self._on_failed = on_failed
        self._comes_up = comes_up
        self._max_model_len = max_model_len
        self.failure: str | None = None
        self.num_stopped = 0

    async def start(self) -> ShardReady:
        await asyncio.sleep(0)
        if not self._comes_up:
            raise RuntimeError("first line\nno memory")
        return ShardReady(10, 100, self._max_model_len, "cpu")

    async def stop(self) -> None:
        self.num_stopped += 1

    def die(self, reason: str) -> None:
        self.failure = reason
        self._on_failed(reason)


class World:
    """A supervisor and every target it created.

    Args:
        comes_up: by number of the target, whether it starts; later ones do.
    """

    def __init__(self, comes_up: list[bool], *, lengths: list[int] | None = None) -> None:
        self.made: list[FakeTarget] = []
        self.events: list[str] = []
        self._comes_up = comes_up
        self._lengths = lengths or []

        async def before() -> None:
            self.events.append("before")

        self.supervisor = TargetSupervisor(
            self._make,
            before=before,
            after=lambda: self.events.append("after"),
            start_timeout_s=5.0,
            backoff=Backoff(first_s=0.01, longest_s=0.02),
        )

    def _make(self, on_failed: Callable[[str], None]) -> FakeTarget:
        number = len(self.made)
        comes_up = self._comes_up[number] if number < len(self._comes_up) else True
        length = self._lengths[number] if number < len(self._lengths) else 50
        self.made.append(FakeTarget(on_failed, comes_up=comes_up, max_model_len=length))
        return self.made[-1]


def run(world: World, script: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        await world.supervisor.start()
        task = asyncio.create_task(world.supervisor.supervise())
        await script(world)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await world.supervisor.stop()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_dead_target_is_replaced_and_those_who_wait_get_the_next_one() -> None:
    async def script(world: World) -> None:
        first = await world.supervisor.wait(1.0)
        assert first is world.made[0]
        first.die("shot")
        assert world.supervisor.serving is None
        second = await world.supervisor.wait(5.0)
        assert second is world.made[1]
        assert first.num_stopped >= 1
        assert world.events == ["before", "after"]
        assert world.supervisor.num_restarts == 1

    run(World([]), script)


def test_while_none_serves_the_reason_is_told() -> None:
    async def script(world: World) -> None:
        world.made[0].die("out of memory")
        with pytest.raises(EngineUnavailable, match="out of memory"):
            await world.supervisor.wait(0.0)
        await world.supervisor.wait(5.0)

    run(World([True, False, True]), script)


def test_a_restart_that_fails_is_tried_again_with_the_reason_in_the_report() -> None:
    reports: set[str] = set()

    async def script(world: World) -> None:
        world.made[0].die("shot")
        while world.supervisor.serving is None:
            reports.add(world.supervisor.trouble)
            await asyncio.sleep(0.001)
        assert len(world.made) == 4
        assert world.events == ["before", "before", "before", "after"]

    run(World([True, False, False, True]), script)
    assert any("shot; restart 2 in 0.01 s" in report for report in reports), reports


def test_after_too_many_it_gives_up_and_nobody_waits_any_more() -> None:
    async def script(world: World) -> None:
        world.made[0].die("shot")
        with pytest.raises(EngineUnavailable, match=f"no memory; given up after {MAX_RESTARTS} restarts"):
            await world.supervisor.wait(10.0)
        assert world.supervisor.is_dead
        assert len(world.made) == 1 + MAX_RESTARTS

    run(World([True] + [False] * MAX_RESTARTS), script)


def test_crash_loops_go_on_at_growing_distances() -> None:
    """A target that starts is always replaced; the pauses bound the cost."""

    async def script(world: World) -> None:
        for number in range(10):
            (await world.supervisor.wait(5.0)).die(f"death {number}")
        await world.supervisor.wait(5.0)
        assert world.supervisor.num_restarts == 10

    run(World([]), script)


def test_whoever_waits_is_not_fooled_by_a_target_that_fails_at_once() -> None:
    async def script(world: World) -> None:
        waiting = [asyncio.create_task(world.supervisor.wait(5.0)) for _ in range(3)]
        await asyncio.sleep(0)  # they have begun to wait while the first one serves
        world.made[0].die("shot")
        for target in await asyncio.gather(*waiting, world.supervisor.wait(5.0)):
            assert target in (world.made[0], world.made[1])
        world.made[1].die("shot again")
        assert await world.supervisor.wait(5.0) is world.made[2]

    run(World([]), script)


def test_a_successor_that_holds_less_is_not_taken() -> None:
    async def script(world: World) -> None:
        world.made[0].die("shot")
        assert await world.supervisor.wait(5.0) is world.made[2]

    run(World([], lengths=[50, 40, 60]), script)


def test_a_target_that_dies_while_it_comes_up_is_no_success() -> None:
    class Stillborn(World):
        def _make(self, on_failed: Callable[[str], None]) -> FakeTarget:
            target = super()._make(on_failed)
            if len(self.made) == 2:
                start = target.start

                async def dying() -> ShardReady:
                    ready = await start()
                    target.die("stillborn")
                    return ready

                target.start = dying  # type: ignore[method-assign]
            return target

    async def script(world: World) -> None:
        world.made[0].die("shot")
        assert await world.supervisor.wait(5.0) is world.made[2]

    run(Stillborn([]), script)
