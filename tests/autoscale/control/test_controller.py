"""The controller returns the plan in force to every report, and takes over a newer one."""

from __future__ import annotations

import time

import pytest

from autoscale.control.controller import Controller, initial_plan
from autoscale.control.report import Observation
from autoscale.replicas.decision import ReplicaDecision
from engine.config import SpeculativeConfig
from engine.core.pacing import SpeculationPlan


def test_the_first_plan_follows_the_settings() -> None:
    config = SpeculativeConfig(method="ngram", policy="threshold", k=4, threshold_max_batch=9)
    assert initial_plan(config) == SpeculationPlan(version=1, policy="threshold", max_k=4, max_batch=9)


@pytest.mark.parametrize("config", [SpeculativeConfig(method="none"), SpeculativeConfig(method="ngram", k=0)])
def test_without_a_draft_method_the_plan_is_off(config: SpeculativeConfig) -> None:
    assert initial_plan(config).policy == "off"


def test_a_report_is_kept_and_gets_the_plan() -> None:
    controller = Controller(SpeculationPlan(version=1, policy="threshold", max_k=4))
    before_s = time.monotonic()
    plan = controller.report("engine-1", Observation(num_steps=3))
    assert plan == controller.plan() == SpeculationPlan(version=1, policy="threshold", max_k=4)
    (report,) = controller.reports().values()
    assert report.observation.num_steps == 3
    assert before_s <= report.received_s <= time.monotonic()


def test_an_override_changes_what_is_given_and_counts_the_version() -> None:
    controller = Controller(SpeculationPlan(version=1, policy="fixed", max_k=4, max_batch=8))
    assert controller.override(max_k=2) == SpeculationPlan(version=2, policy="fixed", max_k=2, max_batch=8)
    assert controller.override(enabled=False).enabled is False
    changed = controller.override(policy="off", max_batch=3, enabled=True)
    assert changed == SpeculationPlan(version=4, policy="off", max_k=2, max_batch=3)
    assert controller.report("engine-1", Observation()) == changed


@pytest.mark.parametrize(("version", "is_taken"), [(4, False), (5, False), (6, True)])
def test_only_a_newer_plan_is_taken_over_from_an_engine(version: int, is_taken: bool) -> None:
    controller = Controller(SpeculationPlan(version=5, max_k=4))
    theirs = SpeculationPlan(version=version, max_k=2)
    assert controller.report("engine-1", Observation(), theirs).max_k == (2 if is_taken else 4)


def test_the_history_is_that_of_the_reports() -> None:
    controller = Controller(SpeculationPlan())
    controller.report("engine-1", Observation(num_steps=1, num_emitted=5))
    controller.report("engine-2", Observation(num_steps=2, num_emitted=1))
    view = controller.history(0.0)
    assert view.num_engines == 2
    assert sum(second.observation.num_emitted for second in view.seconds) == 6
    assert view.plan == controller.plan()


def test_the_last_decision_on_replicas_is_kept() -> None:
    controller = Controller(SpeculationPlan())
    assert controller.replicas() is None
    controller.scaled(ReplicaDecision(3, "slow"))
    assert controller.replicas() == ReplicaDecision(3, "slow")
