"""What a step costs, as a function of what it computes: measured at start, refined by every step, monotone always.

    t_step = t_verify(rows, context) + t_judge * rows + t_draft(batch, depth, feed) + overhead

Owns which part of a step teaches which curve (`curve.Curve`). Seconds in, seconds out; no torch, no clock, no knowledge
of requests.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import numpy.typing as npt

from autoscale.policy.cost_curve import Curves, Points
from engine.core.stats import StepStats

ROW_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
BATCH_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
RATE = 0.02
"""Share of a residual that one step corrects in what is a single number; the first steps correct more."""
CLIP = 3.0
"""Residuals beyond this many times the usual one count as so many."""
ALIKE_STEPS = 4
"""So many plain steps of one size in a row teach once, by their mean: nothing else is new about them."""
MAX_CONTEXT_RATE = 1e-4
"""Seconds per cached token; far above any machine."""


@dataclass(frozen=True, slots=True)
class CostTable:
    """The numbers of a cost model, as they are cached on disk and written for simulated hardware."""

    verify_s: tuple[float, ...]
    """Target forward at each of ROW_KNOTS rows and no context."""
    pass_s: tuple[float, ...]
    """One draft pass at each of BATCH_KNOTS sequences; 0 for methods that compute nothing."""
    context_s: float = 0.0
    """Per cached token over all spans."""
    catch_up_s: float = 0.0
    """Per committed token that the draft has to read."""
    handoff_s: float = 0.0
    """What asking the draft adds to a step beside its passes: packing, there and back, counting."""
    overhead_s: float = 0.0
    """Once per step: scheduling, committing, publishing."""
    sample_row_s: float = 0.0
    """Per row that yields a token or may: sampling, masks, comparison. Not a part of the forward's curve, because it
    depends on what is asked for: a sampled row takes much longer than a greedy one."""


class CostModel:
    """Predicts and learns.

    Args:
        table: where to start.
        measured: whether the table was measured, not guessed.
    """

    def __init__(self, table: CostTable, *, measured: bool = True) -> None:
        self._usual: dict[str, float] = {}
        self._num_seen: dict[str, int] = {}
        self._alike: list[StepStats] = []
        self._errors: deque[float] = deque(maxlen=512)
        self.predicted_s = 0.0
        """Duration that was expected of the step observed last."""
        self.plain_s = 0.0
        """The same, of that step without its drafts."""
        self._start(table, measured=measured)

    def _start(self, table: CostTable, *, measured: bool) -> None:
        forward_s = table.verify_s[0]
        verify = Points(
            knots=ROW_KNOTS,
            values=table.verify_s,
            rate=table.context_s,
            rate_doubt=forward_s / 2000,
            most_rate=MAX_CONTEXT_RATE,
        )
        passes = Points(knots=BATCH_KNOTS, values=table.pass_s, rate=table.catch_up_s, rate_doubt=forward_s / 100)
        curves = Curves((verify, passes), measured=measured)
        self._verify, self._pass = curves[0], curves[1]
        self._handoff_s = table.handoff_s
        self._overhead_s = table.overhead_s
        self._sample_row_s = table.sample_row_s

    def verify_s(self, rows: float, context: float) -> float:
        """Target forward over `rows` rows with `context` cached tokens in all."""
        return self._verify.at(rows) + self._verify.rate * context

    def added_rows_s(self, rows: int, count: int) -> npt.NDArray[np.float64]:
        """[count + 1] what n more drafted rows than `rows` cost, seconds, from n = 0 on."""
        return self._verify.added(rows, count) + self._sample_row_s * np.arange(count + 1)

    def row_s(self, rows: int, over: int) -> float:
        """One more drafted row than `rows`, the mean over so many more."""
        return float(self.added_rows_s(rows, over)[-1]) / over

    def pass_s(self, batch: float) -> float:
        """One draft pass over `batch` sequences."""
        return self._pass.at(batch)

    def draft_s(self, batch: float, depth: float, feed: float = 0.0) -> float:
        """All of drafting: `depth` passes, `feed` committed tokens to read first, and what asking adds."""
        return self._handoff_s + depth * self.pass_s(batch) + feed * self.catch_up_s

    @property
    def overhead_s(self) -> float:
        return self._overhead_s

    @property
    def handoff_s(self) -> float:
        return self._handoff_s

    @property
    def catch_up_s(self) -> float:
        """One committed token that the draft has to read."""
        return self._pass.rate

    def step_s(
        self,
        rows: float,
        context: float,
        batch: float = 0.0,
        depth: float = 0.0,
        feed: float = 0.0,
        *,
        num_prompt_rows: float = 0.0,
    ) -> float:
        """A whole step; no draft when `depth` is 0. Of its rows, those of prompts are not judged."""
        drafting = self.draft_s(batch, depth, feed) if depth > 0 or feed > 0 else 0.0
        judging = self._sample_row_s * (rows - num_prompt_rows)
        return self._overhead_s + self.verify_s(rows, context) + judging + drafting

    def observe(self, stats: StepStats) -> None:
        """Learn from a step, after noting how wrong the prediction for it was."""
        drafted = [outcome.num_drafted for outcome in stats.outcomes if outcome.source == "method"]
        depth, batch = max(drafted, default=0), len(drafted)
        prompts = stats.num_prefill_tokens
        where = (stats.context_len, batch, depth, stats.num_caught_up)
        self.predicted_s = predicted = self.step_s(stats.num_rows, *where, num_prompt_rows=prompts)
        self.plain_s = self.step_s(stats.num_rows - stats.num_drafted, stats.context_len, num_prompt_rows=prompts)
        if stats.step_s > 0:
            self._errors.append(abs(predicted - stats.step_s) / stats.step_s)
        self._learn_verify(stats)
        num_sampled = stats.num_rows - prompts
        if num_sampled > 0:
            self._sample_row_s = self._corrected("sample", self._sample_row_s, stats.sample_s / num_sampled)
        rest = stats.step_s - stats.verify_s - stats.sample_s - stats.draft_s
        if depth > 0 or stats.num_caught_up > 0:
            self._pass.learn(max(1, batch), stats.draft_s, num_units=stats.num_caught_up, times=depth)
            self._handoff_s = self._corrected("handoff", self._handoff_s, rest - self._overhead_s)
        else:
            self._overhead_s = self._corrected("overhead", self._overhead_s, rest)

    def _learn_verify(self, stats: StepStats) -> None:
        alike = self._alike
        if alike and alike[0].num_rows != stats.num_rows:
            self._learn_alike()
        alike.append(stats)
        if stats.num_drafted or len(alike) == ALIKE_STEPS:
            self._learn_alike()

    def _learn_alike(self) -> None:
        alike = self._alike
        seconds, context = fmean([each.verify_s for each in alike]), fmean([each.context_len for each in alike])
        self._verify.learn(alike[0].num_rows, seconds, num_units=context)
        alike.clear()

    def error(self) -> tuple[float, float]:
        """Relative error of the last predictions against what was measured: median and 95th percentile."""
        if not self._errors:
            return 0.0, 0.0
        ordered = sorted(self._errors)
        return ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]

    def measured(self, table: CostTable) -> None:
        """Start again from these numbers: something was measured outside the steps."""
        self._start(table, measured=True)

    def table(self) -> CostTable:
        """The numbers as they are now."""
        return CostTable(
            tuple(self._verify.values),
            tuple(self._pass.values),
            self._verify.rate,
            self.catch_up_s,
            self._handoff_s,
            self._overhead_s,
            self._sample_row_s,
        )

    def _corrected(self, name: str, value: float, seen: float) -> float:
        self._num_seen[name] = num_seen = self._num_seen.get(name, 0) + 1
        return max(0.0, value + max(RATE, 1 / num_seen) * self._clipped(name, seen - value))

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
