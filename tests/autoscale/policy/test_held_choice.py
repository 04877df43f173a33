"""A held choice is used for exactly its steps, and only for the batch and plan that it was made for."""

from __future__ import annotations

from autoscale.policy.held_choice import Chosen, HeldChoice
from engine.core.pacing import KChoice, SpeculationPlan
from engine.core.request import Request
from engine.messages import WORKLOADS, SamplingParams, Submit

PLAN = SpeculationPlan()
CHOSEN = Chosen([KChoice(2, "plan")], None)


def requests(*temperatures: float) -> list[Request]:
    submits = [Submit(request_id="r", prompt=(1,), sampling=SamplingParams(temperature=t)) for t in temperatures]
    return [Request(submit=submit, key=i, stream_key=0, tokens=[1]) for i, submit in enumerate(submits)]


def held(num_steps: int, by_workload: list[KChoice] | None = None) -> HeldChoice:
    choice = HeldChoice()
    choice.hold(CHOSEN, PLAN, [0], 5, num_steps=num_steps, by_workload=by_workload)
    return choice


def test_nothing_holds_at_first() -> None:
    assert HeldChoice().take(PLAN, requests(0.0), [0], 0) is None


def test_it_holds_for_exactly_its_steps() -> None:
    choice = held(2)
    taken = [choice.take(PLAN, requests(0.0), [0], 5) for _ in range(3)]
    assert taken == [CHOSEN, CHOSEN, None]


def test_it_holds_for_its_batch_prompts_and_plan_only() -> None:
    choice = held(9)
    assert choice.take(PLAN, requests(0.0, 0.0), [0, 1], 5) is None
    assert choice.take(PLAN, requests(0.0), [0], 6) is None
    assert choice.take(SpeculationPlan(), requests(0.0), [0], 5) is None, "an equal plan may have other priors"
    assert choice.take(PLAN, requests(0.0), [0], 5) is CHOSEN


def test_a_choice_by_workload_holds_for_any_batch() -> None:
    by_workload = [KChoice(0, "acceptance", (index,)) for index in range(len(WORKLOADS))]
    choice = held(2, by_workload)
    taken = choice.take(PLAN, requests(0.0, 1.0, 0.5), [7, 8, 9], 0)
    assert taken is not None
    assert list(taken.choices) == [by_workload[0], by_workload[2], by_workload[1]]
    assert taken.expected is None
    assert choice.take(PLAN, requests(0.0), [0], 5) is CHOSEN
    assert choice.take(PLAN, requests(0.0), [0], 5) is None
