"""How far one observation moves a curve: the Kalman gain, written out for curves of two knots."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec import structs
from step_stats import make_step

from autoscale.policy.cost_curve import Curve, Curves, Points
from autoscale.policy.cost_model import BATCH_KNOTS, ROW_KNOTS, CostModel, CostTable
from engine.core.stats import StepStats

COMMON_DRIFT, OWN_DRIFT, FIRST_NOISE = 0.03, 0.0015, 0.1
MEASURED, GUESSED = (0.3, 0.2), (1.0, 0.5)
"""Relative doubt at the start: of the level of all values, and of each value alone."""


def two_knots(*, measured: bool = True, **options: float) -> Curve:
    return Curves([Points(knots=(1, 2), values=(1.0, 2.0), **options)], measured=measured)[0]


def gains(level: float, own: float, noise_s: float) -> tuple[float, float]:
    """Share of a residual at knot 1 that the values at knots 1 and 2 take over."""
    common = level**2 + COMMON_DRIFT**2
    variance = common + own**2 + OWN_DRIFT**2
    return variance / (variance + noise_s**2), 2 * common / (variance + noise_s**2)


@pytest.mark.parametrize(("measured", "doubts"), [(True, MEASURED), (False, GUESSED)], ids=["measured", "guessed"])
def test_the_first_observation_is_weighed_against_the_doubt_at_the_start(
    measured: bool, doubts: tuple[float, float]
) -> None:
    curve = two_knots(measured=measured)
    curve.learn(1, 1.1)
    here, there = gains(*doubts, noise_s=FIRST_NOISE * 1.1)
    assert curve.values == pytest.approx([1 + 0.1 * here, 2 + 0.1 * there], rel=1e-9)


def test_an_observation_below_is_weighed_by_what_was_expected() -> None:
    curve = two_knots()
    curve.learn(1, 0.9)
    here, there = gains(*MEASURED, noise_s=FIRST_NOISE)
    assert curve.values == pytest.approx([1 - 0.1 * here, 2 - 0.1 * there], rel=1e-9)


def test_a_hiccup_counts_as_three_standard_deviations() -> None:
    """A step that took 50 times as long: the noise is taken of four times what was expected."""
    curve = two_knots()
    curve.learn(1, 50.0)
    here, there = gains(*MEASURED, noise_s=FIRST_NOISE * 4)
    deviation = (0.3**2 + 0.2**2 + COMMON_DRIFT**2 + OWN_DRIFT**2 + (FIRST_NOISE * 4) ** 2) ** 0.5
    assert curve.values == pytest.approx([1 + 3 * deviation * here, 2 + 3 * deviation * there], rel=1e-9)


def test_the_noise_of_observations_is_learnt() -> None:
    """After steps that vary by 30 % a deviation moves less than after steps that all last alike."""
    moved = []
    for spread in (0.0, 0.3):
        curve = two_knots()
        for i in range(200):
            curve.learn(1, 1.0 + (spread if i % 2 else -spread))
        before = curve.values[0]
        curve.learn(1, before + 0.05)
        moved.append((curve.values[0] - before) / 0.05)
    assert moved[0] == pytest.approx(0.76, abs=0.03), "noise is at its least, 2 %"
    assert moved[1] == pytest.approx(0.11, abs=0.03), "noise is about 30 %"


def test_a_value_never_seen_moves_with_the_level_and_keeps_its_own_doubt() -> None:
    """A lasting slow-down by half at one knot is laid to the level and to the knot in the shares of their doubts."""
    curve = two_knots()
    for _ in range(100):
        curve.learn(1, 1.5)
    assert curve.values == pytest.approx([1.5, 2 + 2 * 0.5 * 0.3**2 / (0.3**2 + 0.2**2)], rel=0.01)
    curve.learn(2, 2.5)
    assert curve.values[1] == pytest.approx(2.5, rel=0.05), "its own doubt is still that of the start"
    assert curve.values[0] == pytest.approx(1.5, rel=0.1)


def test_between_knots_and_beyond_the_last_one_it_is_a_line() -> None:
    curve = two_knots()
    assert [curve.at(x) for x in (1, 1.5, 2, 3)] == pytest.approx([1.0, 1.5, 2.0, 3.0])
    assert curve.added(1, 3).tolist() == pytest.approx([0.0, 1.0, 1.0, 1.0]), "within the knots"


def test_the_order_of_values_is_kept() -> None:
    curve = Curves([Points(knots=(1, 2, 3), values=(1.0, 1.01, 1.02))])[0]
    for _ in range(20):
        curve.learn(2, 2.0)
    assert curve.values == sorted(curve.values)
    for _ in range(20):
        curve.learn(2, 0.5)
    assert curve.values == sorted(curve.values)
    assert Curves([Points(knots=(1, 2), values=(2.0, 1.0))])[0].values == [2.0, 2.0]


def test_a_rate_is_learnt_where_it_is_a_guess_and_never_runs_away() -> None:
    guess = {"rate_doubt": 0.001, "most_rate": 0.0015}
    guessed, measured = two_knots(measured=False, **guess), two_knots(**guess)
    for units in (0, 100) * 30:
        for curve in (guessed, measured):
            curve.learn(1, 1.0 + 0.001 * units, num_units=units)
    assert guessed.rate == pytest.approx(0.001, rel=0.1)
    assert measured.rate < 0.0005, "a measured rate of zero is hardly in doubt"
    for units in (0, 100) * 30:
        guessed.learn(1, 1.0 + 0.01 * units, num_units=units)
    assert guessed.rate == 0.0015


def test_several_jobs_share_their_time() -> None:
    curve = two_knots()
    for _ in range(50):
        curve.learn(1, 3.3, times=3)
    assert curve.values[0] == pytest.approx(1.1, rel=0.01)


def test_values_and_knots_must_be_as_many() -> None:
    with pytest.raises(ValueError, match="1 values for 2 knots"):
        Curves([Points(knots=(1, 2), values=(1.0,))])


# The step that reads one token.


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
    """The overhead of plain steps, in milliseconds: the usual residual is that of the first step at first."""
    costs = drafting_model()
    seen = []
    for overhead_s in (0.002, 0.102, 0.0):
        costs.observe(
            structs.replace(make_step([], 1, step_s=0.01 + overhead_s), verify_s=0.01, sample_s=0.0, draft_s=0.0)
        )
        seen.append(costs.overhead_s)
    # First all of it; then half of 3 ms in place of 100; then a third of the way back to 0.
    assert seen == pytest.approx([0.002, 0.002 + 0.003 / 2, 0.0035 * 2 / 3])
