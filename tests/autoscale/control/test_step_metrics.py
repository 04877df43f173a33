"""What the recorder counts is what the steps did: sums over any steps, in any portions, and the cause of a switch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from call_count import counted_calls
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from step_stats import make_step
from switches import settled

from autoscale.control.step_metrics import StepRecorder
from autoscale.policy.goodput import make_goodput
from engine.config import PolicyName
from engine.core.pacing import Prediction, SpeculationPlan
from engine.core.stats import StepStats
from engine.metrics.counters import MetricSnapshot
from engine.metrics.labels import K_REASONS

MAX_K = 4


class Rig:
    """A recorder with a policy that predicts, called in the order of the engine."""

    def __init__(self, policy: PolicyName = "fixed") -> None:
        self.goodput = make_goodput("draft_model", MAX_K)
        self.plan = SpeculationPlan(policy=policy, max_k=MAX_K)
        self.recorder = StepRecorder(lambda: self.plan)

    def run(self, steps: Iterable[StepStats]) -> MetricSnapshot:
        for step in steps:
            self.recorder.add(step, self.goodput.observe(step))
        return self.recorder.read()


drafts = st.integers(1, MAX_K).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k)))
steps_of = st.lists(
    st.builds(make_step, st.lists(drafts, max_size=5), st.integers(0, 5), st.sampled_from(K_REASONS)),
    min_size=1,
    max_size=12,
)


@given(steps=steps_of, cut=st.integers(0, 12))
@settings(max_examples=100, deadline=None)
def test_sums_are_those_of_the_steps_in_any_portions(steps: list[StepStats], cut: int) -> None:
    rig = Rig()
    rig.run(steps[:cut])
    snapshot = rig.run(steps[cut:])
    outcomes = [outcome for step in steps for outcome in step.outcomes]
    num_choices = sum(sum(step.k_by_reason.values()) for step in steps)
    assert snapshot.number("paceline_steps_total") == len(steps)
    assert snapshot.number("paceline_drafts_total") == len(outcomes)
    assert snapshot.number("paceline_drafted_tokens_total") == sum(step.num_drafted for step in steps)
    assert snapshot.number("paceline_accepted_tokens_total") == sum(step.num_accepted for step in steps)
    assert snapshot.number("paceline_emitted_tokens_total") == sum(step.num_emitted for step in steps)
    assert snapshot.number("paceline_verdicts_total") == num_choices
    for reason in K_REASONS:
        assert snapshot.number("paceline_k_reasons_total", reason) == sum(s.k_by_reason.get(reason, 0) for s in steps)
    for position in range(MAX_K):
        reached = sum(outcome.num_drafted > position <= outcome.num_accepted for outcome in outcomes)
        accepted = sum(outcome.num_accepted > position for outcome in outcomes)
        assert snapshot.number("paceline_reached_positions_total", str(position)) == reached
        assert snapshot.number("paceline_accepted_positions_total", str(position)) == accepted
    if num_choices:
        k = snapshot.histograms["paceline_k"][()]
        assert k.num == num_choices
        assert k.total == sum(outcome.num_drafted for outcome in outcomes)
        assert k.counts[0] == num_choices - len(outcomes)  # exactly K = 0
    assert snapshot.histograms["paceline_step_seconds"][()].total == pytest.approx(sum(s.step_s for s in steps))


def recorded(*steps: tuple[StepStats, Prediction]) -> MetricSnapshot:
    recorder = StepRecorder(SpeculationPlan)
    for stats, prediction in steps:
        recorder.add(stats, prediction)
    return recorder.read()


def test_goodput_figures_are_of_steps_without_prompts() -> None:
    prediction = Prediction(seconds=0.028, plain_s=0.02, expected_tokens=7.5, expected_s=0.035)
    decode, prefill = make_step([(3, 2), (3, 0)], 1), structs.replace(make_step([], 4), num_prefill_tokens=50)
    snapshot = recorded((decode, prediction), (prefill, prediction), (decode, prediction))
    assert snapshot.number("paceline_realised_tokens_total") == 2 * 5
    assert snapshot.number("paceline_realised_seconds_total") == pytest.approx(2 * 0.03)
    assert snapshot.number("paceline_plain_tokens_total") == 2 * 3
    assert snapshot.number("paceline_plain_seconds_total") == pytest.approx(2 * 0.02)
    assert snapshot.number("paceline_predicted_tokens_total") == 2 * 7.5
    assert snapshot.number("paceline_predicted_seconds_total") == pytest.approx(2 * 0.035)
    errors = snapshot.histograms["paceline_cost_error_ratio"][()]
    assert (errors.num, errors.total) == (3, pytest.approx(3 * 0.002 / 0.03))


def test_without_a_cost_model_there_is_no_cost_error() -> None:
    snapshot = recorded((make_step([], 1), Prediction()))
    assert () not in snapshot.histograms.get("paceline_cost_error_ratio", {})


def test_probes_and_switches_are_counted_as_predicted() -> None:
    plain, large = make_step([], 2, "acceptance"), make_step([], 2, "batch")
    snapshot = recorded(
        (plain, Prediction(switched="off")),
        (plain, Prediction(probed=True)),
        (plain, Prediction()),
        (make_step([(2, 2)], 0), Prediction(switched="on")),
        (large, Prediction(switched="off", probed=True)),
    )
    assert snapshot.number("paceline_probes_total") == 2
    causes = {cause: n for (cause,), n in snapshot.numbers["paceline_switches_total"].items()}
    assert causes == {"acceptance": 1, "gain": 1, "batch": 1}


def test_time_is_counted_by_phase() -> None:
    stats = structs.replace(
        make_step([(2, 1)], 0), schedule_s=0.001, draft_s=0.002, handoff_s=0.003, verify_s=0.004, sample_s=0.005
    )
    snapshot = recorded((stats, Prediction()), (make_step([], 1), Prediction()))
    phases = {phase: (h.num, h.total) for (phase,), h in snapshot.histograms["paceline_phase_seconds"].items()}
    assert phases["draft"] == (1, pytest.approx(0.002)), "a step without a draft request has no such phase"
    assert phases["handoff"] == (1, pytest.approx(0.003))
    assert phases["schedule"] == (2, pytest.approx(0.002))
    assert phases["verify"] == (2, pytest.approx(0.004 + 0.02))
    assert phases["sample"] == (2, pytest.approx(0.005 + 0.001))


def test_the_plan_in_force_is_a_metric() -> None:
    for plan, max_k in (
        (SpeculationPlan(version=7, max_k=3), 3),
        (SpeculationPlan(version=7, max_k=3, policy="off"), 0),
        (SpeculationPlan(version=7, max_k=3, enabled=False), 0),
    ):
        snapshot = StepRecorder(lambda plan=plan: plan).read()  # type: ignore[misc]
        assert snapshot.number("paceline_plan_version") == 7
        assert snapshot.number("paceline_plan_max_k") == max_k


def test_each_switch_has_its_cause() -> None:
    rig = Rig()
    rig.run([make_step([(2, 1)], 0), make_step([], 2, "draft_down"), make_step([], 2, "draft_down")])
    rig.plan = replace(rig.plan, version=2, max_k=2)
    snapshot = rig.run([make_step([(2, 1)], 0), make_step([(2, 1)], 0)])
    causes = {cause: n for (cause,), n in snapshot.numbers["paceline_switches_total"].items()}
    assert causes == {"draft_down": 1, "draft_up": 1, "plan": 1}
    assert snapshot.number("paceline_plan_version") == 2


@pytest.mark.parametrize(("reason", "cause"), [("batch", "batch"), ("acceptance", "acceptance")])
def test_the_switch_going_off_and_on(reason: str, cause: str) -> None:
    rig = Rig("goodput")
    switch = settled(rig.goodput.switch)
    rig.run([make_step([(2, 0)], 0)])
    switch.decide(0.5, 0.0)
    switch.decide(0.5, 10.0)
    assert not switch.is_on
    rig.run([make_step([], 1, reason)])
    switch.decide(2.0, 20.0)
    switch.decide(2.0, 30.0)
    snapshot = rig.run([make_step([(2, 2)], 0)])
    causes = {name: n for (name,), n in snapshot.numbers["paceline_switches_total"].items()}
    assert causes == {cause: 1, "gain": 1}


def test_the_cost_of_a_step_hardly_grows_with_its_requests() -> None:
    """Counted in function calls: taking and counting a step takes about 270 with 2 requests and 330 with 16."""

    def num_calls(num_requests: int) -> float:
        step = make_step([(4, index % 5) for index in range(num_requests)], 0)
        rig = Rig()
        rig.run([step])
        prediction = rig.goodput.observe(step)
        with counted_calls() as calls:
            for _ in range(50):
                rig.recorder.add(step, prediction)
            rig.recorder.fold()
        return calls.num / 50

    assert num_calls(16) < 1.5 * num_calls(2) < 600
