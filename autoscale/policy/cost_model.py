"""What a step costs as a function of what it computes: measured at start, learned from every step, always monotone.

    t_step = t_verify(rows, context) + t_sample(rows) + t_draft(batch, depth, num_caught_up) + overhead
    t_sample = t_batch + rows * t_row
    t_draft = handoff + request + passes(depth) * t_pass(batch) + num_caught_up * t_catch_up

Owns which part of a step teaches which curve (`cost_curve.Curve`). Seconds in, seconds out; no torch, no clock, no
knowledge of requests.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import numpy.typing as npt

from autoscale.policy.cost_curve import Curve, Curves, Points
from engine.core.stats import StepStats

ROW_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
BATCH_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
RATE = 0.02
"""Share of a residual by which one step corrects a cost that is a single number. The first steps correct more."""
CLIP = 3.0
"""A residual is clipped at this many times its usual size."""
SAME_SIZE_STEPS = 4
"""Number of successive plain steps of one size that are learned from once, by their mean. Single ones add little."""
LASTING_DRIFT, LASTING_EVERY = 0.006, 3
"""Of the lasting curves: relative standard deviation of a value's drift per observation, and the share of observations
that they learn from: one of so many. The share is odd, because forwards and draft passes take turns."""
MAX_CONTEXT_RATE = 1e-4
"""Upper bound of the cost of a cached token in seconds; far above any real one."""


@dataclass(frozen=True, slots=True)
class CostTable:
    """The numbers of a cost model, as cached on disk and as written for simulated hardware. All are seconds."""

    verify_s: tuple[float, ...]
    """Seconds of the target's forward at each of ROW_KNOTS rows without cached tokens."""
    pass_s: tuple[float, ...]
    """Seconds of one draft pass at each of BATCH_KNOTS sequences; 0 for methods that compute nothing."""
    context_s: float = 0.0
    """Seconds that each cached token, over all spans, adds to the target's forward."""
    catch_up_s: float = 0.0
    """Seconds that the draft takes for each committed token it reads."""
    handoff_s: float = 0.0
    """Seconds that a draft request adds to a step besides the draft's computing: packing, transport, counting."""
    request_s: float = 0.0
    """Seconds that the draft takes for a request besides its passes and the tokens it reads. It is measured at start
    only: steps whose drafts have one length do not tell it from a pass."""
    overhead_s: float = 0.0
    """Seconds per step of scheduling, committing and publishing."""
    sample_s: float = 0.0
    """Seconds of sampling, masks and comparison per step, however many rows there are."""
    sample_row_s: float = 0.0
    """The same per row that can yield a token. Apart from the forward's curve, because it depends on the sampling
    parameters: a sampled row takes much longer than a greedy one."""
    positions_per_pass: int = 1
    """Tokens that one draft pass drafts for each sequence: 1 for a chain, more for a parallel draft."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """What the model predicted of one step before it learned from it."""

    seconds: float
    """Predicted duration of the step in seconds."""
    plain_s: float
    """Predicted duration of the same step without its drafts, in seconds."""


class CostModel:
    """Predicts the duration of steps and learns from them.

    Args:
        table: initial costs.
        measured: whether the table was measured; a guessed one is corrected faster.
    """

    def __init__(self, table: CostTable, *, measured: bool = True) -> None:
        self._usual: dict[str, float] = {}
        self._num_seen: dict[str, int] = {}
        self._same_size: list[StepStats] = []
        self._errors: deque[float] = deque(maxlen=512)
        self._padded_to: tuple[int, ...] = ()
        self._start(table, measured=measured)

    def _start(self, table: CostTable, *, measured: bool) -> None:
        forward_s = table.verify_s[0]
        verify = Points(
            knots=ROW_KNOTS,
            values=table.verify_s,
            rate=table.context_s,
            rate_sd=forward_s / 2000,
            most_rate=MAX_CONTEXT_RATE,
        )
        passes = Points(knots=BATCH_KNOTS, values=table.pass_s, rate=table.catch_up_s, rate_sd=forward_s / 100)
        curves = Curves((verify, passes), measured=measured)
        self._verify, self._pass = curves[0], curves[1]
        # What predicts the next step follows the machine of this moment at all sizes. What is kept for another time
        # does not: a size keeps what it took when it was last in use.
        lasting = Curves((verify, passes), measured=measured, common_drift=0.0, single_drift=LASTING_DRIFT)
        self._lasting_verify, self._lasting_pass = lasting[0], lasting[1]
        self._num_learned = 0
        self._handoff_s, self._request_s = table.handoff_s, table.request_s
        self._overhead_s = table.overhead_s
        self._sample_s, self._sample_row_s = table.sample_s, table.sample_row_s
        self.positions_per_pass = table.positions_per_pass

    def pad_rows(self, sizes: tuple[int, ...]) -> None:
        """Note that forwards are padded.

        Args:
            sizes: numbers of rows that a forward is padded to, ascending; larger forwards are not padded.
        """
        self._padded_to = sizes

    def _computed(self, rows: float) -> float:
        """Rows that a forward of `rows` rows computes."""
        place = bisect_left(self._padded_to, rows)
        return self._padded_to[place] if place < len(self._padded_to) else rows

    def verify_s(self, rows: float, context: float) -> float:
        """Seconds of the target's forward over `rows` rows with `context` cached tokens over all spans."""
        return self._verify.at(self._computed(rows)) + self._verify.rate * context

    def added_rows_s(self, rows: int, count: int) -> npt.NDArray[np.float64]:
        """[count + 1] seconds that n drafted rows add to a step of `rows` rows, for n from 0 on."""
        sampled_s = self._sample_row_s * np.arange(count + 1)
        if not self._padded_to:
            return self._verify.added(rows, count) + sampled_s
        least_s = self._verify.at(self._computed(rows))
        forward_s = [self._verify.at(self._computed(rows + added)) - least_s for added in range(count + 1)]
        added_s: npt.NDArray[np.float64] = np.array(forward_s) + sampled_s
        return added_s

    def row_s(self, rows: int, over: int) -> float:
        """Mean seconds of one of `over` drafted rows added to a step of `rows` rows."""
        return float(self.added_rows_s(rows, over)[-1]) / over

    def pass_s(self, batch: float) -> float:
        """Seconds of one draft pass over `batch` sequences."""
        return self._pass.at(batch)

    def passes(self, depth: float) -> float:
        """Draft passes for `depth` tokens per sequence."""
        return depth if self.positions_per_pass == 1 else math.ceil(depth / self.positions_per_pass)

    def draft_s(self, batch: float, depth: float, num_caught_up: float = 0.0) -> float:
        """Seconds of all drafting: asking, the passes for `depth` tokens per sequence, and reading
        `num_caught_up` committed tokens first."""
        return self.ask_s + self.passes(depth) * self.pass_s(batch) + num_caught_up * self.catch_up_s

    @property
    def overhead_s(self) -> float:
        """Seconds per step of scheduling, committing and publishing."""
        return self._overhead_s

    @property
    def handoff_s(self) -> float:
        """Seconds that a draft request adds to a step besides the draft's computing."""
        return self._handoff_s

    @property
    def ask_s(self) -> float:
        """Seconds that a draft request adds to a step besides passes and reading: the handoff and the request."""
        return self._handoff_s + self._request_s

    @property
    def catch_up_s(self) -> float:
        """Seconds that the draft takes for each committed token it reads."""
        return self._pass.rate

    def step_s(
        self,
        rows: float,
        context: float,
        batch: float = 0.0,
        depth: float = 0.0,
        num_caught_up: float = 0.0,
        *,
        num_prompt_rows: float = 0.0,
    ) -> float:
        """Seconds of a whole step.

        Args:
            rows: rows of the target's forward.
            context: cached tokens over all spans.
            batch: sequences that the draft drafts for.
            depth: drafted tokens of the longest draft. Without them and tokens to read there is no draft request.
            num_caught_up: committed tokens that the draft reads first.
            num_prompt_rows: rows of prompts among `rows`; they are not sampled.
        """
        draft_s = self.draft_s(batch, depth, num_caught_up) if depth > 0 or num_caught_up > 0 else 0.0
        return self._overhead_s + self.verify_s(rows, context) + self._sampling_s(rows - num_prompt_rows) + draft_s

    def observe(self, stats: StepStats) -> StepCost:
        """Learn from a step. Returns what was predicted of it before, which also enters `error`."""
        drafted = [outcome.num_drafted for outcome in stats.outcomes if outcome.source in ("method", "merged")]
        depth, batch = max(drafted, default=0), len(drafted)
        prompts = stats.num_prefill_tokens
        context, caught_up = stats.context_len, stats.num_caught_up
        expected = StepCost(
            self.step_s(stats.num_rows, context, batch, depth, caught_up, num_prompt_rows=prompts),
            self.step_s(stats.num_rows - stats.num_drafted, context, num_prompt_rows=prompts),
        )
        if stats.step_s > 0:
            self._errors.append(abs(expected.seconds - stats.step_s) / stats.step_s)
        self._learn_verify(stats)
        self._learn_sampling(stats.num_rows - prompts, stats.sample_s)
        rest = stats.step_s - stats.verify_s - stats.sample_s - stats.draft_s
        if depth > 0 or caught_up > 0:
            computed_s = max(0.0, stats.draft_s - self._request_s)
            for curve in self._learning(self._pass, self._lasting_pass):
                curve.learn(max(1, batch), computed_s, num_units=caught_up, times=self.passes(depth))
            self._handoff_s = self._corrected("handoff", self._handoff_s, rest - self._overhead_s)
        else:
            self._overhead_s = self._corrected("overhead", self._overhead_s, rest)
        return expected

    def _learn_verify(self, stats: StepStats) -> None:
        same_size = self._same_size
        if same_size and same_size[0].num_rows != stats.num_rows:
            self._learn_same_size()
        same_size.append(stats)
        if stats.num_drafted or len(same_size) == SAME_SIZE_STEPS:
            self._learn_same_size()

    def _learn_same_size(self) -> None:
        steps = self._same_size
        seconds, context = fmean([step.verify_s for step in steps]), fmean([step.context_len for step in steps])
        for curve in self._learning(self._verify, self._lasting_verify):
            curve.learn(self._computed(steps[0].num_rows), seconds, num_units=context)
        steps.clear()

    def _learning(self, curve: Curve, lasting: Curve) -> tuple[Curve, ...]:
        """The curves that learn from the next observation."""
        is_sampled = self._num_learned % LASTING_EVERY == 0
        self._num_learned += 1
        return (curve, lasting) if is_sampled else (curve,)

    def _sampling_s(self, rows: float) -> float:
        return self._sample_s + self._sample_row_s * rows if rows > 0 else 0.0

    def _learn_sampling(self, rows: int, seconds: float) -> None:
        """Correct the line by normalised least mean squares (Widrow and Hoff 1960).

        An error at many rows corrects the time per row: that is what the options of requests change.
        """
        if rows <= 0:
            return
        expected = self._sampling_s(rows)
        change = self._corrected("sample", expected, seconds) - expected
        share = change / (1 + rows**2)
        self._sample_s = max(0.0, self._sample_s + share)
        self._sample_row_s = max(0.0, self._sample_row_s + share * rows)

    def error(self) -> tuple[float, float]:
        """Relative error of the last predictions: median and 95th percentile; zeros before the first step."""
        if not self._errors:
            return 0.0, 0.0
        ordered = sorted(self._errors)
        return ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]

    def measured(self, table: CostTable) -> None:
        """Start again from a table that was measured outside the steps."""
        self._start(table, measured=True)

    def table(self) -> CostTable:
        """The costs as learned so far, each size by what it took when it was last in use."""
        return CostTable(
            tuple(self._lasting_verify.values),
            tuple(self._lasting_pass.values),
            self._lasting_verify.rate,
            self._lasting_pass.rate,
            self._handoff_s,
            self._request_s,
            self._overhead_s,
            self._sample_s,
            self._sample_row_s,
            self.positions_per_pass,
        )

    def _corrected(self, name: str, value: float, measured: float) -> float:
        self._num_seen[name] = num_seen = self._num_seen.get(name, 0) + 1
        return max(0.0, value + max(RATE, 1 / num_seen) * self._clipped(name, measured - value))

    def _clipped(self, name: str, residual: float) -> float:
        usual = self._usual.get(name)
        size = abs(residual)
        if usual is None:
            self._usual[name] = size
            return residual
        limit = CLIP * usual
        # Grows slowly under outliers, so that a lasting change of the machine is followed in the end.
        self._usual[name] = usual + 0.05 * (min(size, 2 * limit) - usual)
        return max(-limit, min(limit, residual))
