"""A group of shards over actors of this process: how it comes up, what ends it, and that nothing is left of it.

Each shard has a real child process, and rank 0 a real socket; only Ray is missing.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from local_actors import LocalActor
from tiny_models import write_model

from deployments.cluster.actors import ShardActor
from deployments.cluster.shard_group import ShardGroup
from deployments.settings import AppSettings
from engine.checkpoint.model_config import ModelConfig
from engine.errors import EngineUnavailable, ShardDown
from engine.ipc.replica_socket import ShardSocket
from engine.ipc.wire import DraftStatus, StepDeltas
from engine.messages import Delta, SamplingParams, Submit
from engine.workers.shard_ready import ShardReady


class FakeShard:
    """A shard without a model; rank 0 answers every request with one token."""

    def __init__(self, events: list[str], *, rank: int, fails_to_load: bool) -> None:
        self.events = events
        self.rank = rank
        self.process = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.num_turns = 0
        self.is_stuck = False
        self.answers_heartbeats = True
        self._fails_to_load = fails_to_load
        self.socket: ShardSocket | None = None

    async def pid(self) -> int:
        return self.process.pid

    async def open_rendezvous(self) -> int:
        return 4321

    async def load(self, rendezvous_port: int | None) -> ShardReady:
        if self._fails_to_load:
            raise MemoryError(f"no memory on rank {self.rank}")
        return ShardReady(90, 100, 1000, "cpu")

    async def measure(self) -> int:
        return 10 + self.rank

    async def allocate(self, num_blocks: int, max_model_len: int) -> None:
        self.events.append(f"allocate {self.rank} {num_blocks} {max_model_len}")

    async def forward_handle(self, rank: int) -> str:
        return f"handle of {rank}"

    async def follow(self, handle: str) -> None:
        self.events.append(f"follow {self.rank} {handle}")

    async def start_leader(self, app_name: str, engine_id: str) -> str:
        await asyncio.sleep(0)  # a follower that was started runs by now
        self.events.append(f"start_leader {app_name} {engine_id}")
        self.socket = ShardSocket(submit=self._answer, abort=lambda _: None, abandon=lambda: None)
        return self.socket.path

    async def run(self) -> None:
        self.events.append(f"run {self.rank}")
        await self.ended

    async def heartbeat(self) -> int:
        if not self.answers_heartbeats:
            await asyncio.Event().wait()
        self.num_turns += not self.is_stuck
        return self.num_turns

    async def stop(self) -> None:
        self.events.append(f"stop {self.rank}")

    def _answer(self, submit: Submit) -> None:
        assert self.socket is not None
        if submit.request_id != "unanswered":
            delta = Delta(request_id=submit.request_id, token_ids=(7,), finish_reason="stop")
            self.socket.send(StepDeltas((delta,)))


class World:
    """A group, and everything that it created and reported."""

    def __init__(self, *, fails_to_load: bool = False, draft: ModelConfig | None = None, **engine: Any) -> None:
        self.events: list[str] = []
        self.shards: list[FakeShard] = []
        self.options: list[dict[str, Any]] = []
        self.arguments: list[dict[str, Any]] = []
        self.killed: list[FakeShard] = []
        self.failures: list[str] = []
        self._fails_to_load = fails_to_load
        defaults = {"model": "m", "device": "cpu", "tensor_parallel_size": 2, "speculative": {"method": "none"}}
        self.group = ShardGroup(
            AppSettings.parse({"engine": {**defaults, **engine}, "hang_timeout_s": 1}),
            folder=Path("/model"),
            app_name="app",
            engine_id="e1",
            node_id="node",
            placed=lambda bundle: {"bundle": bundle},
            draft=draft,
            on_draft=lambda status: self.events.append(f"draft {status.up}"),
            on_failed=self.failures.append,
            quiet=self._quiet,
            make_actor=self._make_actor,
            kill=lambda handle: self.killed.append(handle.target),
        )

    def close(self) -> None:
        """Check that the group has ended its processes, and close the sockets."""
        assert not any(psutil.pid_exists(shard.process.pid) for shard in self.shards), "no process is left"
        for shard in self.shards:
            shard.process.wait(0)
            if shard.socket is not None:
                shard.socket.close()

    async def _quiet(self) -> None:
        self.events.append("quiet")

    def _make_actor(self, cls: type, **options: Any) -> Any:
        assert cls is ShardActor
        self.options.append(options)
        world = self

        class Placed:
            @staticmethod
            def remote(*values: Any, **arguments: Any) -> LocalActor:
                world.arguments.append(arguments)
                fails = world._fails_to_load and arguments["rank"] == 1
                world.shards.append(FakeShard(world.events, rank=arguments["rank"], fails_to_load=fails))
                return LocalActor(world.shards[-1])

        return Placed


@asynccontextmanager
async def started(world: World) -> AsyncIterator[ShardGroup]:
    try:
        await world.group.start()
        yield world.group
    finally:
        await world.group.stop()
        world.close()


async def eventually(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


async def tokens_of(group: ShardGroup, request_id: str) -> list[int]:
    submit = Submit(request_id=request_id, prompt=(1,), sampling=SamplingParams())
    return [token async for delta in group.client.generate(submit) for token in delta.token_ids]


def test_followers_run_before_the_leader_starts_and_requests_reach_rank_0() -> None:
    async def scenario() -> None:
        world = World()
        with pytest.raises(ShardDown, match="not up"):
            _ = world.group.client
        async with started(world) as group:
            await eventually(lambda: "run 0" in world.events)
            assert world.events == [
                *("allocate 0 10 144", "allocate 1 10 144", "follow 1 handle of 1"),
                *("quiet", "run 1", "start_leader app e1", "run 0"),
            ]
            assert group.rank0.target is world.shards[0]
            assert await tokens_of(group, "r") == [7]
            assert group.failure is None
        assert world.events[-2:] == ["stop 0", "stop 1"]
        assert world.killed == world.shards
        assert world.failures == []

    asyncio.run(scenario())


def test_start_returns_what_holds_for_all_shards() -> None:
    async def scenario() -> ShardReady:
        world = World()
        try:
            return await world.group.start()
        finally:
            await world.group.stop()
            await world.group.stop()  # a second call does nothing
            world.close()

    assert asyncio.run(scenario()) == ShardReady(10, 100, 144, "cpu")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (None, "a target shard ended"),
        (ShardDown("trace\nshard 1 is gone"), "a target shard died: shard 1 is gone"),
        (ShardDown(), "a target shard died: ShardDown"),
    ],
    ids=["returns", "raises", "raises without words"],
)
def test_the_end_of_a_shard_is_the_end_of_the_group(rank: int, error: Exception | None, reason: str) -> None:
    async def scenario() -> None:
        world = World()
        async with started(world) as group:
            waiting = asyncio.create_task(tokens_of(group, "unanswered"))
            await eventually(lambda: group.client.num_requests)
            ended = world.shards[rank].ended
            ended.set_exception(error) if error is not None else ended.set_result(None)
            await eventually(lambda: group.failure)
            assert group.failure == reason
            with pytest.raises(EngineUnavailable, match="gone"):
                await waiting
            world.shards[1 - rank].ended.set_result(None)
            await asyncio.sleep(0.05)
        assert world.failures == [reason], "the reason is reported once"
        assert not any(event.startswith("stop") for event in world.events), "a failed group is killed at once"

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["stuck", "silent"])
def test_a_loop_that_stands_still_is_a_failure(how: str) -> None:
    async def scenario() -> None:
        world = World()
        async with started(world) as group:
            await eventually(lambda: world.shards[0].num_turns)
            assert group.failure is None
            world.shards[0].is_stuck = how == "stuck"
            world.shards[0].answers_heartbeats = how != "silent"
            await eventually(lambda: group.failure)
            assert world.failures == ["the target has not moved for 1 s"]

    asyncio.run(scenario())


def test_a_lost_connection_is_a_failure() -> None:
    async def scenario() -> None:
        world = World()
        async with started(world) as group:
            assert await tokens_of(group, "r") == [7]
            assert world.shards[0].socket is not None
            world.shards[0].socket.close()
            await eventually(lambda: group.failure)
            assert len(world.failures) == 1

    asyncio.run(scenario())


def test_a_shard_that_does_not_load_leaves_no_process() -> None:
    async def scenario() -> None:
        world = World(fails_to_load=True)
        with pytest.raises(MemoryError, match="rank 1"):
            async with started(world):
                pass
        assert len(world.shards) == 2
        assert "run 1" not in world.events

    asyncio.run(scenario())


def test_a_change_of_the_draft_is_passed_on() -> None:
    async def scenario() -> None:
        world = World()
        async with started(world) as group:
            assert await tokens_of(group, "r") == [7]
            assert world.shards[0].socket is not None
            world.shards[0].socket.send(DraftStatus(up=False, reason="it died"))
            await eventually(lambda: "draft False" in world.events)

    asyncio.run(scenario())


def test_on_gpus_shard_0_leaves_room_for_the_draft(tmp_path: Path) -> None:
    async def scenario() -> None:
        draft = ModelConfig.load(write_model(tmp_path, "llama"))
        speculative = {"method": "draft_model", "draft": str(tmp_path)}
        world = World(draft=draft, device="cuda", speculative=speculative)
        async with started(world):
            assert [options["num_gpus"] for options in world.options] == pytest.approx([0.9, 1.0])
            assert [options["bundle"] for options in world.options] == [1, 2]
            assert {arguments["node_id"] for arguments in world.arguments} == {"node"}
        alone = World(device="cuda")
        async with started(alone):
            assert [options["num_gpus"] for options in alone.options] == [1.0, 1.0]

    asyncio.run(scenario())
