"""What the host does while a device computes: the order of a step's parts, over a fake stream.

Promise: a step is published, and observed, after the next forward has been launched and before the host waits for it;
nothing waits for a step that does not come; each request still gets its deltas in order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt
import pytest
import torch
from fakes import FixedPacer, ToyModel, toy_drafter

from engine.core.block_pool import BlockPool
from engine.core.committer import Committer
from engine.core.drafter import Drafter, NoDrafter
from engine.core.engine import Engine
from engine.core.pacing import SpeculationPlan
from engine.core.scheduler import Scheduler
from engine.core.step import ForwardInput, ForwardResult
from engine.core.verifier import Verifier
from engine.errors import ShardDown
from engine.messages import Delta, SamplingParams, Submit
from engine.sampling.logits_processor import LogitsProcessor
from engine.sampling.penalties import TokenOptions
from engine.sampling.readback import DeviceClock, Meanwhile, StepTimes


class FakeStream:
    """A clock whose forwards run on until the host waits for them."""

    def __init__(self, log: list[str], meanwhile: Callable[[], None]) -> None:
        self._log = log
        self._meanwhile = meanwhile

    def begin(self) -> None:
        pass

    def forwarded(self) -> None:
        self._log.append("launch")

    def read(self, tensors: Sequence[torch.Tensor]) -> list[npt.NDArray[Any]]:
        self._meanwhile()
        self._log.append("wait")
        return [tensor.numpy() for tensor in tensors]

    def times(self) -> StepTimes:
        return StepTimes(0.0, 0.0)


class Overlapped:
    """An engine over a toy target on a fake stream, and what happened in it."""

    def __init__(self, *, fails_at: int = 0, overlap: bool = True, drafter: Drafter | None = None) -> None:
        self.log: list[str] = []
        self.deltas: list[Delta] = []
        toy, meanwhile = ToyModel(vocab_size=7), Meanwhile()
        self.pool = BlockPool(64, toy.block_size, prefix_cache=True)
        self._num_forwards, self._fails_at, self._toy = 0, fails_at, toy
        pacer = FixedPacer(0 if drafter is None else 3)
        scheduler = Scheduler(
            self.pool, pacer=pacer, plan=SpeculationPlan, max_num_requests=8, max_step_tokens=32, max_model_len=64
        )
        self.engine = Engine(
            scheduler=scheduler,
            drafter=drafter or NoDrafter(),
            verifier=Verifier(self._forward, block_size=toy.block_size, clock=FakeStream(self.log, meanwhile.run)),
            committer=Committer(self.pool, scheduler, max_model_len=64),
            publish=self._publish,
            pacer=pacer,
            observers=[lambda stats, prediction: self.log.append("observe")],
            meanwhile=meanwhile if overlap else None,
        )

    def _forward(self, forward_input: ForwardInput) -> ForwardResult:
        self._num_forwards += 1
        if self._num_forwards == self._fails_at:
            raise ShardDown("gone")
        return self._toy.forward(forward_input)

    def _publish(self, deltas: tuple[Delta, ...]) -> None:
        self.log.append("publish")
        self.deltas += deltas

    def submit(self, name: str, max_tokens: int) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        self.engine.submit(Submit(request_id=name, prompt=(1, 2, 3), sampling=sampling))
        self.engine.drain()

    def run(self) -> None:
        while self.engine.has_work:
            self.engine.step()
            self.pool.check()

    def of(self, name: str) -> list[tuple[tuple[int, ...], str | None]]:
        return [(delta.token_ids, delta.finish_reason) for delta in self.deltas if delta.request_id == name]


def test_a_step_is_published_after_the_next_forward_is_launched_and_before_the_wait_for_it() -> None:
    engine = Overlapped()
    engine.submit("a", 4)
    engine.run()
    later = ["launch", "publish", "observe", "wait"]
    assert engine.log == ["launch", "wait", *later * 3, "publish", "observe"]  # The last step has no next one.


def test_without_a_device_each_step_is_published_at_once() -> None:
    engine = Overlapped(overlap=False)
    engine.submit("a", 3)
    engine.run()
    assert engine.log == ["launch", "wait", "publish", "observe"] * 3


@pytest.mark.parametrize("drafts", [False, True])
def test_deltas_are_those_of_an_engine_without_overlap(drafts: bool) -> None:
    engines = []
    for overlap in (True, False):
        drafter = toy_drafter(ToyModel(vocab_size=7, seed=9, blend=0.3), on_device=True) if drafts else None
        engine = Overlapped(overlap=overlap, drafter=drafter)
        for index in range(5):
            engine.submit(str(index), 3 + 2 * index)
        for _ in range(3):
            engine.engine.step()
        engine.submit("late", 4)
        engine.engine.abort("3")
        engine.engine.drain()
        engine.run()
        engines.append(engine)
    for name in (*map(str, range(5)), "late"):
        assert engines[0].of(name) == engines[1].of(name)
    assert engines[0].of("3")[-1] == ((), "abort")
    assert len(engines[0].of("3")) > 1


def test_tokens_of_the_step_before_a_failure_are_published_before_the_end() -> None:
    engine = Overlapped(fails_at=3)
    engine.submit("a", 9)
    with pytest.raises(ShardDown):
        engine.engine.run(threading.Event())
    found = engine.of("a")
    assert [reason for _, reason in found] == [None, None, "abort"]
    assert [len(tokens) for tokens, _ in found] == [1, 1, 0]


def test_an_idle_engine_keeps_nothing_back() -> None:
    engine = Overlapped()
    engine.submit("a", 5)
    engine.engine.step()
    assert engine.deltas == []
    engine.engine.abort("a")
    engine.engine.drain()
    assert [reason for _, reason in engine.of("a")] == [None, "abort"]


class Watched(LogitsProcessor):
    """Penalties that tell when they are made."""

    def __init__(self, options: TokenOptions, log: list[str]) -> None:
        super().__init__(options)
        self._log = log

    def follow(self, tokens: Sequence[int]) -> None:
        self._log.append("options")
        super().follow(tokens)


def test_penalties_are_prepared_while_the_forward_runs() -> None:
    engine = Overlapped()
    engine.submit("a", 2)
    options = TokenOptions.of(SamplingParams(presence_penalty=0.5), 3)
    assert options is not None
    engine.engine._by_id["a"].logits_processor = Watched(options, engine.log)
    engine.run()
    assert engine.log == [
        "launch",
        "options",
        "wait",
        "launch",
        "options",
        "publish",
        "observe",
        "wait",
        *engine.log[8:],
    ]


class Logged:
    """A CUDA event that tells what is asked of it."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def record(self) -> None:
        self._log.append("record")

    def query(self) -> bool:
        self._log.append("query")
        return True

    def elapsed_time(self, end: Any) -> float:
        return 1.0


def test_the_clock_of_a_gpu_works_between_the_last_launch_and_the_first_look_at_the_device() -> None:
    log: list[str] = []
    clock = DeviceClock(
        timeout_s=1.0,
        abort=lambda: None,
        new_event=lambda: Logged(log),
        meanwhile=lambda: log.append("meanwhile"),
    )
    for tensors in ([], [torch.ones(2, dtype=torch.int32)]):
        log.clear()
        clock.begin()
        clock.forwarded()
        clock.read(tensors)
        assert log == ["record", "record", "record", "meanwhile", "query"]
