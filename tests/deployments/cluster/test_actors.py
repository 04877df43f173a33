"""The link from an engine to the controller: the plan follows the controller, and stays in force after its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from ray.exceptions import RayError

from autoscale.control.controller import Controller
from autoscale.control.report import Observation
from deployments.cluster.actors import ControllerLink, device_env
from engine.core.pacing import PlanSlot, SpeculationPlan


class FakeController:
    """A real controller with the calling convention of an actor; `report.remote` returns a call to wait for."""

    def __init__(self, plan: SpeculationPlan) -> None:
        self.controller = Controller(plan)
        self.is_dead = False
        self.observations: list[Observation] = []

    @property
    def report(self) -> FakeController:
        return self

    def remote(self, engine_id: str, observation: Observation, plan: SpeculationPlan) -> Callable[[], SpeculationPlan]:
        def call() -> SpeculationPlan:
            if self.is_dead:
                raise RayError("the actor died")
            self.observations.append(observation)
            return self.controller.report(engine_id, observation, plan)

        return call


class FakeReporter:
    """Has one more step in each observation than in the one before."""

    def __init__(self) -> None:
        self.slot = PlanSlot(SpeculationPlan(version=1, max_k=2))
        self.num_folds = 0
        self.num_taken = 0

    def fold(self) -> None:
        self.num_folds += 1

    def take_observation(self) -> Observation:
        self.num_taken += 1
        return Observation(num_steps=self.num_taken)


class World:
    """A link, and the controller that it finds, if any."""

    def __init__(self, controller: FakeController | None) -> None:
        self.controller = controller
        self.num_found = 0
        self.reporter = FakeReporter()
        self.link = ControllerLink("e1", self.reporter, find=self._find, wait=lambda call: call())

    def _find(self) -> Any:
        if self.controller is None:
            raise ValueError("no actor of that name")
        self.num_found += 1
        return self.controller

    @property
    def plan(self) -> SpeculationPlan:
        return self.reporter.slot.current


def test_each_report_brings_the_plan_in_force() -> None:
    controller = FakeController(SpeculationPlan(version=3, max_k=4))
    world = World(controller)
    world.link.exchange()
    assert (world.plan.version, world.plan.max_k) == (3, 4)
    controller.controller.override(max_k=1)
    world.link.exchange()
    assert (world.plan.version, world.plan.max_k) == (4, 1)
    assert [observation.num_steps for observation in controller.observations] == [1, 2]
    assert list(controller.controller.reports()) == ["e1"]
    assert world.num_found == 1, "a living controller is looked up once"


def test_without_a_controller_the_plan_stays_and_the_observation_waits() -> None:
    world = World(None)
    before = world.plan
    world.link.exchange()
    assert world.plan is before
    assert world.reporter.num_taken == 0


def test_a_dead_controller_leaves_its_plan_which_the_next_one_takes_over() -> None:
    first = FakeController(SpeculationPlan(version=7, max_k=5))
    world = World(first)
    world.link.exchange()
    first.is_dead = True
    world.link.exchange()
    assert (world.plan.version, world.plan.max_k) == (7, 5)
    world.controller = second = FakeController(SpeculationPlan(version=1, max_k=2))
    world.link.exchange()
    assert world.num_found == 2
    assert (world.plan.version, world.plan.max_k) == (7, 5), "the newer plan wins"
    assert second.controller.plan().version == 7


def test_run_reports_until_it_is_stopped() -> None:
    controller = FakeController(SpeculationPlan(version=2))
    world = World(controller)
    thread = threading.Thread(target=world.link.run, args=(0.005,))
    thread.start()
    deadline = time.monotonic() + 20
    while len(controller.observations) < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    world.link.stop()
    thread.join(10)
    assert not thread.is_alive()
    assert world.reporter.num_folds == len(controller.observations) >= 3


def test_run_counts_steps_also_while_there_is_no_controller() -> None:
    world = World(None)
    thread = threading.Thread(target=world.link.run, args=(0.005,))
    thread.start()
    deadline = time.monotonic() + 20
    while world.reporter.num_folds < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    world.link.stop()
    thread.join(10)
    assert world.reporter.num_folds >= 3, "records must not pile up"


@pytest.mark.parametrize("num_threads", [1, 6])
def test_a_process_that_computes_gets_its_threads(num_threads: int) -> None:
    assert device_env(num_threads)["OMP_NUM_THREADS"] == str(num_threads)
