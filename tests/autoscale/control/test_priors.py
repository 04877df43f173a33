"""Acceptance is pooled by draft class, reaches new requests on every engine, and survives a new controller."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from step_stats import make_step
from switches import drafting

from autoscale.control.controller import Controller
from autoscale.control.priors import Counts, DraftClass, PriorPool
from autoscale.control.report import Aggregator, Observation
from autoscale.policy.acceptance_rate import Acceptance
from autoscale.policy.goodput import make_goodput
from autoscale.simulation.hardware import cpu_table
from engine.core.pacing import Prediction, Prior, SpeculationPlan
from engine.core.request import Request
from engine.core.stats import RowOutcome
from engine.messages import WORKLOADS, SamplingParams, Submit, WorkloadClass

GREEDY = DraftClass("ngram", "greedy")


def seen(draft_class: DraftClass, reached: int, accepted: int) -> Observation:
    return Observation(num_steps=1, by_draft_class={draft_class: Counts((reached,), (accepted,))})


def prior_of(plan: SpeculationPlan, draft_class: DraftClass) -> Prior:
    (found,) = [p for p in plan.priors if (p.method, p.workload) == (draft_class.method, draft_class.workload)]
    return found


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5), st.sampled_from(WORKLOADS)), max_size=40),
    st.integers(0, 40),
)
def test_counts_of_any_portions_are_those_of_the_steps(drafts: list[tuple[int, int, WorkloadClass]], cut: int) -> None:
    outcomes = [RowOutcome(key, k, min(a, k), 9, workload) for key, (k, a, workload) in enumerate(drafts)]
    aggregator = Aggregator("ngram")
    total: dict[DraftClass, Counts] = {}
    for part in (outcomes[:cut], outcomes[cut:]):
        aggregator.add(structs.replace(make_step([], 1), outcomes=tuple(part)), Prediction())
        for draft_class, counts in aggregator.take().by_draft_class.items():
            total[draft_class] = total.get(draft_class, Counts()) + counts
    for workload in WORKLOADS:
        mine = [o for o in outcomes if o.workload == workload]
        counts = total.get(DraftClass("ngram", workload), Counts())
        assert sum(counts.accepted) == sum(o.num_accepted for o in mine)
        assert sum(counts.reached) == sum(min(o.num_accepted + 1, o.num_drafted) for o in mine)


def test_engines_are_pooled_and_classes_are_kept_apart() -> None:
    controller = Controller(SpeculationPlan())
    hot = DraftClass("ngram", "hot")
    controller.report(
        "a", Observation(num_steps=1, by_draft_class={GREEDY: Counts((300,), (270,)), hot: Counts((300,), (30,))})
    )
    controller._pooled_s = 0.0
    plan = controller.report("b", seen(GREEDY, 300, 210))
    assert prior_of(plan, GREEDY).rates[0] == pytest.approx(0.8, abs=0.03)
    assert prior_of(plan, hot).rates[0] == pytest.approx(0.1, abs=0.03)
    unseen = prior_of(plan, DraftClass("ngram", "structured"))
    assert 0.3 < unseen.rates[0] < 0.8, "a class without observations starts from the others"
    assert unseen.weights[0] < 10


def test_priors_make_no_other_plan_and_no_other_version() -> None:
    controller = Controller(SpeculationPlan(version=3))
    plan = controller.report("a", seen(GREEDY, 10, 9))
    assert plan.priors
    assert plan == SpeculationPlan(version=3)


def test_a_new_controller_continues_from_the_priors_of_an_engine() -> None:
    first = Controller(SpeculationPlan())
    plan = first.report("a", seen(GREEDY, 500, 450))
    again = Controller(SpeculationPlan()).report("a", Observation(), plan)
    assert prior_of(again, GREEDY).rates == pytest.approx(prior_of(plan, GREEDY).rates, abs=0.02)
    assert prior_of(again, GREEDY).weights[0] > 0.5 * prior_of(plan, GREEDY).weights[0]


def test_a_new_engine_starts_from_the_pool_and_follows_its_observations_later() -> None:
    pool = PriorPool()
    pool.add({GREEDY: Counts((900, 400), (450, 100))})
    acceptance = Acceptance(4, prior=(0.9,))
    acceptance.adopt(pool.priors())
    adopted = acceptance.by_position("greedy")
    assert adopted[:2] == pytest.approx([0.5, 0.25], abs=0.03)
    assert adopted[3] == pytest.approx(0.9), "nothing is known of deeper positions"
    for _ in range(300):
        acceptance.observe([RowOutcome(1, 2, 2, 10)])
    assert acceptance.by_position("greedy")[0] > 0.9


def test_new_requests_take_k_from_the_priors_of_the_plan() -> None:
    def request(key: int) -> Request:
        submit = Submit(request_id="r", prompt=(1,), sampling=SamplingParams(temperature=0.0, max_tokens=100))
        return Request(submit=submit, key=key, stream_key=0, tokens=[1])

    def first_k(rate: float) -> int:
        pacer = drafting(make_goodput("draft_model", 8, cpu_table()))
        prior = Prior(method="draft_model", workload="greedy", rates=(rate,) * 8, weights=(500.0,) * 8)
        (choice,) = pacer.choose(SpeculationPlan(max_k=8, priors=(prior,)), [request(1)], 0)
        return choice.k

    assert first_k(0.05) == 0
    assert first_k(0.5) < first_k(0.95)


def test_priors_of_another_method_are_ignored() -> None:
    pacer = make_goodput("ngram", 4, cpu_table())
    before = pacer.acceptance.by_position("greedy")
    prior = Prior(method="draft_model", workload="greedy", rates=(0.1,) * 4, weights=(500.0,) * 4)
    submit = Submit(request_id="r", prompt=(1,), sampling=SamplingParams())
    pacer.choose(
        SpeculationPlan(max_k=4, priors=(prior,)), [Request(submit=submit, key=1, stream_key=0, tokens=[1])], 0
    )
    assert np.array_equal(pacer.acceptance.by_position("greedy"), before)


def test_a_prior_by_hand() -> None:
    """A class with two observations: its own, and the mean of the others, which counts as four at most."""
    pool = PriorPool()
    assert pool.is_empty
    pool.add({GREEDY: Counts((2,), (1,)), DraftClass("ngram", "hot"): Counts((10,), (9,))})
    assert not pool.is_empty
    greedy, *_ = pool.priors()
    assert (greedy.method, greedy.workload) == ("ngram", "greedy")
    assert greedy.weights == (2 + 4,)
    assert greedy.rates[0] == pytest.approx((1 + 4 * 0.9) / 6)
    assert {prior.workload for prior in pool.priors()} == set(WORKLOADS)


def test_other_methods_do_not_count() -> None:
    pool = PriorPool()
    pool.add({GREEDY: Counts((2,), (1,)), DraftClass("eagle", "hot"): Counts((10,), (9,))})
    greedy = pool.priors()[0]
    assert (greedy.rates, greedy.weights) == ((0.5,), (2,))


def test_counts_decay_by_observation() -> None:
    pool = PriorPool()
    pool.add({GREEDY: Counts((1000,), (1000,))})
    pool.add({GREEDY: Counts((1000,), (0,))})
    keep = 0.999**1000
    assert pool.priors()[0].weights[0] == pytest.approx(keep * 1000 + 1000)
    assert pool.priors()[0].rates[0] == pytest.approx(keep / (1 + keep))


def test_counts_of_different_length_add_up() -> None:
    assert Counts((5, 3), (4, 1)) + Counts((2,), (1,)) == Counts((7, 3), (5, 1))
    assert Counts() + Counts((2,), (1,)) == Counts((2,), (1,))


def test_priors_longer_than_max_k_fill_its_positions_and_shorter_ones_leave_the_rest() -> None:
    acceptance = Acceptance(2, [0.5])
    acceptance.adopt([Prior(method="draft_model", workload="hot", rates=(0.9, 0.8, 0.7), weights=(100.0,) * 3)])
    assert acceptance.by_position("hot").tolist() == pytest.approx([0.9, 0.8])
    assert acceptance.by_position("cool").tolist() == [0.5, 0.5]
    acceptance = Acceptance(3, [0.5])
    acceptance.adopt([Prior(method="draft_model", workload="hot", rates=(0.9,), weights=(2.0,))])
    # A weight of 2 is half of PRIOR_STRENGTH, so the rate is the mean of 0.9 and 0.5.
    assert acceptance.by_position("hot").tolist() == pytest.approx([0.7, 0.5, 0.5])
