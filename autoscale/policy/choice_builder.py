"""From K to `KChoice`: adds the early-exit threshold, the K of prompt lookup drafts and the least worth of a row.

Owns the price of a drafted position at the current goodput. K itself is chosen elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoscale.policy.acceptance_rate import Acceptance
from autoscale.policy.allocation import Allocation
from autoscale.policy.cost_model import CostModel
from autoscale.policy.lookup_k import LookupK
from engine.core.pacing import NUM_MATCH_CLASSES, KChoice
from engine.core.step import KReason

PRICED_ROWS = 4
"""Number of added rows over which the cost of one row is averaged."""
_NO_LOOKUP = (0,) * NUM_MATCH_CLASSES


class ChoiceBuilder:
    """Builds the choices of one engine.

    Args:
        cost: of this engine's steps.
        acceptance: of the draft method.
        lookup: of prompt lookup drafts that are asked before the method; None where that is not done.
    """

    def __init__(self, cost: CostModel, acceptance: Acceptance, lookup: LookupK | None) -> None:
        self._cost = cost
        self._acceptance = acceptance
        self._lookup = lookup
        self._price = self._row_price = self._node_price = 0.0
        self._lookup_ks: list[tuple[int, ...]] | None = None

    @property
    def has_lookup_drafts(self) -> bool:
        """Whether prompt lookup drafts of any length are worth their rows."""
        return self._lookup_ks is not None and any(map(any, self._lookup_ks))

    def reprice(self, best: Allocation, rows: int, max_k: int, goodput: float) -> None:
        """Set the price of a drafted position: goodput times the seconds of its row and of its share of a draft pass.

        An early exit saves no pass of a parallel draft.

        Args:
            best: the best allocation; its requests with K > 1 share the later passes.
            rows: rows of the step as chosen.
            max_k: upper bound of K.
            goodput: tokens per second of the step.
        """
        row_s = self._cost.row_s(rows, PRICED_ROWS)
        self._row_price = min(1.0, goodput * row_s)
        num_drafting = max(1, int(np.count_nonzero(best.ks)))
        self._node_price = goodput * self._cost.pass_s(num_drafting) / num_drafting
        num_deep = max(1, int(np.count_nonzero(best.ks > 1)))
        saved_s = self._cost.pass_s(num_deep) / num_deep**2 if self._cost.positions_per_pass == 1 else 0.0
        self._price = goodput * (row_s + saved_s)
        if self._lookup is not None:
            self._lookup_ks = self._lookup.ks(tokens_per_s=goodput, row_s=row_s, width=max_k)

    def build(
        self,
        ks: Sequence[int],
        workloads: Sequence[int],
        *,
        reason: KReason,
        zero_reason: KReason,
        lookup_allowed: bool = True,
    ) -> list[KChoice]:
        """One choice per request.

        Args:
            ks: [B] draft tokens of each request.
            workloads: [B] row of each request in `AcceptanceClasses`.
            reason: where K > 0.
            zero_reason: where K = 0.
            lookup_allowed: false for a step that must not draft at all.
        """
        built: dict[tuple[int, int], KChoice] = {}
        choices = []
        for pair in zip(ks, workloads, strict=True):
            choice = built.get(pair)
            if choice is None:
                k, workload = pair
                choice = KChoice(
                    k,
                    reason if k > 0 else zero_reason,
                    k_by_match=self._k_by_match(workload, lookup_allowed=lookup_allowed),
                    exit_threshold=self._exit_threshold(k, workload),
                    least_acceptance=self._least(k, reason, lookup_allowed=lookup_allowed),
                    node_price=self._node_price if k > 0 and reason != "probe" else 0.0,
                )
                built[pair] = choice
            choices.append(choice)
        return choices

    def zero_by_workload(self, reason: KReason) -> list[KChoice]:
        """The choice K = 0 by row of `AcceptanceClasses`."""
        num_workloads = len(self._acceptance.rates())
        return self.build([0] * num_workloads, range(num_workloads), reason=reason, zero_reason=reason)

    def _k_by_match(self, workload: int, *, lookup_allowed: bool) -> tuple[int, ...] | None:
        if self._lookup_ks is None:
            return None
        return self._lookup_ks[workload] if lookup_allowed else _NO_LOOKUP

    def _least(self, k: int, reason: KReason, *, lookup_allowed: bool) -> float:
        """A row is worth its time where it is accepted at least this often. A probe measures, so it keeps all nodes."""
        measures = reason == "probe" if k > 0 else self._lookup_ks is None or not lookup_allowed
        return 0.0 if measures else self._row_price

    def _exit_threshold(self, k: int, workload: int) -> float:
        """The draft goes on while the product of its confidences is at least this."""
        if k < 2 or not self._acceptance.has_confidences:
            return 0.0
        cumulative_acceptance = self._price / max(1e-3, self._acceptance.deeper_rate(workload))
        return self._acceptance.confidence_at(cumulative_acceptance, workload)
