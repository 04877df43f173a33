"""What the recorder counts is what the steps did: sums over any steps, in any portions, and why it switched."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from step_stats import make_step

from autoscale.control.step_metrics import StepRecorder
from autoscale.policy.goodput import make_goodput
from autoscale.policy.policies import PolicyPacer
from engine.core.pacing import SpeculationPlan
from engine.core.stats import StepStats
from engine.metrics.counters import HistogramValue, MetricCounters, MetricSnapshot, merge
from engine.metrics.labels import K_REASONS

MAX_K = 4
BUDGET_S = 150e-6
"""0.5 % of a step of 30 ms, the fastest that the embedded model takes."""


class Rig:
    """A recorder with its policy, fed as the engine feeds them."""

    def __init__(self, policy: str = "fixed") -> None:
        self.goodput = make_goodput("draft_model", MAX_K)
        self.plan = SpeculationPlan(policy=policy, max_k=MAX_K)  # type: ignore[arg-type]
        self.recorder = StepRecorder(self.goodput, lambda: self.plan)

    def feed(self, steps: Iterable[StepStats]) -> MetricSnapshot:
        for step in steps:
            self.goodput.observe(step)
            self.recorder.add(step)
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
    rig.feed(steps[:cut])
    snapshot = rig.feed(steps[cut:])
    outcomes = [outcome for step in steps for outcome in step.outcomes]
    verdicts = sum(sum(step.k_by_reason.values()) for step in steps)
    assert snapshot.number("paceline_steps_total") == len(steps)
    assert snapshot.number("paceline_drafts_total") == len(outcomes)
    assert snapshot.number("paceline_drafted_tokens_total") == sum(step.num_drafted for step in steps)
    assert snapshot.number("paceline_accepted_tokens_total") == sum(step.num_accepted for step in steps)
    assert snapshot.number("paceline_emitted_tokens_total") == sum(step.num_emitted for step in steps)
    assert snapshot.number("paceline_verdicts_total") == verdicts
    for reason in K_REASONS:
        assert snapshot.number("paceline_k_reasons_total", reason) == sum(s.k_by_reason.get(reason, 0) for s in steps)
    for position in range(MAX_K):
        reached = sum(outcome.num_drafted > position <= outcome.num_accepted for outcome in outcomes)
        accepted = sum(outcome.num_accepted > position for outcome in outcomes)
        assert snapshot.number("paceline_reached_positions_total", str(position)) == reached
        assert snapshot.number("paceline_accepted_positions_total", str(position)) == accepted
    if verdicts:
        k = snapshot.histograms["paceline_k"][()]
        assert k.num == verdicts
        assert k.total == sum(outcome.num_drafted for outcome in outcomes)
        assert k.counts[0] == verdicts - len(outcomes)  # exactly K = 0
    assert snapshot.histograms["paceline_step_seconds"][()].total == pytest.approx(sum(s.step_s for s in steps))


def test_goodput_figures_are_of_the_same_steps() -> None:
    rig = Rig()
    decode, prefill = make_step([(3, 2), (3, 0)], 1), structs.replace(make_step([], 4), num_prefill_tokens=50)
    snapshot = rig.feed([decode, prefill, decode])
    assert snapshot.number("paceline_realised_tokens_total") == 2 * decode.num_emitted
    assert snapshot.number("paceline_realised_seconds_total") == pytest.approx(2 * decode.step_s)
    assert snapshot.number("paceline_plain_tokens_total") == 2 * 3
    # Between nothing and everything accepted.
    assert 6 < snapshot.number("paceline_predicted_tokens_total") < 2 * (3 + 6)
    assert snapshot.number("paceline_predicted_seconds_total") > snapshot.number("paceline_plain_seconds_total") > 0
    assert snapshot.histograms["paceline_cost_error_ratio"][()].num == 3


def test_each_switch_has_its_cause() -> None:
    rig = Rig()
    rig.feed([make_step([(2, 1)], 0), make_step([], 2, "draft_down"), make_step([], 2, "draft_down")])
    rig.plan = replace(rig.plan, version=2, max_k=2)
    snapshot = rig.feed([make_step([(2, 1)], 0), make_step([(2, 1)], 0)])
    causes = {cause: n for (cause,), n in snapshot.numbers["paceline_switches_total"].items()}
    assert causes == {"draft_down": 1, "draft_up": 1, "plan": 1}
    assert snapshot.number("paceline_plan_version") == 2


@pytest.mark.parametrize(("reason", "cause"), [("batch", "batch"), ("acceptance", "acceptance")])
def test_the_toggle_going_off_and_on(reason: str, cause: str) -> None:
    rig = Rig("goodput")
    switch = rig.goodput.switch
    rig.feed([make_step([(2, 0)], 0)])
    switch.decide(0.5, 0.0)
    switch.decide(0.5, 10.0)
    assert not switch.is_on
    rig.feed([make_step([], 1, reason)])
    switch.decide(2.0, 20.0)
    switch.decide(2.0, 30.0)
    snapshot = rig.feed([make_step([(2, 2)], 0)])
    causes = {name: n for (name,), n in snapshot.numbers["paceline_switches_total"].items()}
    assert causes == {cause: 1, "gain": 1}


@pytest.mark.parametrize("policy", ["off", "fixed", "threshold", "goodput"])
def test_a_disabled_plan_drafts_under_no_policy(policy: str) -> None:
    pacer = PolicyPacer(make_goodput("ngram", MAX_K))
    plan = SpeculationPlan(policy=policy, max_k=MAX_K, enabled=False)  # type: ignore[arg-type]
    assert {(choice.k, choice.reason) for choice in pacer.choose(plan, [None, None], 0)} == {(0, "off")}  # type: ignore[list-item]


def test_cost_per_step() -> None:
    """Taking and counting a step of 16 requests, against 0.5 % of a 30 ms step; best of 5, for busy machines."""
    step = make_step([(4, index % 5) for index in range(16)], 0)
    best = 1.0
    for _ in range(5):
        rig = Rig()
        rig.feed([step])
        begin = time.perf_counter()
        for _ in range(200):
            rig.recorder.add(step)
        rig.recorder.fold()
        best = min(best, (time.perf_counter() - begin) / 200)
    assert best < BUDGET_S


def test_ledger_refuses_what_is_not_declared() -> None:
    counters = MetricCounters()
    with pytest.raises(KeyError):
        counters.add("paceline_surprises_total")
    with pytest.raises(ValueError, match="is a histogram"):
        counters.add("paceline_k", 1)
    with pytest.raises(ValueError, match="labels"):
        counters.add("paceline_switches_total")


def test_readings_are_copies_and_merge_adds() -> None:
    counters = MetricCounters()
    counters.add("paceline_drafts_total", 2)
    counters.observe("paceline_k", 3, count=2)
    before = counters.read()
    counters.add("paceline_drafts_total")
    counters.observe("paceline_k", 1)
    whole = merge([before, counters.read()])
    assert before.number("paceline_drafts_total") == 2
    assert whole.number("paceline_drafts_total") == 5
    assert whole.histograms["paceline_k"][()].total == 6 + 7
    assert isinstance(before.histograms["paceline_k"][()], HistogramValue)
    assert before.histograms["paceline_k"][()].num == 2
