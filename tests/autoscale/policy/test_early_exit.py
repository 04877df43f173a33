"""Drafts that exit early: the threshold follows the price, is calibrated by acceptance, and pays where it can."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from fakes import FixedPacer, ToyEngine, ToyModel, toy_drafter

from autoscale.policy.acceptance_rate import Acceptance, workload_index
from autoscale.policy.goodput import Goodput, make_goodput
from autoscale.simulation.hardware import cpu_table, h100_llama_70b
from autoscale.simulation.simulator import Simulation, Workload
from engine.core.pacing import KChoice, Pacer, Prediction, SpeculationPlan
from engine.core.request import Request
from engine.core.stats import RowOutcome, StepStats
from engine.messages import SamplingParams, Submit


class WithThreshold(FixedPacer):
    def __init__(self, k: int, exit_threshold: float) -> None:
        super().__init__(k)
        self._exit_threshold = exit_threshold

    def choose(self, plan, decodes, num_prefill_rows):  # type: ignore[no-untyped-def]
        return [
            replace(choice, exit_threshold=self._exit_threshold)
            for choice in super().choose(plan, decodes, num_prefill_rows)
        ]


@pytest.mark.parametrize("exit_threshold", [0.0, 0.3, 0.6, 1.0])
def test_a_draft_goes_on_exactly_while_its_cumulative_confidence_allows(exit_threshold: float) -> None:
    pacer = WithThreshold(5, exit_threshold)
    drafter = toy_drafter(ToyModel(vocab_size=7, seed=4, blend=0.3))
    engine = ToyEngine(ToyModel(vocab_size=7), drafter, pacer, max_model_len=128)
    sampling = SamplingParams(temperature=0.0, max_tokens=80)
    engine.run([Submit(request_id=f"r{i}", prompt=(i, 1, 2), sampling=sampling) for i in range(4)])
    outcomes = [outcome for stats in pacer.stats for outcome in stats.outcomes]
    assert outcomes
    for outcome in outcomes:
        cumulative_confidence = np.cumprod(outcome.confidences)
        assert all(cumulative_confidence[: outcome.num_drafted - 1] >= exit_threshold)
        if 0 < outcome.num_drafted < outcome.num_asked:
            assert cumulative_confidence[-1] < exit_threshold


def test_greedy_responses_are_the_same_under_any_threshold() -> None:
    def response(exit_threshold: float) -> list[int]:
        drafter = toy_drafter(ToyModel(vocab_size=7, seed=4, blend=0.3))
        engine = ToyEngine(ToyModel(vocab_size=7), drafter, WithThreshold(4, exit_threshold), max_model_len=128)
        sampling = SamplingParams(temperature=0.0, max_tokens=60)
        return engine.run([Submit(request_id="r", prompt=(1, 2, 3), sampling=sampling)])["r"]

    assert response(0.0) == response(0.4) == response(1.0)


@pytest.mark.parametrize(("confidence", "rate"), [(0.9, 0.9), (0.5, 0.8), (0.9, 0.4)])
def test_confidence_is_calibrated_by_what_was_accepted(confidence: float, rate: float) -> None:
    acceptance, rng = Acceptance(4, prior=(0.5,)), np.random.default_rng(1)
    for key in range(6000):
        accepted = int(rng.random() < rate)
        acceptance.observe([RowOutcome(key % 8, 1, accepted, 10, "greedy", 1, (confidence,))])
    workload = workload_index("greedy")
    assert acceptance.confidence_at(rate, workload) == pytest.approx(confidence, abs=0.08)
    assert acceptance.confidence_at(1.5, workload) == 1.0


def test_the_threshold_rises_with_the_cost_of_a_position() -> None:
    def threshold_with(pass_factor: float) -> float:
        table = cpu_table()
        pacer = make_goodput("draft_model", 8, replace(table, pass_s=tuple(pass_factor * s for s in table.pass_s)))
        for _ in range(60):
            pacer.acceptance.observe([RowOutcome(1, 4, 4, 20, "greedy", 4, (0.9,) * 4)])
        submit = Submit(request_id="r", prompt=(1,), sampling=SamplingParams(temperature=0.0, max_tokens=99))
        (choice,) = pacer.choose(SpeculationPlan(max_k=8), [Request(submit=submit, key=1, stream_key=0, tokens=[1])], 0)
        assert choice.k > 1
        return choice.exit_threshold

    assert 0 < threshold_with(1.0) < threshold_with(2.0) < 1


def test_a_method_without_confidences_gets_no_threshold() -> None:
    pacer = make_goodput("ngram", 8, cpu_table())
    submit = Submit(request_id="r", prompt=(1,), sampling=SamplingParams(temperature=0.0, max_tokens=99))
    pacer.acceptance.observe([RowOutcome(1, 4, 4, 20)])
    (choice,) = pacer.choose(SpeculationPlan(max_k=8), [Request(submit=submit, key=1, stream_key=0, tokens=[1])], 0)
    assert choice.exit_threshold == 0


@pytest.mark.parametrize("streams", [1, 8])
@pytest.mark.parametrize("hardware", [cpu_table, h100_llama_70b], ids=["cpu", "h100"])
def test_early_exit_loses_nothing_where_confidence_predicts_acceptance(hardware, streams: int) -> None:  # type: ignore[no-untyped-def]
    """Mean over seeds of simulated goodput with thresholds over that without; simulated, so repeatable."""

    class WithoutExit:
        """The same policy with every exit threshold removed."""

        def __init__(self, pacer: Goodput) -> None:
            self._pacer = pacer
            self.num_removed = 0

        def choose(self, plan: SpeculationPlan, decodes: Sequence[Request], num_prefill_rows: int) -> list[KChoice]:
            choices = self._pacer.choose(plan, decodes, num_prefill_rows)
            self.num_removed += sum(choice.exit_threshold > 0 for choice in choices)
            return [replace(choice, exit_threshold=0.0) for choice in choices]

        def observe(self, stats: StepStats) -> Prediction:
            return self._pacer.observe(stats)

    table, workload = hardware(), Workload("spread", 0.6, certainty=0.35)

    def goodput(pacer: Pacer, seed: int) -> float:
        run = Simulation(table, workload, lambda _: streams, seed=seed)
        return run.run(pacer, SpeculationPlan(max_k=8), 15.0).goodput

    ratios = []
    for seed in range(3):
        without = WithoutExit(make_goodput("draft_model", 8, table))
        ratios.append(goodput(make_goodput("draft_model", 8, table), seed) / goodput(without, seed))
        assert without.num_removed > 0
    assert np.mean(ratios) > 0.97
