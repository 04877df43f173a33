"""Curves: never decreasing, corrected in proportion to their uncertainty, robust to outliers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.policy.cost_curve import FIRST_NOISE, Curve, Curves, Points
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


class Textbook:
    """The same Kalman filter in matrices (Kalman 1960), for one curve: prediction, gain, update, then the order."""

    def __init__(self, *, measured: bool, rate: float, rate_sd: float, most_rate: float) -> None:
        smallest = 1e-6 if measured else 1e-3
        common, single = (0.3, 0.2) if measured else (1.0, 0.5)
        self.x = np.array([*VALUES, rate])
        self.least = np.array([smallest] * len(VALUES) + [rate_sd / 100])
        self.most_rate = most_rate
        size = np.maximum(self.x, self.least)
        own = [single * max(value, smallest) for value in VALUES]
        own.append(max(single * rate, 0.0 if measured else rate_sd))
        self.p = np.outer(common * size, common * size) + np.diag(np.square(own))
        self.noise = 0.1

    def learn(self, x: float, seconds: float, num_units: float, times: float) -> None:
        low = 0 if x < 10 else 1
        share = min(1.0, max(0.0, (x - KNOTS[low]) / (KNOTS[low + 1] - KNOTS[low])))
        h = np.zeros(4)
        h[low], h[low + 1], h[3] = times * (1 - share), times * share, num_units
        size = np.maximum(self.x, self.least)
        self.p = self.p + np.outer(0.03 * size, 0.03 * size) + np.diag((0.0015 * size) ** 2)
        expected = h @ self.x
        scale = max(expected, min(seconds, 4 * expected), 1e-6)
        variance = h @ self.p @ h + (self.noise * scale) ** 2
        residual = np.clip(seconds - expected, -3 * variance**0.5, 3 * variance**0.5)
        gain = self.p @ h / variance
        self.x = np.maximum(self.x + gain * residual, 0.0)
        self.p = self.p - np.outer(gain, h @ self.p)
        self.noise = max(0.02, 0.95 * self.noise + 0.05 * min(0.5, abs(residual) / scale))
        anchor = low if share < 0.5 else low + 1
        for index in range(anchor + 1, 3):
            self.x[index] = max(self.x[index], self.x[index - 1])
        for index in range(anchor - 1, -1, -1):
            self.x[index] = min(self.x[index], self.x[index + 1])
        self.x[3] = min(self.x[3], self.most_rate)


@pytest.mark.parametrize("measured", [True, False], ids=["measured", "guessed"])
@pytest.mark.parametrize("scatter", [0.02, 2.0])
def test_the_curve_is_a_kalman_filter(measured: bool, scatter: float) -> None:
    """Over 200 random lessons; the scatter of 2 clips residuals and disturbs the order of the values."""
    options = {"rate": 1e-6, "rate_sd": 1e-5, "most_rate": 2e-5}
    twin = Textbook(measured=measured, **options)
    curve = Curves([Points(knots=KNOTS, values=VALUES, **options)], measured=measured)[0]
    rng = np.random.default_rng(1)
    for _ in range(200):
        x, times = float(rng.choice([1, 3, 10, 40, 60, 100, 150])), float(rng.integers(1, 4))
        num_units = float(rng.choice([0, 100, 5000]))
        seconds = times * float(np.interp(x, KNOTS, VALUES)) * float(np.exp(scatter * rng.normal()))
        curve.learn(x, seconds, num_units=num_units, times=times)
        twin.learn(x, seconds, num_units, times)
        assert [*curve.values, curve.rate] == pytest.approx(list(twin.x), rel=1e-6, abs=1e-12)


def test_two_curves_drift_together() -> None:
    """One that is slower than expected makes the other one be expected slower, by the common part of the variance."""
    curves = Curves([Points(knots=KNOTS, values=VALUES), Points(knots=KNOTS, values=VALUES)])
    curves[0].learn(10, 0.120)
    common, single = 0.3**2 + 0.03**2, 0.2**2 + 0.0015**2
    factor = 1 + 0.2 * common / (common + single + 0.12**2)
    assert curves[1].values == pytest.approx([factor * value for value in VALUES], rel=1e-6)


def test_values_that_are_given_in_disorder_are_raised() -> None:
    curve = Curves([Points(knots=KNOTS, values=(0.2, 0.1, 1.0))])[0]
    assert curve.values == [0.2, 0.2, 1.0]


def test_added_rows_cost_nothing_beyond_the_last_knot() -> None:
    assert steep_curve(measured=True).added(99, 3) == pytest.approx([0.0, 0.01, 0.01, 0.01])


@pytest.mark.parametrize(("x", "measured_s", "anchor"), [(7, 0.005, 1), (5, 0.02, 0), (6, 0.005, 1)])
def test_the_knot_next_to_an_observation_keeps_what_it_has_learned(x: int, measured_s: float, anchor: int) -> None:
    """Two equal values: the nearer one moves further, and the other one follows it where their order would break."""
    points = Points(knots=(4, 8), values=(0.01, 0.01))
    curve, twin = Curves((points,))[0], Curves((points,))
    share = (x - 4) / 4
    twin.learn(np.array([1 - share, share, 0.0]), measured_s, FIRST_NOISE)
    curve.learn(x, measured_s)
    assert curve.values == [twin.state[anchor]] * 2
