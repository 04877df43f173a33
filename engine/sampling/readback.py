"""The end of a step: its results on the host, and how long its parts took.

Owns the one wait of a step on a GPU, its deadline, and the CUDA events whose times are read after it. A step without
results waits as well, so that a hung peer is noticed in any step. Knows nothing of what the results mean.

    stream    | begin | forward | forwarded | logits processing, acceptance, copy to pinned memory | end
    host        queues all of it, publishes the step before, then waits for `end` once
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy.typing as npt
import torch
from msgspec import Struct

from engine.errors import ShardDown
from engine.sampling.staging import pack_words, to_host, unpack_words


class StepTimes(Struct, frozen=True, gc=False):
    """Seconds of the parts of a verified step."""

    forward_s: float
    """The target's forward."""
    rest_s: float
    """Logits processing, acceptance and the copy to the host."""


class Meanwhile:
    """Work of the host that nothing in a step needs, done while the device computes the next one."""

    def __init__(self) -> None:
        self._work: list[Callable[[], None]] = []

    def add(self, work: Callable[[], None]) -> None:
        """Do this at the next `run`, after what was added before."""
        self._work.append(work)

    def run(self) -> None:
        """Do everything that was added. Called when the device has work, or when no more will come."""
        work, self._work = self._work, []
        for each in work:
            each()


class StepClock(Protocol):
    """Brackets the forward of a step and brings its results to the host. The calls come in the order below."""

    def begin(self) -> None:
        """Nothing of the step has been queued yet."""
        ...

    def forwarded(self) -> None:
        """The forward has been queued, or computed on a CPU."""
        ...

    def read(self, tensors: Sequence[torch.Tensor]) -> list[npt.NDArray[Any]]:
        """Copy int32, int64 and float32 tensors to the host, and wait for the step. The arrays hold until the next
        step.

        Raises:
            ShardDown: the device did not finish in time.
        """
        ...

    def times(self) -> StepTimes:
        """Times of the step, after `read`."""
        ...


class HostClock:
    """The clock of a CPU, where every call returns with its result."""

    def __init__(self) -> None:
        self._begin = self._forwarded = 0.0

    def begin(self) -> None:
        self._begin = time.perf_counter()

    def forwarded(self) -> None:
        self._forwarded = time.perf_counter()

    def read(self, tensors: Sequence[torch.Tensor]) -> list[npt.NDArray[Any]]:
        return to_host(tensors)

    def times(self) -> StepTimes:
        return StepTimes(self._forwarded - self._begin, time.perf_counter() - self._forwarded)


class Event(Protocol):
    """A point in the work of a stream, as `torch.cuda.Event`."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end: Any) -> float: ...


def timed_event() -> Event:
    """A CUDA event that records its time."""
    event: Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event


def await_event(event: Event, *, timeout_s: float, abort: Callable[[], None]) -> None:
    """Wait until the device has reached an event.

    Args:
        event: recorded.
        timeout_s: seconds until the device counts as hung.
        abort: called then, so that what the device waits for ends.

    Raises:
        ShardDown: the device did not reach the event in time.
    """
    deadline = time.monotonic() + timeout_s
    while not event.query():
        if time.monotonic() > deadline:
            abort()
            raise ShardDown(f"the device did not finish a step within {timeout_s:g} s: a peer shard is gone or hung")
        time.sleep(0)


class DeviceClock:
    """The clock of a GPU: three events, one copy to pinned memory, one wait.

    Args:
        timeout_s: seconds until a step counts as hung.
        abort: called then; ends the collective operations in flight.
        new_event: makes an event with a time.
        meanwhile: called in each step when everything is queued, before the wait.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        abort: Callable[[], None],
        new_event: Callable[[], Event] = timed_event,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        self._timeout_s = timeout_s
        self._abort = abort
        self._meanwhile = meanwhile
        self._begin, self._forwarded, self._end = (new_event() for _ in range(3))
        self._began_s = 0.0
        self._host: torch.Tensor | None = None  # pinned; grows to the largest result

    def begin(self) -> None:
        self._began_s = time.perf_counter()
        self._begin.record()

    def forwarded(self) -> None:
        self._forwarded.record()

    def read(self, tensors: Sequence[torch.Tensor]) -> list[npt.NDArray[Any]]:
        arrays: list[npt.NDArray[Any]] = []
        if not tensors:
            self._wait()
            return arrays
        words = pack_words(tensors)
        host = self._pinned(words.numel())
        host.copy_(words, non_blocking=True)
        self._wait()
        return unpack_words(host.numpy(), tensors)

    def times(self) -> StepTimes:
        forward_s = self._begin.elapsed_time(self._forwarded) / 1e3
        return StepTimes(forward_s, max(0.0, time.perf_counter() - self._began_s - forward_s))

    def _wait(self) -> None:
        self._end.record()
        self._meanwhile()
        await_event(self._end, timeout_s=self._timeout_s, abort=self._abort)

    def _pinned(self, num_words: int) -> torch.Tensor:
        if self._host is None or self._host.numel() < num_words:
            self._host = torch.empty(2 * num_words, dtype=torch.int32, pin_memory=torch.cuda.is_available())
        return self._host[:num_words]
