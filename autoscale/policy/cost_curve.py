"""Costs as functions of a size, learnt from what is observed: a Kalman filter over their values at fixed knots.

    cost(x, n) = line through (knot, value) at x  +  rate * n

Owns the values, how sure they are, and their order: a longer job is never predicted to be cheaper. Between two
observations everything may have drifted: together by much (a busy neighbour, a slower clock), each value by itself by
little. So a step that is slower than predicted moves all curves, while sizes that vary from step to step, and one step
at a size not seen for long, show the slope; it is the slope that decides whether a drafted row pays.
Seconds in, seconds out; knows nothing of steps or drafts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

COMMON_DRIFT, OWN_DRIFT = 0.03, 0.0015
"""Relative standard deviation, per observation, of what moves all values alike, and of what moves one alone."""
LEVEL_DOUBT, OWN_DOUBT = 0.3, 0.2
"""The same at first, of values that were measured: the machine may be slower today, and a busy one times badly."""
GUESSED_LEVEL, GUESSED_OWN = 1.0, 0.5
"""The same of values that are a guess."""
LEAST_NOISE, FIRST_NOISE, MOST_NOISE = 0.02, 0.1, 0.5
"""Of the relative noise of an observation, which is learnt."""
NOISE_RATE = 0.05
CLIP = 3.0
"""Observations further off than so many standard deviations count as so many: a hiccup of the machine moves little."""
SMALLEST_S, SMALLEST_GUESS_S = 1e-6, 1e-3
"""What is called zero may still turn out to be about this."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Where a curve starts."""

    knots: tuple[int, ...]
    """Ascending sizes."""
    values: tuple[float, ...]
    """Seconds at each of them."""
    rate: float = 0.0
    """Seconds per unit of the second quantity."""
    rate_doubt: float = SMALLEST_S
    """Its standard deviation where it is a guess."""
    most_rate: float = 1.0
    """A guard against a runaway rate."""


class Curves:
    """Several curves that drift together.

    Args:
        points: of each.
        measured: whether they were measured, not guessed.
    """

    def __init__(self, points: Sequence[Points], *, measured: bool = True) -> None:
        smallest = SMALLEST_S if measured else SMALLEST_GUESS_S
        level, own = (LEVEL_DOUBT, OWN_DOUBT) if measured else (GUESSED_LEVEL, GUESSED_OWN)
        state: list[float] = []
        least: list[float] = []
        doubt: list[float] = []
        self._curves: list[Curve] = []
        for each in points:
            if len(each.knots) != len(each.values):
                raise ValueError(f"{len(each.values)} values for {len(each.knots)} knots")
            start = len(state)
            state += [*np.maximum.accumulate(each.values).tolist(), each.rate]
            least += [smallest] * len(each.values) + [each.rate_doubt / 100]
            doubt += [own * max(value, smallest) for value in state[start:-1]]
            doubt.append(max(own * each.rate, 0.0 if measured else each.rate_doubt))
            self._curves.append(Curve(self, start, each))
        self.state: Floats = np.array(state)
        self._least = np.array(least)
        size = np.maximum(self.state, self._least)
        self._covariance = level**2 * size[:, None] * size + np.diag(np.array(doubt) ** 2)
        self.publish()

    def publish(self) -> None:
        """Let every curve take over what was learnt."""
        for curve in self._curves:
            curve.publish()

    def __getitem__(self, index: int) -> Curve:
        return self._curves[index]

    def learn(self, features: Floats, seen_s: float, noise: float) -> float:
        """`features @ state` was measured; returns by what share of it the expectation was off.

        Args:
            features: [len(state)].
            noise: relative standard deviation of the measurement.
        """
        state, covariance = self.state, self._covariance
        size = np.maximum(state, self._least)
        drift = COMMON_DRIFT * size
        covariance += drift[:, None] * drift
        covariance.flat[:: len(size) + 1] += (OWN_DRIFT * size) ** 2  # its diagonal
        expected = float(features @ state)
        shared = covariance @ features
        scale = max(expected, min(seen_s, 4 * expected), SMALLEST_S)
        variance = float(features @ shared) + (noise * scale) ** 2
        limit = CLIP * variance**0.5
        residual = max(-limit, min(limit, seen_s - expected))
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
        self._part = slice(start, start + len(points.knots))
        self._most_rate = points.most_rate
        self._noise = FIRST_NOISE
        self.values: list[float] = []
        """Seconds at the knots."""
        self.rate = 0.0
        """Seconds per unit of the second quantity."""

    def at(self, x: float) -> float:
        """Seconds at x; beyond the last knot the last slope goes on."""
        low, share = self._place(x)
        return self.values[low] + share * (self.values[low + 1] - self.values[low])

    def added(self, x: int, count: int) -> Floats:
        """[count + 1] at(x + n) - at(x) for n from 0 on, within the knots."""
        values: Floats = np.interp(np.arange(x, x + count + 1), self._knots, self.values)
        values -= values[0]
        return values

    def learn(self, x: float, seen_s: float, *, num_units: float = 0.0, times: float = 1.0) -> None:
        """`times` jobs of size x, and `num_units` of the second quantity, took so long."""
        low, share = self._place(x)
        share = min(1.0, max(0.0, share))
        features, start = np.zeros(len(self._curves.state)), self._part.start
        features[start + low], features[start + low + 1] = times * (1 - share), times * share
        features[self._part.stop] = num_units
        off = self._curves.learn(features, seen_s, self._noise)
        self._noise = max(LEAST_NOISE, self._noise + NOISE_RATE * (min(MOST_NOISE, off) - self._noise))
        self._restore_order(low if share < 0.5 else low + 1)
        self._curves.publish()

    def publish(self) -> None:
        """Take over what was learnt."""
        state = self._curves.state
        self.values, self.rate = state[self._part].tolist(), float(state[self._part.stop])

    def _restore_order(self, anchor: int) -> None:
        """The value next to the observation stays; those above are at least it, those below at most."""
        state = self._curves.state
        values = state[self._part]
        np.maximum.accumulate(values[anchor:], out=values[anchor:])
        below = values[anchor::-1]
        np.minimum.accumulate(below, out=below)
        state[self._part.stop] = min(state[self._part.stop], self._most_rate)

    def _place(self, x: float) -> tuple[int, float]:
        low = min(max(bisect_right(self._knots, x) - 1, 0), len(self._knots) - 2)
        return low, (x - self._knots[low]) / (self._knots[low + 1] - self._knots[low])
