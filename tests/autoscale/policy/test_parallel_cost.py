"""The cost of a parallel draft: one pass whatever K, in predictions, in what is learned and in the choice of K."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from step_stats import make_step
from switches import drafting

from autoscale.policy.acceptance_rate import Acceptance
from autoscale.policy.allocation import Allocation, allocate
from autoscale.policy.choice_builder import ChoiceBuilder
from autoscale.policy.cost_model import CostModel, CostTable
from autoscale.policy.goodput import make_goodput
from autoscale.replicas.tpot_estimate import TpotEstimate
from autoscale.simulation.hardware import cpu_table
from autoscale.simulation.simulator import Oracle, Simulation, Workload
from engine.core.pacing import Pacer, Prior, SpeculationPlan
from engine.core.request import Request
from engine.core.stats import RowOutcome
from engine.messages import SamplingParams, Submit

POSITIONS = 4
PARALLEL = replace(cpu_table(), positions_per_pass=POSITIONS)


def test_passes_are_counted_by_the_positions_of_one() -> None:
    chain, parallel = CostModel(cpu_table()), CostModel(PARALLEL)
    assert [chain.passes(depth) for depth in (0, 1, 2.5, 5)] == [0, 1, 2.5, 5]
    assert [parallel.passes(depth) for depth in (0, 1, 2.5, 4, 5)] == [0, 1, 1, 1, 2]


@pytest.mark.parametrize("depth", [1, 3, POSITIONS])
def test_a_draft_costs_one_pass_whatever_its_length(depth: int) -> None:
    chain, parallel = CostModel(cpu_table()), CostModel(PARALLEL)
    assert parallel.draft_s(2, depth) == pytest.approx(chain.draft_s(2, 1))
    assert parallel.step_s(9, 50, 2, depth) == pytest.approx(chain.step_s(9, 50, 2, 1))


def test_a_table_keeps_its_positions() -> None:
    cost = CostModel(cpu_table())
    cost.measured(PARALLEL)
    assert cost.positions_per_pass == POSITIONS
    assert cost.table().positions_per_pass == POSITIONS


def test_the_pass_is_learned_from_a_draft_of_any_length() -> None:
    """A step of 4 tokens whose draft takes 2 ms shows a pass of 2 ms, not of half a millisecond."""
    seconds = {}
    for table in (cpu_table(), PARALLEL):
        cost = CostModel(replace(table, pass_s=tuple([0.001] * len(table.pass_s))))
        for _ in range(300):
            cost.observe(make_step([(POSITIONS, 1)], 0))  # draft_s is 2 ms
        seconds[table.positions_per_pass] = cost.pass_s(1)
    assert seconds[POSITIONS] == pytest.approx(0.002, rel=0.05)
    assert seconds[1] == pytest.approx(0.002 / POSITIONS, rel=0.05)


@pytest.mark.parametrize("seed", range(30))
def test_the_allocation_is_the_best_of_all_with_one_pass(seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch, width = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    cumulative_acceptance = np.cumprod(rng.uniform(0.05, 0.99, (batch, width)), axis=1)
    base_s, fixed_s, pass_s = rng.uniform(5, 40), rng.uniform(0, 2), rng.uniform(0, 5)
    added_s = np.concatenate([[0.0], np.cumsum(rng.uniform(0, 3, batch * width))])
    found = allocate(
        cumulative_acceptance,
        base_s=base_s,
        fixed_s=fixed_s,
        pass_s=pass_s,
        added_s=added_s,
        depths=[width],
        positions_per_pass=POSITIONS,
    )

    def goodput(ks: tuple[int, ...]) -> float:
        tokens = batch + sum(cumulative_acceptance[i, :k].sum() for i, k in enumerate(ks))
        return float(tokens / (base_s + (fixed_s + pass_s + added_s[sum(ks)] if max(ks) else 0.0)))

    best = max(goodput(ks) for ks in itertools.product(range(width + 1), repeat=batch))
    assert found.goodput == pytest.approx(best, rel=1e-9)


def test_an_early_exit_saves_rows_and_no_pass() -> None:
    best = Allocation(np.array([3, 2, 1]), tokens=6.0, seconds=0.02)
    cost, acceptance = CostModel(PARALLEL), Acceptance(POSITIONS, (0.8,))
    acceptance.observe([RowOutcome(1, 2, 2, 10, "greedy", 2, (0.9, 0.9))])
    builder = ChoiceBuilder(cost, acceptance, None)
    builder.reprice(best, 9, POSITIONS, 300.0)
    (choice,) = builder.build([2], [0], reason="plan", zero_reason="acceptance")
    expected = acceptance.confidence_at(300.0 * cost.row_s(9, 4) / acceptance.deeper_rate(0), 0)
    assert choice.exit_threshold == pytest.approx(expected)


def goodput_of(pacer: Pacer, table: CostTable, rate: float) -> float:
    return Simulation(table, Workload("any", rate), lambda _: 1).run(pacer, SpeculationPlan(max_k=8), 20.0).goodput


@pytest.mark.parametrize("rate", [0.6, 0.9])
def test_goodput_gains_what_later_passes_cost(rate: float) -> None:
    """Simulated, so repeatable. A pass takes 15 % of a target step; acceptance is the same.

    Early exit, which the oracle does not know, can beat it.
    """
    chain = replace(cpu_table(), pass_s=tuple(0.15 * cpu_table().verify_s[0] for _ in cpu_table().pass_s))
    parallel = replace(chain, positions_per_pass=POSITIONS)
    found = goodput_of(make_goodput("eagle", 8, parallel), parallel, rate)
    assert found > 0.95 * goodput_of(Oracle(parallel, POSITIONS), parallel, rate)
    assert found > goodput_of(Oracle(chain, POSITIONS), chain, rate)


def test_k_stays_within_the_trained_positions() -> None:
    prior = Prior(method="eagle", workload="greedy", rates=(0.99,) * 8, weights=(500.0,) * 8)
    submit = Submit(request_id="r", prompt=(1,), sampling=SamplingParams(temperature=0.0, max_tokens=100))
    request = Request(submit=submit, key=1, stream_key=0, tokens=[1])
    chosen = {}
    for table in (cpu_table(), PARALLEL):
        pacer = drafting(make_goodput("eagle", 8, replace(table, pass_s=(1e-6,) * len(table.pass_s))))
        (choice,) = pacer.choose(SpeculationPlan(max_k=8, priors=(prior,)), [request], 0)
        chosen[table.positions_per_pass] = choice.k
    assert chosen[1] > POSITIONS
    assert chosen[POSITIONS] == POSITIONS


def test_the_estimate_for_replicas_counts_one_pass() -> None:
    plan = SpeculationPlan(max_k=POSITIONS)
    chain, parallel = (
        TpotEstimate(make_goodput("eagle", POSITIONS, table)).tpot_s(plan) for table in (cpu_table(), PARALLEL)
    )
    assert parallel[0] < chain[0]
    assert all(one <= other * (1 + 1e-9) for one, other in zip(parallel, chain, strict=True))
