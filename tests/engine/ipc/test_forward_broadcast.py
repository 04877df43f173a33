"""The broadcast of forward inputs: every shard gets each one unchanged, or an error names the shard that failed."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

import numpy as np
import pytest
from buffer_children import (
    CHILDREN,
    NODE,
    checks_forward_inputs,
    child,
    eventually,
    forward_inputs_equal,
    num_fds,
    random_forward_input,
    receives_nothing,
    resident_bytes,
    sends_two_steps,
    traces_left,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from engine.errors import ConfigError, ShardDown
from engine.ipc.forward_broadcast import ForwardReceiver, ForwardRingSpec, ForwardSender
from engine.ipc.forward_ring import ring_bytes

SPEC = ForwardRingSpec(max_rows=40, max_spans=6, max_blocks_per_span=5)


@pytest.fixture
def sender() -> Iterator[ForwardSender]:
    sender = ForwardSender(SPEC, num_receivers=1, node_id=NODE)
    yield sender
    sender.close()


def open_here(sender: ForwardSender) -> ForwardReceiver:
    receiver = ForwardReceiver.open(sender.handle(1), node_id=NODE)
    sender.wait_open(5)
    return receiver


def send_until_it_fails(sender: ForwardSender) -> None:
    for step_id in range(100_000):
        sender.send(step_id, random_forward_input(step_id, SPEC), deadline_s=0.1)


def test_two_processes_receive_three_thousand_forward_inputs_at_constant_memory() -> None:
    before = traces_left()
    sender = ForwardSender(SPEC, num_receivers=2, node_id=NODE)
    with ExitStack() as stack:
        pipes, sides = [], [os.getpid()]
        for shard in (1, 2):
            ours, theirs = CHILDREN.Pipe()
            process = stack.enter_context(child(checks_forward_inputs, sender.handle(shard), theirs, 0.0))
            pipes.append((ours, theirs))
            sides.append(process.pid)
        sender.wait_open(20)
        assert sender.alive
        for step_id in range(1000):
            sender.send(step_id, random_forward_input(step_id, SPEC), deadline_s=5)
        fds, resident = [num_fds(pid) for pid in sides], [resident_bytes(pid) for pid in sides]
        for step_id in range(1000, 3000):
            sender.send(step_id, random_forward_input(step_id, SPEC), deadline_s=5)
        assert [num_fds(pid) for pid in sides] == fds
        assert max(resident_bytes(pid) - was for pid, was in zip(sides, resident, strict=True)) < 1 << 20
        sender.close()
        for ours, theirs in pipes:
            assert ours.poll(30)
            assert ours.recv() == 3000
            ours.close()
            theirs.close()
    assert eventually(lambda: set(traces_left()) <= set(before), 10)


def test_a_slow_shard_holds_the_sender_back_and_misses_nothing(sender: ForwardSender) -> None:
    ours, theirs = CHILDREN.Pipe()
    with child(checks_forward_inputs, sender.handle(1), theirs, 0.01):
        sender.wait_open(20)
        start = time.monotonic()
        for step_id in range(24):
            sender.send(step_id, random_forward_input(step_id, SPEC), deadline_s=5)
        assert time.monotonic() - start > 0.01 * (24 - SPEC.num_slots - 2)
        sender.close()
        assert ours.poll(30)
        assert ours.recv() == 24
    ours.close()
    theirs.close()


@pytest.mark.parametrize(
    ("signal_number", "message"), [(signal.SIGKILL, "dead"), (signal.SIGSTOP, "not read a forward input")]
)
def test_the_sender_names_the_shard_that_failed(signal_number: int, message: str) -> None:
    sender = ForwardSender(SPEC, num_receivers=2, node_id=NODE)
    ours, theirs = CHILDREN.Pipe()
    with (
        child(checks_forward_inputs, sender.handle(1), theirs, 0.0),
        child(receives_nothing, sender.handle(2)) as failing,
    ):
        sender.wait_open(20)
        os.kill(failing.pid, signal_number)
        start = time.monotonic()
        with pytest.raises(ShardDown, match=f"shard 2 .*{message}"):
            send_until_it_fails(sender)
        assert time.monotonic() - start < 5
        sender.close()
    ours.close()
    theirs.close()


def test_missing_shards_are_named() -> None:
    sender = ForwardSender(SPEC, num_receivers=3, node_id=NODE)
    receiver = ForwardReceiver.open(sender.handle(2), node_id=NODE)
    with pytest.raises(ShardDown, match="shards 1, 3 have not opened"):
        sender.wait_open(0.1)
    with pytest.raises(ShardDown, match="not open"):
        sender.send(0, random_forward_input(0, SPEC), deadline_s=0.1)
    receiver.close()
    sender.close()


def test_a_shard_learns_within_100_ms_that_shard_0_was_killed() -> None:
    late = []
    for _ in range(3):
        ours, theirs = CHILDREN.Pipe()
        with ours, theirs, child(sends_two_steps, SPEC, theirs) as shard_0:
            receiver = ForwardReceiver.open(ours.recv(), node_id=NODE)
            steps = [receiver.receive(5), receiver.receive(5)]
            assert [message and message[0] for message in steps] == [7, 8]
            os.kill(shard_0.pid, signal.SIGKILL)
            start = time.monotonic()
            with pytest.raises(ShardDown, match="shard 0 is gone"):
                receiver.receive(30)
            late.append(time.monotonic() - start)
            receiver.close()
    assert min(late) < 0.1, late


def test_a_timeout_is_none_and_the_end_is_none_and_closed(sender: ForwardSender) -> None:
    receiver = open_here(sender)
    assert receiver.receive(0.01) is None
    assert not receiver.closed
    sender.send(5, random_forward_input(5, SPEC), deadline_s=1)
    sender.close()
    message = receiver.receive(1)
    assert message is not None
    assert forward_inputs_equal(message[1], random_forward_input(5, SPEC))
    assert receiver.receive(1) is None
    assert receiver.closed
    assert receiver.receive(1) is None
    receiver.close()


def test_a_received_forward_input_is_a_copy(sender: ForwardSender) -> None:
    receiver = open_here(sender)
    sender.send(0, random_forward_input(0, SPEC), deadline_s=1)
    first = receiver.receive(1)
    for step_id in range(1, 9):
        sender.send(step_id, random_forward_input(step_id, SPEC), deadline_s=1)
        receiver.receive(1)
    assert first is not None
    assert forward_inputs_equal(first[1], random_forward_input(0, SPEC))
    receiver.close()


@pytest.mark.parametrize("second", [3, 5, 6, 2])
def test_a_gap_in_the_steps_is_an_error(sender: ForwardSender, second: int) -> None:
    receiver = open_here(sender)
    sender.send(3, random_forward_input(3, SPEC), deadline_s=1)
    sender.send(second, random_forward_input(second, SPEC), deadline_s=1)
    receiver.receive(1)
    with pytest.raises(ShardDown, match=f"step {second} came after step 3"):
        receiver.receive(1)
    receiver.close()


def test_a_forward_input_above_the_capacity_raises(sender: ForwardSender) -> None:
    receiver = open_here(sender)
    forward_input = random_forward_input(1, ForwardRingSpec(max_rows=1, max_spans=1, max_blocks_per_span=1))
    ints = np.zeros(41, dtype=np.int32)
    for changes, message in (
        ({"token_ids": ints, "positions": ints, "slots": ints}, "rows: 41 given, allowed are 40"),
        ({"logit_rows": ints}, "logit rows: 41"),
        ({"block_tables": np.zeros((7, 1), np.int32)}, "spans: 7 given, allowed are 6"),
        ({"block_tables": np.zeros((1, 6), np.int32)}, "blocks per span: 6 given, allowed are 5"),
        ({"positions": ints[:33]}, "do not fit each other"),
        ({"logit_rows": np.zeros(2, dtype=np.int64)}, "int32"),
    ):
        with pytest.raises(ValueError, match=message):
            sender.send(0, structs.replace(forward_input, **changes), deadline_s=1)
    sender.send(0, forward_input, deadline_s=1)
    assert receiver.receive(1) is not None
    receiver.close()


def test_a_receiver_on_another_node_or_with_another_spec_is_refused(sender: ForwardSender) -> None:
    with pytest.raises(ConfigError, match="made on node node-a, opened on node-b"):
        ForwardReceiver.open(sender.handle(1), node_id="node-b")
    same_size = {"max_rows": 39, "max_spans": 7}
    for sizes, message in (({"max_rows": 80}, "its spec needs"), (same_size, "made with other capacities")):
        larger = dataclasses.replace(sender.handle(1), spec=dataclasses.replace(SPEC, **sizes))
        with pytest.raises(ConfigError, match=message):
            ForwardReceiver.open(larger, node_id=NODE)
    with pytest.raises(ValueError, match="shard: 2 given"):
        sender.handle(2)
    with pytest.raises(ConfigError, match="num_slots: 0 given"):
        dataclasses.replace(SPEC, num_slots=0)
    handle = sender.handle(1)
    sender.close()
    with pytest.raises(ShardDown, match="shard 0"):
        ForwardReceiver.open(handle, node_id=NODE)


@settings(max_examples=100)
@given(
    offset=st.one_of(st.integers(0, 191), st.integers(0, ring_bytes(SPEC, 1) - 1)),
    data=st.binary(min_size=1, max_size=16),
)
def test_a_corrupt_ring_never_harms_a_shard(offset: int, data: bytes) -> None:
    with ExitStack() as stack:
        sender = stack.enter_context(closing(ForwardSender(SPEC, num_receivers=1, node_id=NODE)))
        receiver = stack.enter_context(closing(open_here(sender)))
        sender.send(0, random_forward_input(0, SPEC), deadline_s=1)
        end = min(offset + len(data), ring_bytes(SPEC, 1))
        receiver._memory.buffer[offset:end] = data[: end - offset]
        try:
            message = receiver.receive(0)
        except ShardDown:
            message = None
        if message is not None:
            forward_input = message[1]
            assert len(forward_input.token_ids) <= SPEC.max_rows
            assert len(forward_input.block_tables) <= SPEC.max_spans
