"""The policy `goodput`: draft where it adds most tokens per second, and not at all where it adds none.

Joins what is known (cost model, acceptance) with the allocation and the switch. Its clock is the sum of the steps it
was told of. No torch, no Ray.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoscale.acceptance import Acceptance
from autoscale.allocation import Allocation, allocate
from autoscale.cost_model import CostModel
from autoscale.toggle import Toggle, ToggleParams
from engine.plan import Choice, Plan
from engine.request import Request
from engine.step import StepStats

PROBE_REQUESTS = 2
PROBE_K = 2
CATCH_UP_STEPS = 16
"""Steps over which the price of letting the draft read what it missed is spread."""
DEFAULT_TOGGLE = ToggleParams()
GOOD_DRAFT = 0.9
"""Acceptance at which a load that drafts could pay for would show it."""


class Goodput:
    """Implements `engine.plan.Pacer`.

    Args:
        cost: of this engine's steps.
        acceptance: of this engine's draft.
        max_k: bound under every plan.
    """

    def __init__(
        self, cost: CostModel, acceptance: Acceptance, *, max_k: int, toggle: ToggleParams = DEFAULT_TOGGLE
    ) -> None:
        self.cost = cost
        self.acceptance = acceptance
        self.toggle = Toggle(toggle)
        self._max_k = max_k
        self._now_s = 0.0
        self._guess = 0.0
        self._known: dict[int, int] = {}  # request key -> tokens the draft has read
        self._optimist = GOOD_DRAFT ** np.arange(1, max_k + 1)
        self.predicted: Allocation | None = None
        """Of the step chosen last."""

    def choose(self, plan: Plan, decodes: Sequence[Request], num_prefill_rows: int) -> Sequence[Choice]:
        width = min(plan.max_k, self._max_k)
        if not decodes or width == 0:
            return [Choice(0, "off")] * len(decodes)
        best, plain_s = self._best(decodes, width, num_prefill_rows)
        gain = best.goodput * plain_s / len(decodes)
        self._guess = best.goodput
        worth_probing = self._could_pay(len(decodes), plain_s, num_prefill_rows)
        mode = self.toggle.decide(gain, self._now_s, worth_probing=worth_probing)
        self.predicted = best if mode == "on" else Allocation(best.ks * 0, float(len(decodes)), plain_s)
        if mode == "on":
            return [Choice(k, "plan" if k else "acceptance") for k in best.ks.tolist()]
        idle = Choice(0, "acceptance" if worth_probing else "batch")
        choices = [idle] * len(decodes)
        if mode == "probe":
            asked = [i for i, r in enumerate(decodes) if r.submit.speculative.enabled][:PROBE_REQUESTS]
            for index in asked:
                choices[index] = Choice(min(PROBE_K, width), "probe")
        return choices

    def observe(self, stats: StepStats) -> None:
        self._now_s += stats.step_s
        self.cost.observe(stats)
        self.acceptance.observe(stats.outcomes)
        self.acceptance.forget(stats.ended)
        if stats.outcomes:
            self.toggle.drafted(self._now_s)
        for outcome in stats.outcomes:
            self._known[outcome.key] = outcome.num_tokens
        for key in stats.ended:
            self._known.pop(key, None)

    def _best(self, decodes: Sequence[Request], width: int, num_prefill_rows: int) -> tuple[Allocation, float]:
        """The best allocation, and the duration of the step without drafts."""
        rows = len(decodes) + num_prefill_rows
        context = sum(request.num_computed for request in decodes)
        survival = self.acceptance.survival([request.key for request in decodes])[:, :width]
        caps = np.array([_cap(request, width) for request in decodes])
        if caps.min() < width:
            survival[np.arange(width)[None, :] >= caps[:, None]] = 0.0
        plain_s = self.cost.step_s(rows, context)
        missed = sum(len(r.tokens) - self._known.get(r.key, 0) for r in decodes) - len(decodes)
        fixed_s = self.cost.handoff_s + self.cost.feed_s * max(0, missed) / CATCH_UP_STEPS
        # The price of a row is the mean over what would be added, so that a kink of the curve ahead is seen.
        added = max(1.0, float((survival > 0.3).sum()))
        row_s = (self.cost.verify_s(rows + added, context) - self.cost.verify_s(rows, context)) / added
        best = allocate(
            survival,
            base_s=plain_s,
            fixed_s=fixed_s,
            pass_s=self.cost.pass_s(len(decodes)),
            row_s=row_s,
            first_guess=self._guess,
        )
        return best, plain_s

    def _could_pay(self, batch: int, plain_s: float, num_prefill_rows: int) -> bool:
        """Whether one more drafted token each would pay if the draft were good."""
        rows = batch + num_prefill_rows
        seconds = plain_s + self.cost.handoff_s + self.cost.pass_s(batch)
        seconds += self.cost.verify_s(rows + batch, 0) - self.cost.verify_s(rows, 0)
        return float(1 + self._optimist[0]) / seconds > 1 / plain_s


def _cap(request: Request, width: int) -> int:
    """Drafts that this request may get at all."""
    options = request.submit.speculative
    if not options.enabled:
        return 0
    left = request.submit.sampling.max_tokens - request.num_generated - 1
    return max(0, min(width, left, width if options.max_k is None else options.max_k))
