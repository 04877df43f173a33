"""The autoscaling policy reports each decision to the app's controller, and repeats it for a new controller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray

from autoscale.replicas.decision import BATCHES, ReplicaDecision, ReplicaLoad
from deployments.fleet.serve_autoscaling import REPORT_PERIOD_S, TpotPolicy, readings_of, report_to_controller

BUSY = ReplicaLoad(
    num_running=40,
    num_waiting=0,
    tokens_per_s=1000.0,
    tpot_s=tuple(0.01 + 0.001 * b for b in BATCHES),
    max_running=64,
)
IDLE = ReplicaLoad(num_running=0, num_waiting=0, tokens_per_s=0.0, tpot_s=BUSY.tpot_s, max_running=64)


@dataclass
class Context:
    """The part of Serve's context that the policy reads."""

    loads: list[ReplicaLoad]
    app_name: str | None = "app"
    target_num_replicas: int = 2
    capacity_adjusted_min_replicas: int = 1
    capacity_adjusted_max_replicas: int = 9

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]]:
        named = [load.as_numbers() for load in self.loads]
        return {name: {index: numbers[name] for index, numbers in enumerate(named)} for name in (named or [{}])[0]}


@dataclass
class World:
    """A policy, its clock and the controller that it reports to."""

    now_s: float = 100.0
    has_controller: bool = True
    reports: list[tuple[str, ReplicaDecision]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.policy = TpotPolicy(0.025, report=self._report, clock=lambda: self.now_s)

    def _report(self, app_name: str, decision: ReplicaDecision) -> bool:
        if self.has_controller:
            self.reports.append((app_name, decision))
        return self.has_controller


def test_a_decision_is_reported_once_and_again_when_it_changes() -> None:
    world = World()
    number, state = world.policy(Context([BUSY, BUSY]))
    assert state == {}
    world.policy(Context([BUSY, BUSY]))
    ((app, decision),) = world.reports
    assert (app, decision.replicas) == ("app", number)
    world.policy(Context([IDLE, IDLE]))
    assert [decision.reason for _, decision in world.reports[1:]] == ["spare"]


def test_an_unchanged_decision_is_repeated_for_a_controller_that_was_replaced() -> None:
    world = World()
    world.policy(Context([BUSY, BUSY]))
    world.now_s += REPORT_PERIOD_S - 0.1
    world.policy(Context([BUSY, BUSY]))
    assert len(world.reports) == 1
    world.now_s += 0.2
    world.policy(Context([BUSY, BUSY]))
    assert len(world.reports) == 2
    assert world.reports[0] == world.reports[1]


def test_without_a_controller_every_call_tries_again() -> None:
    world = World(has_controller=False)
    world.policy(Context([BUSY, BUSY]))
    world.has_controller = True
    world.policy(Context([BUSY, BUSY]))
    assert len(world.reports) == 1


def test_a_report_without_ray_starts_no_cluster() -> None:
    assert not report_to_controller("app", ReplicaDecision(2, "steady"))
    assert not ray.is_initialized()


def test_a_replica_that_has_not_recorded_every_value_does_not_count() -> None:
    numbers = BUSY.as_numbers()
    metrics = {name: {"a": value} for name, value in numbers.items()}
    metrics["running"]["b"] = 3.0
    assert readings_of(metrics) == [BUSY]
