"""K of drafts that cost nothing but their rows: prompt lookup that is asked before a model.

Owns what was seen of them, apart from the model's own drafts, and their price: a row is worth it where it is likelier
to stand than the goodput of the step has tokens in the time it takes. No switch and no catching up are needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoscale.acceptance import Acceptance
from engine.step import RowOutcome

EXPLORE_CALLS = 16
"""So often one token is drafted although it does not seem to pay."""


class FreeDrafts:
    """Of one engine.

    Args:
        acceptance: of these drafts alone.
    """

    def __init__(self, acceptance: Acceptance) -> None:
        self.acceptance = acceptance
        self._num_calls = 0

    def ks(self, *, tokens_per_s: float, row_s: float, width: int) -> list[int]:
        """K by kind, as kinds are numbered in Acceptance.

        Args:
            tokens_per_s: goodput of the step.
            row_s: seconds that a row more costs the target.
            width: upper bound of K.
        """
        self._num_calls += 1
        least = min(width, int(self._num_calls % EXPLORE_CALLS == 0))
        stands = np.multiply.accumulate(self.acceptance.rates()[:, :width], axis=1)
        ks: list[int] = np.maximum((stands >= tokens_per_s * row_s).sum(axis=1), least).tolist()
        return ks

    def observe(self, outcomes: Sequence[RowOutcome], ended: Sequence[int]) -> None:
        self.acceptance.observe([outcome for outcome in outcomes if outcome.source == "lookup"])
        self.acceptance.forget(ended)
