"""The leader over a tiny model: it serves once constructed, reports how it ended, and connects only real drafts."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest
from fakes import FixedPacer
from tiny_models import write_model

from engine.config import EngineConfig
from engine.core.pacing import SpeculationPlan
from engine.core.stats import StepStats
from engine.core.step import ForwardInput, ForwardResult
from engine.draft.messages import DraftInfo
from engine.errors import ConfigError, EngineError, ShardDown
from engine.ipc.wire import (
    HEADER,
    AbortCommand,
    EngineFailed,
    Event,
    StepDeltas,
    SubmitCommand,
    decode_event,
    encode_frame,
    frame_len,
)
from engine.messages import AdapterRef, SamplingParams, Submit
from engine.workers.bring_up import bring_up_locally
from engine.workers.leader import Leader
from engine.workers.target_shard import TargetShard

GREEDY = Submit(request_id="r", prompt=(5, 6, 7), sampling=SamplingParams(temperature=0.0, max_tokens=4))
LONG = Submit(request_id="r", prompt=(5,), sampling=SamplingParams(temperature=0.0, max_tokens=500))


class DyingShard(TargetShard):
    """Fails in its third forward."""

    num_done = 0

    def forward(self, forward_input: ForwardInput) -> ForwardResult:
        self.num_done += 1
        if self.num_done == 3:
            raise ShardDown("rank 1 is gone")
        return super().forward(forward_input)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("leader"), "llama")


def shard_of(folder: Path, cls: type[TargetShard] = TargetShard, **speculative: object) -> TargetShard:
    """An allocated shard."""
    settings = {"model": str(folder), "device": "cpu", "dtype": "float32", "kv_cache_tokens": 1024, "num_threads": 1}
    config = EngineConfig.parse({**settings, "speculative": {"method": "none", **speculative}})
    shard = cls(config, folder, rank=0, node_id="here")
    bring_up_locally([shard])
    return shard


@contextmanager
def running(leader: Leader, shard: TargetShard) -> Iterator[tuple[socket.socket, BinaryIO, list[BaseException]]]:
    """The leader in a thread, a connection to it, and what its `run` raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            leader.run()
        except ShardDown as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30)
        connection.connect(leader.path)
        with connection.makefile("rb") as stream:
            yield connection, stream, raised
            shard.stop()
            thread.join(30)
            assert not thread.is_alive()


def next_event(stream: BinaryIO) -> Event:
    return decode_event(stream.read(frame_len(stream.read(HEADER.size))))


def test_a_request_is_served_and_every_step_observed(folder: Path) -> None:
    shard = shard_of(folder)
    stats: list[StepStats] = []
    leader = Leader(shard, pacer=FixedPacer(0), plan=SpeculationPlan, observers=[lambda step, _: stats.append(step)])
    with running(leader, shard) as (connection, stream, _):
        connection.sendall(encode_frame(SubmitCommand(GREEDY)))
        deltas = []
        while not deltas or deltas[-1].finish_reason is None:
            event = next_event(stream)
            assert isinstance(event, StepDeltas)
            deltas += event.deltas
        assert [delta.request_id for delta in deltas] == ["r"] * 4
        assert [delta.finish_reason for delta in deltas] == [None, None, None, "length"]
        shard.stop()
        assert next_event(stream) == EngineFailed("the engine was stopped")
        assert stream.read() == b"", "the leader closes the socket when it ends"
    assert sum(step.num_emitted for step in stats) == 4
    leader.pool.check()
    assert leader.pool.usage().num_used == 0


def test_a_replica_that_leaves_takes_its_requests_with_it(folder: Path) -> None:
    shard = shard_of(folder)
    stats: list[StepStats] = []
    leader = Leader(shard, pacer=FixedPacer(0), plan=SpeculationPlan, observers=[lambda step, _: stats.append(step)])
    with running(leader, shard) as (connection, stream, _):
        connection.sendall(encode_frame(SubmitCommand(LONG)))
        assert isinstance(next_event(stream), StepDeltas)
        connection.shutdown(socket.SHUT_RDWR)
        idle = threading.Event()
        deadline = time.monotonic() + 30
        while not idle.is_set():
            assert time.monotonic() < deadline, "the leader still has work"
            leader.engine.call(lambda: idle.set() if not leader.engine.has_work else None)
            idle.wait(0.01)
    assert sum(step.num_emitted for step in stats) < LONG.sampling.max_tokens
    assert leader.pool.usage().num_used == 0


def test_an_abort_ends_one_request(folder: Path) -> None:
    shard = shard_of(folder)
    leader = Leader(shard, pacer=FixedPacer(0), plan=SpeculationPlan)
    with running(leader, shard) as (connection, stream, _):
        connection.sendall(encode_frame(SubmitCommand(LONG)) + encode_frame(AbortCommand("r")))
        reasons: list[str | None] = [None]
        while reasons[-1] is None:
            event = next_event(stream)
            assert isinstance(event, StepDeltas)
            reasons += [delta.finish_reason for delta in event.deltas]
        assert reasons[-1] == "abort"


def test_a_lost_shard_ends_every_request_and_names_the_cause(folder: Path) -> None:
    shard = shard_of(folder, DyingShard)
    leader = Leader(shard, pacer=FixedPacer(0), plan=SpeculationPlan)
    with running(leader, shard) as (connection, stream, raised):
        connection.sendall(encode_frame(SubmitCommand(GREEDY)))
        events = [next_event(stream) for _ in range(4)]
        assert events[-1] == EngineFailed("ShardDown: rank 1 is gone")
        last = events[-2]
        assert isinstance(last, StepDeltas)
        assert [(delta.finish_reason, delta.error) for delta in last.deltas] == [("abort", "the engine stopped")]
    assert [str(error) for error in raised] == ["rank 1 is gone"]


@pytest.mark.parametrize("method", ["none", "ngram"])
def test_a_method_without_a_draft_process_accepts_no_draft(folder: Path, method: str) -> None:
    shard = shard_of(folder, method=method)
    leader = Leader(shard, pacer=FixedPacer(0), plan=SpeculationPlan)
    with pytest.raises(
        ConfigError, match=rf"speculative\.method: '{method}' has no draft process; allowed: draft_model"
    ):
        leader.open_draft_buffer(DraftInfo(10, None, 0), 1)
    with pytest.raises(ConfigError, match="has no draft process"):
        leader.attach_draft(0.1)
    shard.stop()
    leader.run()  # closes the socket


def test_a_retired_adapter_is_unused_once_no_request_has_it(folder: Path) -> None:
    shard = shard_of(folder)
    leader = Leader(shard, pacer=FixedPacer(0), plan=SpeculationPlan)
    leader.serve_adapter(AdapterRef(number=3, name="a"))
    asked = replace(LONG, adapter=AdapterRef(number=3, name="a"))
    leader.engine.submit(asked)
    leader.retire_adapter(3)
    leader.engine.drain()
    assert leader.engine.has_work
    assert not leader.is_unused(3)
    leader.engine.abort("r")
    leader.engine.drain()
    assert leader.is_unused(3)
    assert not leader.is_unused(4)
    shard.stop()
    leader.run()  # closes the socket


def test_a_draft_must_read_the_features_that_the_target_gives(folder: Path) -> None:
    shard = shard_of(folder, method="draft_model", draft=str(folder))
    leader = Leader(shard, pacer=FixedPacer(0), plan=SpeculationPlan)
    with pytest.raises(ConfigError, match="reads 96 numbers per position, the target gives 0"):
        leader.open_draft_buffer(DraftInfo(10, None, 96), 1)
    with pytest.raises(EngineError, match="no draft buffer has been made"):
        leader.attach_draft(0.1)
    shard.stop()
    leader.run()  # closes the socket
