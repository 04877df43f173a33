"""The simulator: steps cost what the table says, and drafts are accepted at their rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from autoscale.policy.cost_model import CostModel
from autoscale.policy.policies import Fixed, Off
from autoscale.simulation.hardware import cpu_table
from autoscale.simulation.simulator import Oracle, Simulation, Workload
from engine.core.pacing import KChoice, Pacer, Prediction, SpeculationPlan
from engine.core.request import Request
from engine.core.stats import StepStats


class Recorder:
    """A pacer that records the steps of another one."""

    def __init__(self, pacer: Pacer, exit_threshold: float = 0.0) -> None:
        self._pacer = pacer
        self._exit_threshold = exit_threshold
        self.steps: list[StepStats] = []

    def choose(self, plan: SpeculationPlan, decodes: Sequence[Request], num_prefill_rows: int) -> Sequence[KChoice]:
        choices = self._pacer.choose(plan, decodes, num_prefill_rows)
        return [replace(choice, exit_threshold=self._exit_threshold) for choice in choices]

    def observe(self, stats: StepStats) -> Prediction:
        self.steps.append(stats)
        return self._pacer.observe(stats)


def run(pacer: Recorder, workload: Workload, *, k: int = 3, streams: int = 2, noise: float = 0.0) -> float:
    simulation = Simulation(cpu_table(), workload, lambda _: streams, noise=noise)
    return simulation.run(pacer, SpeculationPlan(policy="fixed", max_k=k), 20.0).goodput


def test_without_noise_a_plain_step_costs_what_the_table_says() -> None:
    pacer = Recorder(Off())
    run(pacer, Workload("any", 0.5))
    cost = CostModel(cpu_table())
    for step in pacer.steps:
        assert step.step_s == pytest.approx(cost.step_s(2, step.context_len))
        assert (step.num_emitted, step.num_drafted, step.num_rows) == (2, 0, 2)
        assert step.k_by_reason == {"off": 2}


def test_counts_of_a_drafting_step_agree_with_each_other() -> None:
    pacer = Recorder(Fixed())
    run(pacer, Workload("any", 0.5))
    assert sum(step.num_drafted for step in pacer.steps) > 1000
    for step in pacer.steps:
        assert step.num_rows == 2 + step.num_drafted == 2 + sum(outcome.num_drafted for outcome in step.outcomes)
        assert step.num_emitted == 2 + step.num_accepted
        assert step.num_accepted == sum(step.accepted_by_position)
        assert step.depth == len(step.drafted_by_position)


@pytest.mark.parametrize("rate", [0.0, 0.5, 0.9])
def test_tokens_are_accepted_at_the_rate_of_the_workload(rate: float) -> None:
    """Some thousand reached positions: 0.06 is more than four standard deviations of their mean."""
    pacer = Recorder(Fixed())
    run(pacer, Workload("any", rate, spread=0.0))
    reached = sum(sum(step.drafted_by_position) for step in pacer.steps)
    assert reached > 1500
    assert sum(step.num_accepted for step in pacer.steps) / reached == pytest.approx(rate, abs=0.06)


def test_a_threshold_stops_drafts_where_confidence_is_reported() -> None:
    workload = Workload("any", 0.6, certainty=0.3)
    free, strict = Recorder(Fixed()), Recorder(Fixed(), exit_threshold=0.7)
    run(free, workload)
    run(strict, workload)
    lengths = [outcome.num_drafted for step in strict.steps for outcome in step.outcomes]
    assert set(lengths) == {1, 2, 3}
    assert sum(lengths) / len(lengths) < 2.5
    assert all(len(o.confidences) == o.num_drafted for step in free.steps for o in step.outcomes)


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    def goodput(seed: int) -> float:
        simulation = Simulation(cpu_table(), Workload("any", 0.5), lambda _: 2, seed=seed)
        return simulation.run(Fixed(), SpeculationPlan(policy="fixed", max_k=3), 5.0).goodput

    assert goodput(1) == goodput(1) != goodput(2)


def test_a_slowdown_multiplies_every_duration() -> None:
    plan = SpeculationPlan(policy="off")
    usual, slow = (
        Simulation(cpu_table(), Workload("any", 0.5), lambda _: 1, noise=0.0, slowdown=lambda _, f=factor: f)  # type: ignore[misc]
        .run(Off(), plan, 10.0)
        .goodput
        for factor in (1.0, 2.0)
    )
    assert 1.8 < usual / slow < 2.0, "the overhead stays"


def test_switches_count_changes_between_drafting_and_not() -> None:
    class Alternating(Fixed):
        """Drafts in every other step."""

        def __init__(self) -> None:
            self.num_steps = 0

        def choose(self, plan: SpeculationPlan, decodes: Sequence[Request], num_prefill_rows: int) -> Sequence[KChoice]:
            self.num_steps += 1
            return [KChoice(self.num_steps % 2, "plan")] * len(decodes)

    pacer = Alternating()
    outcome = Simulation(cpu_table(), Workload("any", 0.5), lambda _: 1).run(pacer, SpeculationPlan(), 2.0)
    # The last token of a request is never drafted, so some steps that should draft do not.
    assert 0.9 * pacer.num_steps < outcome.switches < pacer.num_steps


@pytest.mark.parametrize("rate", [0.0, 0.9])
def test_the_oracle_is_at_least_as_good_as_any_fixed_k(rate: float) -> None:
    workload = Workload("any", rate, spread=0.0)

    def goodput(pacer: Pacer, k: int) -> float:
        simulation = Simulation(cpu_table(), workload, lambda _: 4, noise=0.0)
        return simulation.run(pacer, SpeculationPlan(policy="fixed", max_k=k), 20.0).goodput

    best = max(goodput(Fixed(), k) for k in (0, 2, 4, 8))
    assert goodput(Oracle(cpu_table(), 8), 8) > 0.98 * best
