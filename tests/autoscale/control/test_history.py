"""The history sums reports per second, keeps them for the stated time, and distinguishes plans by their settings."""

from __future__ import annotations

from autoscale.control.history import KEPT_S, History, PlanChange
from autoscale.control.priors import Counts, DraftClass
from autoscale.control.report import Observation
from engine.core.pacing import Prior, SpeculationPlan

PLAN = SpeculationPlan(version=1)
STEP = Observation(num_steps=1, num_emitted=2)


def seconds_of(history: History, since_s: float = 0.0, now_s: float = 100.0) -> list[tuple[int, int]]:
    """Time and emitted tokens of every second."""
    return [(each.time_s, each.observation.num_emitted) for each in history.view(since_s, PLAN, now_s).seconds]


def test_reports_of_one_second_add_up_over_engines() -> None:
    history = History()
    for engine_id, now_s in (("a", 10.1), ("b", 10.9), ("a", 11.0)):
        history.add(engine_id, STEP, PLAN, now_s)
    assert seconds_of(history) == [(10, 4), (11, 2)]


def test_a_clock_that_goes_back_adds_to_the_last_second() -> None:
    history = History()
    history.add("a", STEP, PLAN, 11.0)
    history.add("a", STEP, PLAN, 10.5)
    assert seconds_of(history) == [(11, 4)]


def test_a_report_without_steps_makes_no_second_but_counts_its_engine() -> None:
    history = History()
    history.add("a", Observation(), PLAN, 10.0)
    view = history.view(0.0, PLAN, 11.0)
    assert (view.seconds, view.num_engines, view.now_s) == ((), 1, 11.0)


def test_counts_for_priors_are_not_kept() -> None:
    history = History()
    counts = {DraftClass("ngram", "greedy"): Counts((1,), (1,))}
    history.add("a", Observation(num_steps=1, by_draft_class=counts), PLAN, 10.0)
    (second,) = history.view(0.0, PLAN, 11.0).seconds
    assert second.observation.by_draft_class == {}


def test_the_view_begins_with_the_second_of_the_given_time() -> None:
    history = History()
    for now_s in (10.0, 11.0, 12.0):
        history.add("a", STEP, PLAN, now_s)
    assert seconds_of(history, since_s=11.9) == [(11, 2), (12, 2)]


def test_seconds_and_engines_are_kept_for_ten_minutes() -> None:
    history = History()
    history.add("gone", STEP, PLAN, 0.0)
    for second in range(1, KEPT_S + 101):
        history.add("a", STEP, PLAN, float(second))
    now_s = KEPT_S + 100.0
    view = history.view(0.0, PLAN, now_s)
    assert view.num_engines == 1
    assert (view.seconds[0].time_s, view.seconds[-1].time_s) == (101, KEPT_S + 100)
    assert len(view.seconds) == KEPT_S


def test_plan_changes_are_kept_without_priors_and_without_the_first_plan() -> None:
    history = History()
    prior = Prior(method="ngram", workload="greedy", rates=(0.5,), weights=(1.0,))
    first, second = SpeculationPlan(version=1, priors=(prior,)), SpeculationPlan(version=2, max_k=2, priors=(prior,))
    for now_s, plan in ((10.0, first), (11.0, second), (12.0, second), (13.0, first)):
        history.add("a", Observation(), plan, now_s)
    view = history.view(0.0, second, 20.0)
    assert view.changes == (PlanChange(11.0, SpeculationPlan(version=2, max_k=2)), PlanChange(13.0, first))
    assert [change.plan.priors for change in view.changes] == [(), ()]
    assert view.plan.priors == ()
    assert [change.time_s for change in history.view(12.0, second, 20.0).changes] == [13.0]
