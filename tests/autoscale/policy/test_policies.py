"""The policies as rules: what K they choose after what they have seen."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from autoscale.control.controller import Controller, initial_plan
from autoscale.control.report import Aggregator, Observation
from autoscale.policy.goodput import make_goodput
from autoscale.policy.policies import PolicyPacer, Threshold
from engine.config import SpeculativeConfig
from engine.core.pacing import SpeculationPlan
from engine.core.request import Request
from engine.core.stats import StepStats
from engine.messages import SamplingParams, Submit

PLAN = SpeculationPlan(policy="threshold", max_k=5, max_batch=16)


def requests(number: int) -> list[Request]:
    submit = Submit(request_id="r", prompt=(1,), sampling=SamplingParams())
    return [Request(submit=submit, key=i, stream_key=0, tokens=[1]) for i in range(number)]


def finished(*accepted: float) -> StepStats:
    return StepStats(
        step_id=1,
        num_decodes=1,
        num_prefill_tokens=0,
        num_waiting=0,
        num_rows=6,
        context_len=10,
        num_drafted=5,
        num_accepted=3,
        num_emitted=4,
        accepted_by_position=(1, 1, 1, 0),
        drafted_by_position=(1, 1, 1, 1),
        depth=5,
        k_by_reason={"plan": 1},
        outcomes=(),
        num_caught_up=1,
        ended=(),
        accepted_per_finished=accepted,
        schedule_s=0.001,
        draft_s=0.002,
        handoff_s=0.0001,
        verify_s=0.01,
        sample_s=0.001,
        step_s=0.014,
    )


def k_after(policy: Threshold, accepted: Sequence[float], batch: int = 1) -> int:
    policy.observe(finished(*accepted))
    (choice, *_) = policy.choose(PLAN, requests(batch), 0)
    return choice.k


def test_threshold_goes_down_rung_by_rung_and_back_up() -> None:
    policy = Threshold()
    assert k_after(policy, [1.4] * 9) == 5, "nine requests are not ten"
    assert k_after(policy, [1.4]) == 2
    assert k_after(policy, [0.5] * 10) == 1
    assert k_after(policy, [0.1] * 10) == 1
    assert k_after(policy, [0.9] * 10) == 2
    assert k_after(policy, [1.8] * 10) == 5
    assert k_after(policy, [3.0] * 10) == 5


def test_threshold_is_off_in_a_large_batch_and_says_why() -> None:
    policy = Threshold()
    assert {(c.k, c.reason) for c in policy.choose(PLAN, requests(16), 0)} == {(0, "batch")}
    assert {(c.k, c.reason) for c in policy.choose(PLAN, requests(15), 0)} == {(5, "plan")}


@pytest.mark.parametrize(("policy", "k"), [("off", 0), ("fixed", 5)])
def test_the_pacer_follows_the_plan_in_force(policy: str, k: int) -> None:
    pacer = PolicyPacer(make_goodput("ngram", 5))
    plan = SpeculationPlan(policy=policy, max_k=5)  # type: ignore[arg-type]
    assert [choice.k for choice in pacer.choose(plan, requests(3), 0)] == [k] * 3


def test_observations_add_up() -> None:
    aggregator = Aggregator()
    aggregator.add(finished(2.0))
    aggregator.add(finished())
    observation = aggregator.take()
    assert (observation.num_steps, observation.num_drafted, observation.num_accepted) == (2, 10, 6)
    assert observation.accepted_by_position == (2, 2, 2, 0)
    assert observation.drafted_by_position == (2, 2, 2, 2)
    assert observation.k_by_reason == {"plan": 2}
    assert aggregator.take() == Observation()


def test_the_controller_answers_a_report_with_the_plan() -> None:
    controller = Controller(initial_plan(SpeculativeConfig(method="ngram", policy="threshold", k=4)))
    plan = controller.report("engine-1", Observation(num_steps=3))
    assert (plan.policy, plan.max_k, plan.max_batch) == ("threshold", 4, 16)
    assert controller.reports()["engine-1"].observation.num_steps == 3


@pytest.mark.parametrize("config", [SpeculativeConfig(method="none"), SpeculativeConfig(method="ngram", k=0)])
def test_without_a_drafter_the_plan_is_off(config: SpeculativeConfig) -> None:
    assert initial_plan(config).policy == "off"
