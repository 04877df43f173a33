"""A choice that is used for several steps, because choosing takes time from the steps.

Owns the choice and how long it holds. Knows no costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoscale.policy.acceptance_rate import AcceptanceClasses
from autoscale.policy.allocation import Allocation
from engine.core.pacing import KChoice, SpeculationPlan
from engine.core.request import Request

HELD_STEPS = 8
"""Number of steps for which a choice holds."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """K for a batch, and what the step is expected to give with it."""

    choices: Sequence[KChoice]
    """[B] One choice per request."""
    expected: Allocation | None
    """Prediction for the step; None where it was not computed."""


class HeldChoice:
    """The choice of one engine that holds at present.

    It holds while the plan, the batch and the number of prompt rows stay the same. While drafting is off, every request
    of a workload gets the same choice, so the choice then holds for any batch.

    At 32 requests a new choice takes about 95 us and a held one 1.5 us. So a step of a steady batch spends about 15 us
    on it (one x86 core, `bench/pace/choice_time.py`).

    Args:
        classes: gives the rows of requests.
    """

    def __init__(self, classes: AcceptanceClasses | None = None) -> None:
        self._classes = classes or AcceptanceClasses()
        self._chosen = Chosen((), None)
        self._plan: SpeculationPlan | None = None
        self._keys: Sequence[int] = ()
        self._num_prefill_rows = 0
        self._num_steps = 0  # for which it still holds
        self._by_workload: Sequence[KChoice] | None = None

    def take(
        self, plan: SpeculationPlan, decodes: Sequence[Request], keys: Sequence[int], num_prefill_rows: int
    ) -> Chosen | None:
        """The choice for one more step of this batch; None where a new one must be made.

        Args:
            plan: the plan in force; compared by identity.
            decodes: the requests of the batch.
            keys: their keys.
            num_prefill_rows: rows of prompts in the same step.
        """
        if plan is not self._plan or self._num_steps == 0:
            return None
        self._num_steps -= 1
        if keys == self._keys and num_prefill_rows == self._num_prefill_rows:
            return self._chosen
        if self._by_workload is None:
            return None
        by_workload = self._by_workload
        rows = [self._classes.row_of(request) for request in decodes]
        if max(rows, default=0) >= len(by_workload):
            return None  # An adapter that was not there when the choice was made.
        choices = [by_workload[row] for row in rows]
        return Chosen(choices, None)

    def hold(
        self,
        chosen: Chosen,
        plan: SpeculationPlan,
        keys: Sequence[int],
        num_prefill_rows: int,
        *,
        num_steps: int,
        by_workload: Sequence[KChoice] | None,
    ) -> None:
        """Hold a choice that was made for one step.

        Args:
            chosen: the choice.
            plan, keys, num_prefill_rows: what it was made for.
            num_steps: further steps for which it holds.
            by_workload: the choice of every request by row of `AcceptanceClasses`, whatever the batch; None where it
                depends on the batch.
        """
        self._chosen, self._plan, self._keys, self._num_prefill_rows = chosen, plan, keys, num_prefill_rows
        self._num_steps, self._by_workload = num_steps, by_workload
