"""The policies as rules: which K they choose after which steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from step_stats import step_stats

from autoscale.policy.goodput import make_goodput
from autoscale.policy.policies import PolicyPacer, Threshold
from engine.config import PolicyName
from engine.core.pacing import SpeculationPlan
from engine.core.request import Request
from engine.core.stats import StepStats
from engine.messages import SamplingParams, Submit

PLAN = SpeculationPlan(policy="threshold", max_k=5, max_batch=16)


def requests(number: int) -> list[Request]:
    submit = Submit(request_id="r", prompt=(1,), sampling=SamplingParams())
    return [Request(submit=submit, key=i, stream_key=0, tokens=[1]) for i in range(number)]


def finished(*accepted: float) -> StepStats:
    """A step in which requests finished with these mean numbers of accepted tokens."""
    return step_stats(accepted_per_finished=accepted)


def k_after(policy: Threshold, accepted: Sequence[float], batch: int = 1) -> int:
    policy.observe(finished(*accepted))
    (choice, *_) = policy.choose(PLAN, requests(batch), 0)
    return choice.k


def test_threshold_goes_down_level_by_level_and_back_up() -> None:
    policy = Threshold()
    assert k_after(policy, [1.4] * 9) == 5, "nine requests are not ten"
    assert k_after(policy, [1.4]) == 2
    assert k_after(policy, [0.5] * 10) == 1
    assert k_after(policy, [0.1] * 10) == 1
    assert k_after(policy, [0.9] * 10) == 2
    assert k_after(policy, [1.8] * 10) == 5
    assert k_after(policy, [3.0] * 10) == 5


def test_threshold_is_off_in_a_large_batch_and_gives_the_reason() -> None:
    policy = Threshold()
    assert {(c.k, c.reason) for c in policy.choose(PLAN, requests(16), 0)} == {(0, "batch")}
    assert {(c.k, c.reason) for c in policy.choose(PLAN, requests(15), 0)} == {(5, "plan")}


@pytest.mark.parametrize(("policy", "k"), [("off", 0), ("fixed", 5)])
def test_the_pacer_follows_the_plan_in_force(policy: PolicyName, k: int) -> None:
    pacer = PolicyPacer(make_goodput("ngram", 5))
    plan = SpeculationPlan(policy=policy, max_k=5)
    assert [choice.k for choice in pacer.choose(plan, requests(3), 0)] == [k] * 3


def test_every_policy_observes_and_the_prediction_is_that_of_goodput() -> None:
    """`threshold` also observes the ten requests that finish while `off` is in force."""
    pacer, alone = PolicyPacer(make_goodput("ngram", 5)), make_goodput("ngram", 5)
    for _ in range(10):
        pacer.choose(SpeculationPlan(policy="off"), requests(1), 0)
        prediction = pacer.observe(finished(0.5))
        assert prediction == alone.observe(finished(0.5))
        assert prediction.seconds > 0
    assert pacer.choose(PLAN, requests(1), 0)[0].k == 2


@pytest.mark.parametrize("policy", ["off", "fixed", "threshold", "goodput"])
def test_a_disabled_plan_drafts_under_no_policy(policy: PolicyName) -> None:
    pacer = PolicyPacer(make_goodput("ngram", 5))
    plan = SpeculationPlan(policy=policy, max_k=5, enabled=False)
    assert {(choice.k, choice.reason) for choice in pacer.choose(plan, requests(2), 0)} == {(0, "off")}
