"""The order of things in an adaptation: candidates are loaded while the target is idle, swapped in between two draft
requests, watched, and taken back.

The weights are the names of their folders, and the trainer records what it is told.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from distill_fakes import write_target
from tiny_eagle import write_eagle

from engine.adaptation.adaptation import Adaptation
from engine.adaptation.live_acceptance import MIN_REQUESTS
from engine.adaptation.messages import Candidate, FromTrainer, Progress, Serving, ToTrainer
from engine.adaptation.versions import Versions
from engine.config import AdaptationConfig
from engine.draft.messages import DraftRequest, DraftRequestRow, DraftResponseRow
from engine.metrics.counters import MetricCounters, MetricSnapshot
from engine.sampling.row_sampling import RowSampling


class RecordingTrainer:
    """A trainer that only notes what it gets."""

    def __init__(self) -> None:
        self.sent: list[ToTrainer] = []
        self.is_paused = True
        self.is_alive = True
        self.is_closed = False
        self.used_s = 0.0

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False

    def send(self, message: ToTrainer) -> None:
        self.sent.append(message)

    def close(self) -> None:
        self.is_closed = True


class Setup:
    """An adaptation with three adapted versions, newest last. `idle_s` is what the target is said to be."""

    def __init__(self, root: Path, shipped: Path) -> None:
        self.shipped = shipped
        self.versions = Versions(root)
        self.made = [self.versions.add(self._write, {}) for _ in range(3)]
        self.idle_s = 9.0
        self.trainer = RecordingTrainer()
        self.offer: Callable[[FromTrainer], None] = print
        self.loaded: list[Path] = []
        self.adaptation = Adaptation(
            AdaptationConfig(enabled=True),
            versions=self.versions,
            shipped=shipped,
            serving=shipped,
            load=self._load,
            idle_s=lambda: self.idle_s,
            start_trainer=self._start,
        )
        self._keys = iter(range(1, 10**9))
        self._next: str | None = None

    def candidate(self, number: int) -> Candidate:
        return Candidate(folder=str(self.made[number]), served=1.0, trained=2.0, num_documents=9)

    def until_swapped(self) -> str:
        """The next weights that the drafting thread gets."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            weights, self._next = self._next or self.adaptation.before(None), None
            if weights is not None:
                return weights
            time.sleep(0.01)
        raise AssertionError("no weights came")

    def serve(self, rng: random.Random, rate: float, *, requests: int = MIN_REQUESTS + 8) -> None:
        """Requests whose first drafted tokens are each accepted at this rate. No weights may come before the last of
        them has ended."""
        for _ in range(requests):
            key = next(self._keys)
            for length in range(12):
                token = 7 if rng.random() < rate else 8
                row = DraftRequestRow(key, length, (token,), 1, RowSampling(0.0, 1.0, 0, 1, False))
                request = DraftRequest(1, 1, (row,), ())
                assert self.adaptation.before(request) is None
                self.adaptation.after(request, (DraftResponseRow((7,)),), None)
            assert self._next is None
            self._next = self.adaptation.before(DraftRequest(1, 1, (), (key,)))

    @property
    def counted(self) -> MetricSnapshot:
        counters = MetricCounters()
        self.adaptation.count(counters)
        return counters.read()

    def number(self, name: str, *labels: str) -> float:
        return self.counted.number(f"paceline_draft_adaptation_{name}", *labels)

    def _write(self, folder: Path) -> None:
        for name in ("config.json", "model.safetensors"):
            (folder / name).write_bytes((self.shipped / name).read_bytes())

    def _load(self, folder: Path) -> str:
        self.loaded.append(folder)
        return folder.name

    def _start(self, on_message: Callable[[FromTrainer], None]) -> RecordingTrainer:
        self.offer = on_message
        return self.trainer


@pytest.fixture
def setup(tmp_path: Path):  # type: ignore[no-untyped-def]
    target = write_target(tmp_path / "target")
    made = Setup(tmp_path / "versions", write_eagle(target, tmp_path / "eagle"))
    made.adaptation.start()
    yield made
    made.adaptation.close()
    assert made.trainer.is_closed


def wait(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_candidate_is_swapped_in_and_the_trainer_is_told(setup: Setup) -> None:
    wait(lambda: not setup.trainer.is_paused)
    setup.offer(setup.candidate(1))
    assert setup.until_swapped() == setup.made[1].name
    assert setup.trainer.sent == [Serving(folder=str(setup.made[1]), is_rollback=False)]
    assert setup.number("swaps_total") == 1


def test_nothing_is_loaded_while_the_target_computes(setup: Setup) -> None:
    wait(lambda: not setup.trainer.is_paused)
    setup.idle_s = 0.0
    wait(lambda: setup.trainer.is_paused)
    setup.offer(setup.candidate(0))
    time.sleep(0.5)
    assert setup.loaded == []
    setup.idle_s = 9.0
    assert setup.until_swapped() == setup.made[0].name


def test_a_draft_request_pauses_the_trainer(setup: Setup) -> None:
    wait(lambda: not setup.trainer.is_paused)
    setup.idle_s = 0.0
    setup.adaptation.before(DraftRequest(1, 1, (), ()))
    assert setup.trainer.is_paused


def test_weights_that_are_worse_on_live_requests_are_taken_back(setup: Setup) -> None:
    """The version is removed as well, so that no later start takes it."""
    rng = random.Random(0)
    wait(lambda: not setup.trainer.is_paused)
    setup.serve(rng, 0.8)
    setup.offer(setup.candidate(1))
    assert setup.until_swapped() == setup.made[1].name
    setup.serve(rng, 0.8)
    setup.offer(setup.candidate(2))
    assert setup.until_swapped() == setup.made[2].name
    setup.serve(rng, 0.2, requests=MIN_REQUESTS)
    assert setup.until_swapped() == setup.made[1].name
    assert setup.trainer.sent[-1] == Serving(folder=str(setup.made[1]), is_rollback=True)
    assert setup.number("rollbacks_total") == 1
    assert setup.versions.newest() == setup.made[1]
    assert setup.number("live_acceptance_ratio") > 0.6


def test_the_shipped_draft_serves_again_where_the_version_before_is_gone(setup: Setup) -> None:
    rng = random.Random(0)
    wait(lambda: not setup.trainer.is_paused)
    setup.offer(setup.candidate(0))
    setup.until_swapped()
    setup.serve(rng, 0.9)
    setup.offer(setup.candidate(1))
    setup.until_swapped()
    setup.versions.remove(setup.made[0])
    setup.serve(rng, 0.1, requests=MIN_REQUESTS)
    assert setup.until_swapped() == setup.shipped.name


def test_a_damaged_candidate_is_refused_and_the_next_one_serves(setup: Setup) -> None:
    (setup.made[0] / "model.safetensors").write_bytes(b"damaged")
    wait(lambda: not setup.trainer.is_paused)
    setup.offer(setup.candidate(0))
    setup.offer(setup.candidate(0))
    time.sleep(0.3)
    assert setup.loaded == []
    setup.offer(setup.candidate(2))
    assert setup.until_swapped() == setup.made[2].name
    assert setup.number("swaps_total") == 1


def test_what_the_trainer_reports_is_exported(setup: Setup) -> None:
    wait(lambda: not setup.trainer.is_paused)
    setup.trainer.used_s = 1.5
    setup.offer(Progress(num_steps=3, num_tokens=40, num_documents=5, buffer_bytes=60, served=1.5, trained=2.5))
    values = {name: setup.number(f"{name}_total") for name in ("steps", "tokens", "documents", "cpu_seconds")}
    assert values == {"steps": 3, "tokens": 40, "documents": 5, "cpu_seconds": 1.5}
    assert setup.number("buffer_bytes") == 60
    assert setup.number("held_out_tokens_per_step", "serving") == 1.5
    assert setup.number("held_out_tokens_per_step", "training") == 2.5


def test_a_trainer_that_ended_leaves_the_weights_that_serve(setup: Setup) -> None:
    wait(lambda: not setup.trainer.is_paused)
    setup.trainer.is_alive = False
    wait(lambda: setup.trainer.is_closed)
    assert setup.adaptation.before(None) is None
