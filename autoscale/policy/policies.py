"""Who chooses K: one small class per policy, and the pacer that follows the plan's choice among them.

Owns the rules and what they have observed. No torch, no Ray, no clock: a policy's choice depends on the plan, the
batch and the observed steps only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from engine.config import PolicyName
from engine.core.pacing import KChoice, Pacer, Prediction, SpeculationPlan
from engine.core.request import Request
from engine.core.stats import StepStats


class Off:
    """Never draft."""

    def choose(self, plan: SpeculationPlan, decodes: Sequence[Request], num_prefill_rows: int) -> Sequence[KChoice]:
        del plan, num_prefill_rows
        return [KChoice(0, "off")] * len(decodes)

    def observe(self, stats: StepStats) -> Prediction:
        """There is nothing to learn."""
        del stats
        return Prediction()


class Fixed:
    """The same K always."""

    def choose(self, plan: SpeculationPlan, decodes: Sequence[Request], num_prefill_rows: int) -> Sequence[KChoice]:
        del num_prefill_rows
        return [KChoice(plan.max_k, "plan")] * len(decodes)

    def observe(self, stats: StepStats) -> Prediction:
        """There is nothing to learn."""
        del stats
        return Prediction()


class Threshold:
    """The operators' rule: full K while the draft is accepted, 2 and then 1 while it is not, 0 in a large batch.

    K goes down a level when the mean number of accepted tokens per drafting step, over the last `window` finished
    requests, is below `lower_below`. A level of K tokens can show K accepted tokens at most. So K goes up again from
    `recover_share` of the level's K.

    Args:
        window: number of finished requests in the mean.
        lower_below: accepted tokens per drafting step below which K goes down.
        recover_share: share of the level's K from which K goes up.
    """

    def __init__(self, *, window: int = 10, lower_below: float = 1.5, recover_share: float = 0.75) -> None:
        self._lower_below = lower_below
        self._recover_share = recover_share
        self._level = 0
        self._accepted: deque[float] = deque(maxlen=window)

    def choose(self, plan: SpeculationPlan, decodes: Sequence[Request], num_prefill_rows: int) -> Sequence[KChoice]:
        del num_prefill_rows
        if len(decodes) >= plan.max_batch:
            return [KChoice(0, "batch")] * len(decodes)
        levels = (plan.max_k, min(2, plan.max_k), min(1, plan.max_k))
        self._move(levels)
        return [KChoice(levels[self._level], "plan" if self._level == 0 else "acceptance")] * len(decodes)

    def observe(self, stats: StepStats) -> Prediction:
        self._accepted.extend(stats.accepted_per_finished)
        return Prediction()

    def _move(self, levels: Sequence[int]) -> None:
        """Go one level up or down when the window is full and says so."""
        if len(self._accepted) < (self._accepted.maxlen or 0):
            return
        mean = sum(self._accepted) / len(self._accepted)
        before = self._level
        if self._level > 0 and mean >= self._recover_share * levels[self._level]:
            self._level -= 1
        elif self._level < len(levels) - 1 and mean < min(self._lower_below, self._recover_share * levels[self._level]):
            self._level += 1
        if self._level != before:
            self._accepted.clear()


class PolicyPacer:
    """Follows the policy that the plan in force names. Implements `engine.core.pacing.Pacer`.

    Args:
        goodput: the policy of that name. It observes every step and predicts it, whichever policy chose K.
    """

    def __init__(self, goodput: Pacer) -> None:
        self._goodput = goodput
        self._policies: dict[PolicyName, Pacer] = {
            "off": Off(),
            "fixed": Fixed(),
            "threshold": Threshold(),
            "goodput": goodput,
        }

    def choose(self, plan: SpeculationPlan, decodes: Sequence[Request], num_prefill_rows: int) -> Sequence[KChoice]:
        policy = plan.policy if plan.enabled else "off"
        return self._policies[policy].choose(plan, decodes, num_prefill_rows)

    def observe(self, stats: StepStats) -> Prediction:
        for policy in self._policies.values():
            if policy is not self._goodput:
                policy.observe(stats)
        return self._goodput.observe(stats)
