"""Reports are sums of steps, and sums of reports are sums of their steps."""

from __future__ import annotations

from dataclasses import fields

from step_stats import make_step, step_stats

from autoscale.control.priors import Counts, DraftClass
from autoscale.control.report import Aggregator, Observation, combine
from engine.core.pacing import Prediction
from engine.core.stats import RowOutcome

STEP = step_stats(
    num_decodes=2,
    num_prefill_tokens=3,
    num_drafted=5,
    num_accepted=3,
    num_emitted=4,
    num_waiting=6,
    accepted_by_position=(1, 1, 1, 0),
    drafted_by_position=(1, 1, 1, 1),
    k_by_reason={"plan": 1, "acceptance": 1},
    outcomes=(RowOutcome(1, 5, 3, 10),),
    schedule_s=0.5,
    draft_s=0.25,
    handoff_s=0.125,
    verify_s=2.0,
    sample_s=0.0625,
    step_s=4.0,
)
ONE = Observation(
    num_steps=1,
    num_decodes=2,
    num_prefill_tokens=3,
    num_drafted=5,
    num_accepted=3,
    num_emitted=4,
    num_waiting=6,
    accepted_by_position=(1, 1, 1, 0),
    drafted_by_position=(1, 1, 1, 1),
    k_by_reason={"plan": 1, "acceptance": 1},
    schedule_s=0.5,
    draft_s=0.25,
    handoff_s=0.125,
    verify_s=2.0,
    sample_s=0.0625,
    step_s=4.0,
    plain_s=3.0,
    by_draft_class={DraftClass("eagle", "greedy"): Counts((1, 1, 1, 1), (1, 1, 1, 0))},
)


def test_a_report_of_one_step_has_its_figures() -> None:
    aggregator = Aggregator("eagle")
    aggregator.add(STEP, Prediction(plain_s=3.0))
    assert aggregator.take() == ONE


def test_steps_add_up_and_waiting_requests_are_those_of_the_last_step() -> None:
    aggregator = Aggregator()
    aggregator.add(STEP, Prediction(plain_s=3.0))
    aggregator.add(step_stats(num_waiting=1, accepted_by_position=(1,), drafted_by_position=(2,)), Prediction())
    found = aggregator.take()
    assert (found.num_steps, found.num_decodes, found.num_drafted, found.num_accepted) == (2, 3, 5, 3)
    assert (found.num_emitted, found.num_waiting, found.plain_s) == (5, 1, 3.0)
    assert found.accepted_by_position == (2, 1, 1, 0)
    assert found.drafted_by_position == (3, 1, 1, 1)
    assert found.k_by_reason == {"plan": 1, "acceptance": 1}
    assert aggregator.take() == Observation()


def test_drafts_are_counted_by_source_and_workload() -> None:
    aggregator = Aggregator("eagle")
    outcomes = (
        RowOutcome(1, 2, 2, 10),
        RowOutcome(2, 3, 0, 10),
        RowOutcome(3, 2, 1, 10, "hot"),
        RowOutcome(4, 4, 1, 10, source="lookup"),
        RowOutcome(5, 4, 4, 10, source="grammar"),
    )
    aggregator.add(step_stats(outcomes=outcomes), Prediction())
    assert aggregator.take().by_draft_class == {
        DraftClass("eagle", "greedy"): Counts((2, 1), (1, 1)),
        DraftClass("eagle", "hot"): Counts((1, 1), (1, 0)),
        DraftClass("ngram", "greedy"): Counts((1, 1), (1, 0)),
    }


def test_reports_add_up_field_by_field() -> None:
    both = combine((ONE, ONE))
    assert both.num_waiting == 6, "not a sum"
    assert both.k_by_reason == {"plan": 2, "acceptance": 2}
    assert both.accepted_by_position == (2, 2, 2, 0)
    assert both.drafted_by_position == (2, 2, 2, 2)
    assert both.by_draft_class == {DraftClass("eagle", "greedy"): Counts((2, 2, 2, 2), (2, 2, 2, 0))}
    others = {"num_waiting", "k_by_reason", "accepted_by_position", "drafted_by_position", "by_draft_class"}
    for field in fields(Observation):
        if field.name not in others:
            assert getattr(both, field.name) == 2 * getattr(ONE, field.name) > 0, field.name


def test_a_report_without_steps_is_empty() -> None:
    assert Aggregator().take() == Observation()
    aggregator = Aggregator()
    aggregator.add(make_step([], 1), Prediction())
    assert aggregator.take() != Observation()
