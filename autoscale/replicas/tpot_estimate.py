"""The time per output token of a replica at any batch size, estimated with the models of the policy `goodput`.

Owns the way from cost model and acceptance to `autoscale.replicas.decision`, and a correction by measured steps:
prompts are computed in the same steps, so a token takes longer than with decoding alone. No torch, no Ray, no clock.
"""

from __future__ import annotations

import numpy as np

from autoscale.policy.allocation import allocate
from autoscale.policy.goodput import Goodput
from autoscale.replicas.decision import BATCHES
from engine.core.pacing import Prediction, SpeculationPlan
from engine.core.stats import StepStats

MEMORY = 0.995
"""Decay of the sums per step. They remember about two hundred steps."""
LEAST, MOST = 0.5, 4.0
"""Bounds of the correction factor."""


class TpotEstimate:
    """TPOT by batch size for one engine.

    Args:
        goodput: the policy whose cost model and acceptance estimates are used.
    """

    def __init__(self, goodput: Goodput) -> None:
        self._goodput = goodput
        self._request_s = self._tokens = self._steps_s = self._contexts = self._decodes = 0.0

    def observe(self, stats: StepStats, prediction: Prediction) -> None:
        """Take a finished step, in the loop's thread. Only its measured figures are used."""
        del prediction
        if stats.num_decodes == 0:
            return
        self._request_s = MEMORY * self._request_s + stats.step_s * stats.num_decodes
        self._tokens = MEMORY * self._tokens + stats.num_emitted
        self._steps_s = MEMORY * self._steps_s + stats.step_s
        self._contexts = MEMORY * self._contexts + stats.context_len
        self._decodes = MEMORY * self._decodes + stats.num_decodes

    def tpot_s(self, plan: SpeculationPlan) -> tuple[float, ...]:
        """[len(BATCHES)] Seconds per output token of a request at each batch size under this plan. Thread-safe."""
        factor = 1.0
        if self._tokens > 0 and self._steps_s > 0:
            measured = self._request_s / self._tokens
            factor = measured / max(1e-6, self._decode_s(self._request_s / self._steps_s, plan))
        factor = min(MOST, max(LEAST, factor))
        return tuple(factor * self._decode_s(batch, plan) for batch in BATCHES)

    def _decode_s(self, batch: float, plan: SpeculationPlan) -> float:
        """Seconds per output token at this batch size in steps without prompts."""
        cost, num_requests = self._goodput.cost, max(1, round(batch))
        context = batch * (self._contexts / self._decodes if self._decodes else 0.0)
        plain_s = cost.step_s(batch, context)
        width = plan.max_k if plan.enabled and plan.policy != "off" else 0
        if width == 0 or (plan.policy == "threshold" and batch >= plan.max_batch):
            return plain_s
        rates = self._goodput.acceptance.mean_rates()[:width]
        cumulative_acceptance = np.tile(np.cumprod(rates), (num_requests, 1))
        if plan.policy == "goodput":
            best = allocate(
                cumulative_acceptance,
                base_s=plain_s,
                fixed_s=cost.ask_s,
                pass_s=cost.pass_s(batch),
                added_s=cost.added_rows_s(num_requests, cumulative_acceptance.size),
                depths=range(1, len(rates) + 1),
                positions_per_pass=cost.positions_per_pass,
            )
            return best.seconds * num_requests / best.tokens
        rows = batch * (1 + len(rates))
        return cost.step_s(rows, context, batch, len(rates)) / float(1 + np.cumprod(rates).sum())
