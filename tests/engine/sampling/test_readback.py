"""The end of a step: one wait with a deadline, results as they were, and times of its parts."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from engine.errors import ShardDown
from engine.sampling.readback import DeviceClock, HostClock, StepTimes, await_event

TENSORS = [torch.tensor([[1, -(2**40)]]), torch.tensor([0.5, -2.0]), torch.tensor([7], dtype=torch.int32)]
VALUES = [[[1, -(2**40)]], [0.5, -2.0], [7]]


class FakeEvent:
    """An event that is reached after some queries. Its time is a number of milliseconds since the first one."""

    def __init__(self, log: list[str], name: str, *, num_queries: int = 1, at_ms: float = 0.0) -> None:
        self._log, self._name, self._left = log, name, num_queries
        self.at_ms = at_ms

    def record(self) -> None:
        self._log.append(f"record {self._name}")

    def query(self) -> bool:
        self._left -= 1
        if self._left <= 0:
            self._log.append(f"reached {self._name}")
        return self._left <= 0

    def elapsed_time(self, end: Any) -> float:
        return float(end.at_ms - self.at_ms)


def clock(log: list[str], *, forward_ms: float = 0.0, num_queries: int = 1, timeout_s: float = 60.0) -> DeviceClock:
    events = iter(
        [
            FakeEvent(log, "begin"),
            FakeEvent(log, "forwarded", at_ms=forward_ms),
            FakeEvent(log, "end", num_queries=num_queries),
        ]
    )
    return DeviceClock(timeout_s=timeout_s, abort=lambda: log.append("abort"), new_event=lambda: next(events))


def test_a_step_on_a_device_is_queued_and_then_waited_for_once() -> None:
    log: list[str] = []
    device = clock(log, num_queries=3)
    device.begin()
    device.forwarded()
    found = device.read(TENSORS)
    assert log == ["record begin", "record forwarded", "record end", "reached end"]
    assert [array.tolist() for array in found] == VALUES
    assert [array.dtype.name for array in found] == ["int64", "float32", "int32"]


def test_a_step_without_results_waits_as_well() -> None:
    log: list[str] = []
    assert clock(log).read([]) == []
    assert log == ["record end", "reached end"]


def test_results_of_any_size_follow_one_another() -> None:
    device = clock([])
    for size in (3, 7, 6, 100, 1, 200):
        (found,) = device.read([torch.arange(size)])
        assert found.tolist() == list(range(size))


def test_the_forward_is_timed_by_its_events_and_the_rest_by_the_host() -> None:
    device = clock([], forward_ms=0.25)
    device.begin()
    time.sleep(0.01)
    times = device.times()
    assert times.forward_s == 0.00025
    assert times.rest_s >= 0.01 - 0.00025
    longer = clock([], forward_ms=1e9)
    longer.begin()
    assert longer.times() == StepTimes(1e6, 0.0), "no part takes less than nothing"


def test_a_device_that_hangs_is_given_up_once() -> None:
    log: list[str] = []
    device = clock(log, num_queries=10**9, timeout_s=0.01)
    with pytest.raises(ShardDown, match=r"did not finish a step within 0\.01 s: a peer shard is gone or hung"):
        device.read(TENSORS)
    assert log == ["record end", "abort"]


def test_an_event_that_is_reached_is_in_time_whatever_the_deadline() -> None:
    await_event(FakeEvent([], "end"), timeout_s=-1.0, abort=lambda: pytest.fail("aborted"))


def test_the_clock_of_a_cpu() -> None:
    host = HostClock()
    host.begin()
    time.sleep(0.01)
    host.forwarded()
    time.sleep(0.02)
    times = host.times()
    assert [array.tolist() for array in host.read(TENSORS)] == VALUES
    assert times.forward_s >= 0.01
    assert times.rest_s >= 0.02
