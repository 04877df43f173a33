"""Costs as functions of a size, learned from observations: a Kalman filter over their values at fixed knots.

    cost(x, n) = line through (knot, value) at x  +  rate * n

Owns the values, their covariance, and their order: a larger job is never predicted to be cheaper. The filter assumes
that between two observations all values drift together by much (a busy neighbour, a slower clock) and each value alone
by little. So one step that is slower than predicted moves all curves, while steps of different sizes show the slope.
The slope decides whether a drafted row pays. Seconds in, seconds out; knows nothing of steps or drafts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

COMMON_DRIFT, SINGLE_DRIFT = 0.03, 0.0015
"""Relative standard deviations of the drift per observation: of all values together, and of each value alone."""
COMMON_SD, SINGLE_SD = 0.3, 0.2
"""Relative standard deviations at the start where values were measured, together and alone. The machine may be slower
than it was then, and a busy machine times badly."""
GUESSED_COMMON_SD, GUESSED_SINGLE_SD = 1.0, 0.5
"""Relative standard deviations at the start where values are a guess, together and alone."""
LEAST_NOISE, FIRST_NOISE, MOST_NOISE = 0.02, 0.1, 0.5
"""Relative standard deviation of an observation: lower bound, first value, and largest error it learns from."""
NOISE_RATE = 0.05
"""Weight of one observation in the learned noise."""
CLIP = 3.0
"""A residual is clipped at this many standard deviations, so that a hiccup of the machine moves little."""
SMALLEST_S, SMALLEST_GUESS_S = 1e-6, 1e-3
"""Seconds to which a value that is given as zero may turn out to amount: measured, and guessed."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Initial values of a curve."""

    knots: tuple[int, ...]
    """Sizes, ascending."""
    values: tuple[float, ...]
    """Seconds at each of the knots."""
    rate: float = 0.0
    """Seconds per unit of the second quantity."""
    rate_sd: float = SMALLEST_S
    """Standard deviation of the rate where it is a guess, in seconds."""
    most_rate: float = 1.0
    """Upper bound of the rate in seconds, a guard against divergence."""


class Curves:
    """Several curves that drift together.

    Args:
        points: initial values of each curve.
        measured: whether the values were measured; guessed ones are corrected faster.
        common_drift, single_drift: relative standard deviations of the drift per observation: of all values together,
            and of each value alone. Without the first, a value moves by observations near its own size only.

    Raises:
        ValueError: the number of values is not that of the knots.
    """

    def __init__(
        self,
        points: Sequence[Points],
        *,
        measured: bool = True,
        common_drift: float = COMMON_DRIFT,
        single_drift: float = SINGLE_DRIFT,
    ) -> None:
        self._common_drift, self._single_drift = common_drift, single_drift
        smallest = SMALLEST_S if measured else SMALLEST_GUESS_S
        common_sd, single_sd = (COMMON_SD, SINGLE_SD) if measured else (GUESSED_COMMON_SD, GUESSED_SINGLE_SD)
        state: list[float] = []
        least: list[float] = []
        sds: list[float] = []
        self._curves: list[Curve] = []
        for each in points:
            if len(each.knots) != len(each.values):
                raise ValueError(f"{len(each.values)} values for {len(each.knots)} knots")
            start = len(state)
            state += [*np.maximum.accumulate(each.values).tolist(), each.rate]
            least += [smallest] * len(each.values) + [each.rate_sd / 100]
            sds += [single_sd * max(value, smallest) for value in state[start:-1]]
            sds.append(max(single_sd * each.rate, 0.0 if measured else each.rate_sd))
            self._curves.append(Curve(self, start, each))
        self.state: Floats = np.array(state)
        self._least = np.array(least)
        size = np.maximum(self.state, self._least)
        self._covariance = common_sd**2 * size[:, None] * size + np.diag(np.array(sds) ** 2)
        self.publish()

    def publish(self) -> None:
        """Copy the state into every curve."""
        for curve in self._curves:
            curve.publish()

    def __getitem__(self, index: int) -> Curve:
        return self._curves[index]

    def learn(self, features: Floats, measured_s: float, noise: float) -> float:
        """Correct the state by one measurement of `features @ state`.

        Args:
            features: [len(state)] weights of the state's values in the measurement.
            measured_s: the measurement, seconds.
            noise: relative standard deviation of the measurement.

        Returns:
            The relative error of the expectation, after clipping.
        """
        state, covariance = self.state, self._covariance
        size = np.maximum(state, self._least)
        drift = self._common_drift * size
        covariance += drift[:, None] * drift
        covariance.flat[:: len(size) + 1] += (self._single_drift * size) ** 2  # its diagonal
        expected = float(features @ state)
        shared = covariance @ features
        scale = max(expected, min(measured_s, 4 * expected), SMALLEST_S)
        variance = float(features @ shared) + (noise * scale) ** 2
        limit = CLIP * variance**0.5
        residual = max(-limit, min(limit, measured_s - expected))
        gain = shared / variance
        state += gain * residual
        covariance -= gain[:, None] * shared
        np.maximum(state, 0.0, out=state)
        return float(abs(residual) / scale)


class Curve:
    """One of `Curves`: a non-decreasing function of a size, and a rate per unit of something else."""

    def __init__(self, curves: Curves, start: int, points: Points) -> None:
        self._curves = curves
        self._knots = points.knots
        self._knots_array = np.array(points.knots, dtype=np.float64)
        self._part = slice(start, start + len(points.knots))
        self._most_rate = points.most_rate
        self._noise = FIRST_NOISE
        self.values: list[float] = []
        """[knots] Seconds at each knot."""
        self.rate = 0.0
        """Seconds per unit of the second quantity."""

    def at(self, x: float) -> float:
        """Seconds at size x; beyond the last knot the last slope goes on."""
        low, share = self._segment(x)
        return self.values[low] + share * (self.values[low + 1] - self.values[low])

    def added(self, x: int, count: int) -> Floats:
        """[count + 1] `at(x + n) - at(x)` for n from 0 on; constant beyond the last knot."""
        values: Floats = np.interp(np.arange(x, x + count + 1), self._knots_array, self._curves.state[self._part])
        values -= values[0]
        return values

    def learn(self, x: float, measured_s: float, *, num_units: float = 0.0, times: float = 1.0) -> None:
        """Learn that `times` jobs of size x with `num_units` of the second quantity took `measured_s` seconds."""
        low, share = self._segment(x)
        share = min(1.0, max(0.0, share))
        features, start = np.zeros(len(self._curves.state)), self._part.start
        features[start + low], features[start + low + 1] = times * (1 - share), times * share
        features[self._part.stop] = num_units
        off = self._curves.learn(features, measured_s, self._noise)
        self._noise = max(LEAST_NOISE, self._noise + NOISE_RATE * (min(MOST_NOISE, off) - self._noise))
        self._restore_order(low if share < 0.5 else low + 1)
        self._curves.publish()

    def publish(self) -> None:
        """Copy this curve's part of the state into `values` and `rate`."""
        state = self._curves.state
        self.values, self.rate = state[self._part].tolist(), float(state[self._part.stop])

    def _restore_order(self, anchor: int) -> None:
        """Raise the values above the anchor, and lower those below it, until they do not decrease with size.

        Args:
            anchor: index of the knot next to the observation; its value stays.
        """
        state = self._curves.state
        values = state[self._part]
        np.maximum.accumulate(values[anchor:], out=values[anchor:])
        below = values[anchor::-1]
        np.minimum.accumulate(below, out=below)
        state[self._part.stop] = min(state[self._part.stop], self._most_rate)

    def _segment(self, x: float) -> tuple[int, float]:
        """Index of the knot below x, and the share of the way from it to the next knot."""
        low = min(max(bisect_right(self._knots, x) - 1, 0), len(self._knots) - 2)
        return low, (x - self._knots[low]) / (self._knots[low + 1] - self._knots[low])
