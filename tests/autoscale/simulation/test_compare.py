"""The comparison runs every policy on the same load."""

from __future__ import annotations

import pytest

from autoscale.policy.policies import Fixed, Off, Threshold
from autoscale.simulation.compare import FIXED_KS, compare
from autoscale.simulation.hardware import cpu_table
from autoscale.simulation.simulator import WORKLOADS, Simulation
from engine.core.pacing import SpeculationPlan


def test_every_policy_runs_with_its_settings_on_the_same_load() -> None:
    outcomes = compare(cpu_table(), WORKLOADS["code"], streams=2, max_k=4, duration_s=3.0, seed=5)
    assert set(outcomes) == {*FIXED_KS, "threshold", "goodput", "oracle"}
    load = Simulation(cpu_table(), WORKLOADS["code"], lambda _: 2, seed=5)
    plan = SpeculationPlan(policy="fixed", max_k=4)
    assert outcomes["fixed 4"] == load.run(Fixed(), plan, 3.0)
    load = Simulation(cpu_table(), WORKLOADS["code"], lambda _: 2, seed=5)
    assert outcomes["off"] == load.run(Off(), plan, 3.0)
    load = Simulation(cpu_table(), WORKLOADS["code"], lambda _: 2, seed=5)
    threshold = SpeculationPlan(policy="threshold", max_k=5, max_batch=16)
    assert outcomes["threshold"] == load.run(Threshold(), threshold, 3.0)


@pytest.mark.parametrize(("workload", "is_worth_it"), [("summarization", True), ("adversarial", False)])
def test_drafting_pays_where_it_is_accepted(workload: str, is_worth_it: bool) -> None:
    outcomes = compare(cpu_table(), WORKLOADS[workload], streams=2, max_k=4, duration_s=5.0, seed=1)
    assert (outcomes["fixed 4"].goodput > 1.2 * outcomes["off"].goodput) == is_worth_it
    assert outcomes["oracle"].goodput >= 0.99 * outcomes["off"].goodput
