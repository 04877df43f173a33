"""What a step costs, as a function of what it computes: measured at start, refined by every step, monotone always.

    t_step = pace * (t_verify(rows, context) + t_draft(batch, depth, feed)) + overhead

Owns the curves and how they learn. Seconds in, seconds out; no torch, no clock, no knowledge of requests.
A curve is a value per knot with straight lines between; learning moves the knots next to an observation and then
restores the order, so that a longer job is never predicted to be cheaper. `pace` follows what makes all jobs slower or
faster at once (a busy neighbour, a new kernel), or else what is computed often would look dear beside what was timed
long ago. Residuals are clipped at a multiple of their own usual size, so that one hiccup of the machine moves nothing
far.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.step import StepStats

ROW_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
BATCH_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CLIP = 3.0
"""Residuals beyond this many times the usual one count as so many."""
TRUST = 20.0
"""Observations that a measured value is worth."""
MAX_CONTEXT_RATE = 1e-4
"""Seconds per cached token; far above any machine, a guard against a runaway slope."""
FADE = 0.99
"""Per observation: what was not seen for long is trusted less, and learns faster when it is seen again."""
PACE_RATE, PACE_STEP = 0.2, 0.5
"""Share of a step's deviation that `pace` follows, and the largest deviation (in log) that it believes."""


@dataclass(frozen=True, slots=True)
class CostTable:
    """The numbers of a cost model, as they are cached on disk and written for simulated hardware."""

    verify_s: tuple[float, ...]
    """Target forward at each of ROW_KNOTS rows and no context."""
    pass_s: tuple[float, ...]
    """One draft pass at each of BATCH_KNOTS sequences; 0 for methods that compute nothing."""
    context_s: float = 0.0
    """Per cached token over all spans."""
    feed_s: float = 0.0
    """Per committed token that the draft has to read."""
    handoff_s: float = 0.0
    """Once per step that drafts: there and back."""
    overhead_s: float = 0.0
    """Once per step: scheduling, sampling, publishing."""


class Curve:
    """A non-decreasing function through (knot, value) points, learning from observations.

    Args:
        knots: ascending.
        values: one per knot, seconds.
        trust: observations that each value is worth; the first ones of a knot never measured move it far.
    """

    def __init__(self, knots: Sequence[int], values: Sequence[float], *, trust: float = TRUST) -> None:
        if len(knots) != len(values):
            raise ValueError(f"{len(values)} values for {len(knots)} knots")
        self._knots = tuple(knots)
        self._values = list(values)
        self._seen = [trust] * len(values)
        for index in range(1, len(self._values)):
            self._values[index] = max(self._values[index], self._values[index - 1])

    @property
    def values(self) -> tuple[float, ...]:
        return tuple(self._values)

    def at(self, x: float) -> float:
        """Value at x; beyond the last knot the last slope goes on."""
        low, share = self._place(x)
        return self._values[low] + share * (self._values[low + 1] - self._values[low])

    def added(self, x: int, count: int) -> npt.NDArray[np.float64]:
        """[count + 1] at(x + n) - at(x) for n from 0 on, within the knots."""
        values: npt.NDArray[np.float64] = np.interp(np.arange(x, x + count + 1), self._knots, self._values)
        values -= values[0]
        return values

    def learn(self, x: float, residual: float, rate: float) -> None:
        """Move the curve at x by about rate * residual, and its neighbours with it where order asks for it."""
        self._fade()
        low, share = self._place(x)
        share = min(1.0, max(0.0, share))
        weight = (1 - share) ** 2 + share**2
        for index, part in ((low, 1 - share), (low + 1, share)):
            own_rate = max(rate, 1.0 / (1.0 + self._seen[index]))
            self._values[index] = max(0.0, self._values[index] + own_rate * residual * part / weight)
            self._seen[index] += part
        anchor = low if share < 0.5 else low + 1
        for index in range(anchor + 1, len(self._values)):
            self._values[index] = max(self._values[index], self._values[index - 1])
        for index in range(anchor - 1, -1, -1):
            self._values[index] = min(self._values[index], self._values[index + 1])

    def trust(self, x: float) -> float:
        """Observations that the curve rests on at x, faded."""
        low, _ = self._place(x)
        return min(self._seen[low], self._seen[low + 1])

    def _fade(self) -> None:
        self._seen = [FADE * seen for seen in self._seen]

    def _place(self, x: float) -> tuple[int, float]:
        low = min(max(bisect_right(self._knots, x) - 1, 0), len(self._knots) - 2)
        return low, (x - self._knots[low]) / (self._knots[low + 1] - self._knots[low])


class CostModel:
    """Predicts and learns.

    Args:
        table: where to start.
        rate: share of a residual that one step corrects, once a value is known.
        trust: observations that the table's values are worth; 0 where they are a guess.
    """

    def __init__(self, table: CostTable, *, rate: float = 0.02, trust: float = TRUST) -> None:
        self._verify = Curve(ROW_KNOTS, table.verify_s, trust=trust)
        self._pass = Curve(BATCH_KNOTS, table.pass_s, trust=trust)
        self._context_s = table.context_s
        self._feed_s = table.feed_s
        self._handoff_s = table.handoff_s
        self._overhead_s = table.overhead_s
        self._rate = rate
        self._pace = 1.0
        self._usual: dict[str, float] = {}
        self._errors: deque[float] = deque(maxlen=512)
        self.predicted_s = 0.0
        """Duration that was expected of the step observed last."""

    def verify_s(self, rows: float, context: float) -> float:
        """Target forward over `rows` rows with `context` cached tokens in all."""
        return self._pace * (self._verify.at(rows) + self._context_s * context)

    def added_rows_s(self, rows: int, count: int) -> npt.NDArray[np.float64]:
        """[count + 1] what n more rows than `rows` cost, seconds, from n = 0 on."""
        added = self._verify.added(rows, count)
        added *= self._pace
        return added

    def pass_s(self, batch: float) -> float:
        """One draft pass over `batch` sequences."""
        return self._pace * self._pass.at(batch)

    def draft_s(self, batch: float, depth: float, feed: float = 0.0) -> float:
        """All of drafting: `depth` passes, `feed` committed tokens to read first, and the way there and back."""
        return self._handoff_s + depth * self.pass_s(batch) + feed * self.feed_s

    @property
    def overhead_s(self) -> float:
        return self._overhead_s

    @property
    def handoff_s(self) -> float:
        return self._handoff_s

    @property
    def feed_s(self) -> float:
        """One committed token that the draft has to read."""
        return self._pace * self._feed_s

    def step_s(self, rows: float, context: float, batch: float = 0.0, depth: float = 0.0, feed: float = 0.0) -> float:
        """A whole step; no draft when `depth` is 0."""
        drafting = self.draft_s(batch, depth, feed) if depth > 0 or feed > 0 else 0.0
        return self._overhead_s + self.verify_s(rows, context) + drafting

    def observe(self, stats: StepStats) -> None:
        """Learn from a step, after noting how wrong the prediction for it was."""
        drafted = [outcome.num_drafted for outcome in stats.outcomes if outcome.source == "method"]
        depth, batch = max(drafted, default=0), len(drafted)
        predicted = self.step_s(stats.num_rows, stats.context_len, batch, depth, stats.num_fed)
        self.predicted_s = predicted
        if stats.step_s > 0:
            self._errors.append(abs(predicted - stats.step_s) / stats.step_s)
        self._learn_verify(stats)
        if depth > 0 or stats.num_fed > 0:
            self._learn_draft(stats, depth, batch)
        rest = stats.step_s - stats.verify_s - stats.draft_s - stats.handoff_s
        self._overhead_s = max(0.0, self._overhead_s + self._rate * self._clipped("rest", rest - self._overhead_s))

    def error(self) -> tuple[float, float]:
        """Relative error of the last predictions against what was measured: median and 95th percentile."""
        if not self._errors:
            return 0.0, 0.0
        ordered = sorted(self._errors)
        return ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]

    def measured(self, table: CostTable) -> None:
        """Start again from these numbers: something was measured outside the steps."""
        self._verify = Curve(ROW_KNOTS, table.verify_s)
        self._pass = Curve(BATCH_KNOTS, table.pass_s)
        self._pace = 1.0
        self._context_s, self._feed_s = table.context_s, table.feed_s
        self._handoff_s, self._overhead_s = table.handoff_s, table.overhead_s

    def table(self) -> CostTable:
        """The numbers as they are now."""
        pace = self._pace
        return CostTable(
            tuple(pace * value for value in self._verify.values),
            tuple(pace * value for value in self._pass.values),
            pace * self._context_s,
            pace * self._feed_s,
            self._handoff_s,
            self._overhead_s,
        )

    def _learn_verify(self, stats: StepStats) -> None:
        expected = self.verify_s(stats.num_rows, stats.context_len)
        seen_s = expected + self._clipped("verify", stats.verify_s - expected)
        if expected > 0 and seen_s > 0:
            deviation = max(-PACE_STEP, min(PACE_STEP, math.log(seen_s / expected)))
            trust = self._verify.trust(stats.num_rows)
            self._pace *= math.exp(PACE_RATE * deviation * trust / (TRUST / 4 + trust))
        residual = (seen_s - self.verify_s(stats.num_rows, stats.context_len)) / self._pace
        # Most of a residual is the rows'; the share that grows with context goes to the context's own rate.
        if stats.context_len > 0:
            change = 0.2 * self._rate * residual / stats.context_len
            self._context_s = min(MAX_CONTEXT_RATE, max(0.0, self._context_s + change))
        self._verify.learn(stats.num_rows, residual, self._rate)

    def _learn_draft(self, stats: StepStats, depth: int, batch: int) -> None:
        expected = depth * self.pass_s(batch) + stats.num_fed * self.feed_s
        residual = self._clipped("draft", stats.draft_s - expected)
        # The first pass also reads what was fed; a feed much longer than the batch says more of the feed's rate.
        if depth == 0 or stats.num_fed > 8 * batch:
            self._feed_s = max(0.0, self._feed_s + self._rate * residual / self._pace / max(1, stats.num_fed))
        else:
            self._pass.learn(batch, residual / self._pace / depth, self._rate)
        handoff = self._clipped("handoff", stats.handoff_s - self._handoff_s)
        self._handoff_s = max(0.0, self._handoff_s + self._rate * handoff)

    def _clipped(self, name: str, residual: float) -> float:
        usual = self._usual.get(name)
        size = abs(residual)
        if usual is None:
            self._usual[name] = size
            return residual
        limit = CLIP * usual
        # Grows slowly under outliers, so that a lasting change of the machine is followed after all.
        self._usual[name] = usual + 0.05 * (min(size, 2 * limit) - usual)
        return max(-limit, min(limit, residual))
