"""Who chooses K: one small class per policy, and the pacer that follows the plan's choice among them.

Owns the rules and what they have observed. No torch, no Ray, no clock: what a policy answers depends on the plan, the
batch and the steps it was told of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from engine.config import PolicyName
from engine.core.pacing import KChoice, Pacer, SpeculationPlan
from engine.core.request import Request
from engine.core.stats import StepStats


class Off:
    """Never draft."""

    def choose(self, plan: SpeculationPlan, decodes: Sequence[Request], num_prefill_rows: int) -> Sequence[KChoice]:
        del plan, num_prefill_rows
        return [KChoice(0, "off")] * len(decodes)

    def observe(self, stats: StepStats) -> None:
        """Nothing to learn."""
        del stats


class Fixed:
    """The same K always."""

    def choose(self, plan: SpeculationPlan, decodes: Sequence[Request], num_prefill_rows: int) -> Sequence[KChoice]:
        del num_prefill_rows
        return [KChoice(plan.max_k, "plan")] * len(decodes)

    def observe(self, stats: StepStats) -> None:
        """Nothing to learn."""
        del stats


class Threshold:
    """The operators' rule: full K while the draft is believed, 2 and then 1 while it is not, 0 in a large batch.

    Down a rung when the mean number of accepted tokens per drafting step over the last `window` finished requests is
    below 1.5. A rung of K tokens can at best show K, so the way back up asks for three quarters of the rung's K.
    """

    def __init__(self, *, window: int = 10, exit_threshold: float = 1.5, recover: float = 0.75) -> None:
        self._floor = exit_threshold
        self._recover = recover
        self._rung = 0
        self._accepted: deque[float] = deque(maxlen=window)

    def choose(self, plan: SpeculationPlan, decodes: Sequence[Request], num_prefill_rows: int) -> Sequence[KChoice]:
        del num_prefill_rows
        if len(decodes) >= plan.max_batch:
            return [KChoice(0, "batch")] * len(decodes)
        rungs = (plan.max_k, min(2, plan.max_k), min(1, plan.max_k))
        self._climb(rungs)
        return [KChoice(rungs[self._rung], "plan" if self._rung == 0 else "acceptance")] * len(decodes)

    def observe(self, stats: StepStats) -> None:
        self._accepted.extend(stats.accepted_per_finished)

    def _climb(self, rungs: Sequence[int]) -> None:
        if len(self._accepted) < (self._accepted.maxlen or 0):
            return
        mean = sum(self._accepted) / len(self._accepted)
        before = self._rung
        if self._rung > 0 and mean >= self._recover * rungs[self._rung]:
            self._rung -= 1
        elif self._rung < len(rungs) - 1 and mean < min(self._floor, self._recover * rungs[self._rung]):
            self._rung += 1
        if self._rung != before:
            self._accepted.clear()


class PolicyPacer:
    """Follows whichever policy the plan in force names. Implements `engine.core.pacing.Pacer`.

    Args:
        goodput: the policy of that name, which needs to know what steps cost.
    """

    def __init__(self, goodput: Pacer) -> None:
        self._policies: dict[PolicyName, Pacer] = {
            "off": Off(),
            "fixed": Fixed(),
            "threshold": Threshold(),
            "goodput": goodput,
        }

    def choose(self, plan: SpeculationPlan, decodes: Sequence[Request], num_prefill_rows: int) -> Sequence[KChoice]:
        policy = plan.policy if plan.enabled else "off"
        return self._policies[policy].choose(plan, decodes, num_prefill_rows)

    def observe(self, stats: StepStats) -> None:
        for policy in self._policies.values():
            policy.observe(stats)
