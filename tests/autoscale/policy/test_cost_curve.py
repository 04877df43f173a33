"""Curves: never decreasing, corrected in proportion to their uncertainty, robust to outliers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.policy.cost_curve import Curve, Curves, Points
from autoscale.policy.cost_model import ROW_KNOTS
from autoscale.simulation.hardware import cpu_table


@given(st.lists(st.tuples(st.floats(1, 3000), st.floats(0, 1), st.floats(0, 1e5)), max_size=60), st.booleans())
def test_a_larger_job_is_never_predicted_to_be_cheaper(
    lessons: list[tuple[float, float, float]], measured: bool
) -> None:
    curve = Curves([Points(knots=ROW_KNOTS, values=cpu_table().verify_s)], measured=measured)[0]
    for x, seen_s, context in lessons:
        curve.learn(x, seen_s, num_units=context)
    assert 0 <= curve.rate <= 1
    values = [curve.at(x) for x in (1, 1.5, 3, 7, 20, 33, 100, 700, 2500)]
    assert all(value >= 0 for value in values)
    assert values == sorted(values)
    assert np.all(np.diff(curve.added(5, 90)) >= 0)


KNOTS, VALUES = (1, 10, 100), (0.010, 0.100, 1.000)


def steep_curve(*, measured: bool) -> Curve:
    """Values so far apart that no correction changes their order."""
    return Curves([Points(knots=KNOTS, values=VALUES)], measured=measured)[0]


@pytest.mark.parametrize(
    ("measured", "common", "single"),
    [(True, 0.3**2 + 0.03**2, 0.2**2 + 0.0015**2), (False, 1.0**2 + 0.03**2, 0.5**2 + 0.0015**2)],
    ids=["measured", "guessed"],
)
def test_the_first_observation_moves_each_value_by_its_share_of_the_uncertainty(
    measured: bool, common: float, single: float
) -> None:
    """A Kalman step by hand, in relative variances: of all values together, of one alone, of the observation.

    The observation is 20 % above the value. Its noise is 10 % of the larger of both, so 12 % of the value.
    """
    curve = steep_curve(measured=measured)
    curve.learn(10, 0.120)
    total = common + single + 0.12**2
    assert curve.at(10) == pytest.approx(0.100 * (1 + 0.2 * (common + single) / total), rel=1e-6)
    assert curve.at(1) == pytest.approx(0.010 * (1 + 0.2 * common / total), rel=1e-6)
    assert curve.at(100) == pytest.approx(1.000 * (1 + 0.2 * common / total), rel=1e-6)


def test_the_noise_of_observations_is_learned() -> None:
    """Observations that scatter by a third make the next one count less than after observations that agree."""
    moved = []
    for scatter in (0.0, 0.3):
        curve = steep_curve(measured=True)
        for number in range(100):
            curve.learn(10, 0.100 * (1 + scatter * (-1) ** number))
        before = curve.at(10)
        curve.learn(10, 1.04 * before)
        moved.append(curve.at(10) / before - 1)
    assert moved[0] > 0.02
    assert 0 < moved[1] < 0.5 * moved[0]


def test_an_observation_that_is_far_off_is_clipped() -> None:
    """Three standard deviations of an expectation and its observation, the latter being capped at four times."""
    curve = steep_curve(measured=True)
    curve.learn(10, 100.0)
    uncertainty = 0.3**2 + 0.03**2 + 0.2**2 + 0.0015**2
    deviation = (uncertainty + 0.4**2) ** 0.5
    assert curve.at(10) == pytest.approx(0.100 * (1 + 3 * deviation * uncertainty / deviation**2), rel=1e-6)


def test_a_guessed_rate_is_learned_and_a_measured_one_hardly_moves() -> None:
    learned = []
    for measured in (True, False):
        points = Points(knots=KNOTS, values=VALUES, rate_sd=1e-5)
        curve = Curves([points], measured=measured)[0]
        curve.learn(10, 0.110, num_units=10_000)
        learned.append(curve.rate)
    assert 0 <= learned[0] < 2e-8
    assert learned[1] > 2e-7


def test_several_jobs_in_one_observation_share_it() -> None:
    one, four = steep_curve(measured=True), steep_curve(measured=True)
    one.learn(10, 0.120)
    four.learn(10, 4 * 0.120, times=4)
    assert four.at(10) == pytest.approx(one.at(10))


def test_between_and_beyond_knots_the_curve_is_straight() -> None:
    curve = steep_curve(measured=True)
    assert curve.at(5.5) == pytest.approx(0.055)
    assert curve.at(200) == pytest.approx(2.0)
    assert curve.added(10, 2) == pytest.approx([0.0, 0.010, 0.020])


def test_values_and_knots_must_match() -> None:
    with pytest.raises(ValueError, match="2 values for 3 knots"):
        Curves([Points(knots=KNOTS, values=(1.0, 2.0))])
