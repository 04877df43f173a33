"""The levels of K of the policy `threshold`, by value."""

from __future__ import annotations

from msgspec import structs
from step_stats import make_step

from autoscale.policy.policies import Threshold
from engine.core.pacing import KChoice, SpeculationPlan
from engine.core.request import Request
from engine.messages import SamplingParams, Submit

PLAN = SpeculationPlan(policy="threshold", max_k=5, max_batch=4)


def choose(policy: Threshold, batch: int = 1) -> KChoice:
    submit = Submit(request_id="r", prompt=(1,), sampling=SamplingParams())
    requests = [Request(submit=submit, key=key, stream_key=0, tokens=[1]) for key in range(batch)]
    choices = policy.choose(PLAN, requests, 0)
    assert choices == [choices[0]] * batch
    return choices[0]


def finish(policy: Threshold, num: int, accepted: float) -> None:
    """So many requests finish with this many accepted tokens per draft."""
    policy.observe(structs.replace(make_step([], 1), accepted_per_finished=(accepted,) * num))


def test_a_batch_of_the_plan_s_size_is_not_drafted_for() -> None:
    assert choose(Threshold(), 3) == KChoice(5, "plan")
    assert choose(Threshold(), 4) == KChoice(0, "batch")


def test_ten_finished_requests_below_one_and_a_half_tokens_step_down() -> None:
    policy = Threshold()
    finish(policy, 9, 1.4)
    assert choose(policy) == KChoice(5, "plan"), "not enough evidence yet"
    finish(policy, 1, 1.4)
    assert choose(policy) == KChoice(2, "acceptance")
    finish(policy, 9, 1.4)
    assert choose(policy) == KChoice(2, "acceptance"), "evidence is of the present rung only"
    finish(policy, 1, 1.4)
    assert choose(policy) == KChoice(1, "acceptance")
    finish(policy, 30, 0.0)
    assert choose(policy) == KChoice(1, "acceptance"), "there is no lower rung"


def test_one_and_a_half_tokens_are_enough_to_stay() -> None:
    policy = Threshold()
    finish(policy, 10, 1.5)
    assert choose(policy) == KChoice(5, "plan")


def test_three_quarters_of_a_rung_s_k_step_up() -> None:
    policy = Threshold()
    for _ in range(2):
        finish(policy, 10, 0.0)
        choose(policy)
    finish(policy, 10, 0.74)
    assert choose(policy) == KChoice(1, "acceptance")
    finish(policy, 10, 0.75)
    assert choose(policy) == KChoice(2, "acceptance")
    finish(policy, 10, 1.5)
    assert choose(policy) == KChoice(5, "plan")
