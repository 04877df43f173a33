"""What the policy `goodput` assumes before its first step, and how fast a guess and a measurement are corrected."""

from __future__ import annotations

import pytest
from step_stats import make_step, step_stats
from switches import drafting

from autoscale.policy.cost_model import CostModel
from autoscale.policy.goodput import UNMEASURED, make_goodput
from autoscale.simulation.hardware import cpu_table
from engine.core.pacing import SpeculationPlan
from engine.core.request import Request
from engine.core.stats import RowOutcome
from engine.messages import SamplingParams, Submit

MAX_K = 8


def request_of(key: int) -> Request:
    submit = Submit(request_id=str(key), prompt=(1,), sampling=SamplingParams(temperature=0.0, max_tokens=10_000))
    return Request(submit=submit, key=key, stream_key=0, tokens=[1])


@pytest.mark.parametrize(
    ("method", "rates"),
    [
        ("none", [0.0, 0.0, 0.0, 0.0]),
        ("ngram", [0.4, 0.6, 0.7, 0.7]),
        ("draft_model", [0.75] * 4),
        ("eagle", [0.75] * 4),
        ("medusa", [0.75] * 4),
    ],
)
def test_acceptance_rates_before_the_first_observation(method: str, rates: list[float]) -> None:
    assert make_goodput(method, 4).acceptance.by_position().tolist() == rates


def test_without_a_measurement_a_step_takes_ten_milliseconds_and_drafting_nothing() -> None:
    cost = make_goodput("draft_model", MAX_K).cost
    assert [cost.step_s(rows, 1000) for rows in (1, 64, 4096)] == [0.01] * 3
    assert cost.draft_s(32, 8, 100) == 0.0
    assert cost.overhead_s == 0.0


def test_the_first_steps_are_a_probe_of_acceptance() -> None:
    """Two tokens for one request in eight, and for two at least, before all of them read their prompts into a draft."""
    pacer = make_goodput("draft_model", MAX_K, cpu_table())
    choices = pacer.choose(SpeculationPlan(max_k=MAX_K), [request_of(key) for key in range(32)], 0)
    assert [(choice.k, choice.reason) for choice in choices] == [(2, "probe")] * 4 + [(0, "acceptance")] * 28


def test_without_costs_a_step_drafts_as_much_as_the_plan_allows() -> None:
    pacer = drafting(make_goodput("draft_model", MAX_K))
    choices = pacer.choose(SpeculationPlan(max_k=MAX_K), [request_of(1), request_of(2)], 0)
    assert [choice.k for choice in choices] == [MAX_K, MAX_K]


def test_a_guess_is_corrected_faster_than_a_measured_table() -> None:
    """Each engine's model after one step is that of its table with the right uncertainty."""
    step = make_step([(4, 2)], 0, step_s=0.2)
    for table, measured in ((UNMEASURED, False), (cpu_table(), True)):
        pacer, right, wrong = (
            make_goodput("draft_model", MAX_K, table),
            CostModel(table, measured=measured),
            CostModel(table, measured=not measured),
        )
        for each in (pacer, right, wrong):
            each.observe(step)
        assert pacer.cost.table() == right.table() != wrong.table()


@pytest.mark.parametrize(
    ("method", "lookup", "is_asked"),
    [("eagle", True, True), ("draft_model", True, True), ("eagle", False, False), ("ngram", True, False)],
)
def test_lookup_is_asked_before_a_model_only(method: str, lookup: bool, is_asked: bool) -> None:
    assert (make_goodput(method, MAX_K, lookup=lookup).lookup is not None) is is_asked


def test_the_depth_that_was_found_is_kept_between_wide_searches() -> None:
    """A choice holds for 8 steps. The next three compare the depth found before with one neighbour."""
    pacer = drafting(make_goodput("draft_model", MAX_K, cpu_table()))
    pacer.acceptance.observe([RowOutcome(1, MAX_K, MAX_K, 10)] * 300)
    batch = [request_of(1)]
    ks = [pacer.choose(SpeculationPlan(max_k=MAX_K), batch, 0)[0].k for _ in range(32)]
    assert ks == [MAX_K] * 32


def test_the_clock_is_the_sum_of_step_durations() -> None:
    """Drafting never pays here, so it is switched off after a quarter of a second of steps."""
    pacer = drafting(make_goodput("draft_model", MAX_K, cpu_table()))
    pacer.acceptance.observe([RowOutcome(1, 4, 0, 10)] * 300)
    on = []
    for _ in range(40):
        pacer.choose(SpeculationPlan(max_k=MAX_K), [request_of(1)], 0)
        on.append(pacer.switch.is_on)
        pacer.observe(step_stats(step_s=0.03125))
    assert on == [True] * on.index(False) + [False] * (40 - on.index(False))
    assert on.index(False) == 8


def test_a_choice_is_made_anew_after_eight_steps() -> None:
    pacer, batch = drafting(make_goodput("draft_model", MAX_K, cpu_table())), [request_of(1)]
    plan = SpeculationPlan(max_k=MAX_K)
    choices = [pacer.choose(plan, batch, 0) for _ in range(24)]
    first_of = [next(i for i, other in enumerate(choices) if other is each) for each in choices]
    assert first_of == [0] * 8 + [8] * 8 + [16] * 8


@pytest.mark.parametrize(("of_plan", "of_engine", "k"), [(0, 8, 0), (1, 8, 1), (8, 1, 1), (8, 0, 0), (3, 8, 3)])
def test_the_smaller_bound_of_plan_and_engine_holds(of_plan: int, of_engine: int, k: int) -> None:
    pacer = drafting(make_goodput("draft_model", of_engine))
    (choice,) = pacer.choose(SpeculationPlan(max_k=of_plan), [request_of(1)], 0)
    assert (choice.k, choice.reason) == (k, "plan" if k else "off")
    assert pacer.choose(SpeculationPlan(max_k=of_plan), [], 0) == []
