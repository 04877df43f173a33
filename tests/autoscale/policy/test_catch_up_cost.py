"""What the cost model learns from a step in which the draft reads exactly one committed token."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec import structs
from step_stats import make_step

from autoscale.policy.cost_model import BATCH_KNOTS, ROW_KNOTS, CostModel, CostTable
from engine.core.stats import StepStats


def drafting_model() -> CostModel:
    return CostModel(
        CostTable(
            tuple(0.010 for _ in ROW_KNOTS), tuple(0.001 for _ in BATCH_KNOTS), catch_up_s=0.0005, handoff_s=0.002,
            overhead_s=0.001,
        )
    )  # fmt: skip


def test_a_draft_that_reads_one_token_is_asked_and_costs_what_asking_costs() -> None:
    costs = drafting_model()
    assert costs.step_s(1, 0, 0, 0, 1) - costs.step_s(1, 0) == pytest.approx(0.002 + 0.0005)
    assert costs.step_s(1, 0, 1, 1, 0) - costs.step_s(1, 0) == pytest.approx(0.002 + 0.001)


def test_a_step_that_reads_one_token_teaches_the_draft_s_costs_and_not_the_plain_step_s() -> None:
    costs = drafting_model()
    step: StepStats = structs.replace(
        make_step([], 1, step_s=0.03), num_caught_up=1, draft_s=0.004, verify_s=0.01, sample_s=0.0
    )
    for _ in range(50):
        costs.observe(step)
    assert costs.overhead_s == 0.001
    assert costs.handoff_s == pytest.approx(0.03 - 0.01 - 0.004 - 0.001, rel=0.05)
    assert costs.catch_up_s > 0.0006
    plain = drafting_model()
    plain.observe(structs.replace(step, num_caught_up=0, draft_s=0.0))
    assert plain.overhead_s == pytest.approx(0.02)
    assert (plain.handoff_s, plain.catch_up_s) == (0.002, 0.0005)
    assert np.allclose(plain.table().pass_s, 0.001)


def test_a_draft_of_one_token_teaches_the_draft_s_costs_as_well() -> None:
    costs = drafting_model()
    costs.observe(structs.replace(make_step([(1, 1)], 0, step_s=0.03), draft_s=0.004, verify_s=0.01, sample_s=0.0))
    assert costs.overhead_s == 0.001
    assert costs.pass_s(1) > 0.0014, "four times as long as predicted may be a hiccup, so less than half is taken over"
    assert costs.handoff_s == pytest.approx(0.03 - 0.01 - 0.004 - 0.001)


def test_a_single_number_follows_the_mean_and_a_hiccup_counts_as_three_usual_ones() -> None:
    """The overhead of plain steps, in milliseconds. The usual residual starts as that of the first step."""
    costs = drafting_model()
    seen = []
    for overhead_s in (0.002, 0.102, 0.0):
        costs.observe(
            structs.replace(make_step([], 1, step_s=0.01 + overhead_s), verify_s=0.01, sample_s=0.0, draft_s=0.0)
        )
        seen.append(costs.overhead_s)
    # The first value; then half of a residual that is clipped from 100 to 3 ms; then a third of the way to 0.
    assert seen == pytest.approx([0.002, 0.002 + 0.003 / 2, 0.0035 * 2 / 3])


def test_the_usual_residual_grows_by_a_twentieth_of_at_most_two_limits() -> None:
    """After 1 ms and an outlier it is 1 + 0.05 * (2 * 3 - 1) = 1.25 ms, so the third residual is clipped to 3.75 ms."""
    costs = drafting_model()
    for overhead_s in (0.002, 0.102, 0.1):
        costs.observe(
            structs.replace(make_step([], 1, step_s=0.01 + overhead_s), verify_s=0.01, sample_s=0.0, draft_s=0.0)
        )
    assert costs.overhead_s == pytest.approx(0.0035 + 0.00375 / 3)
