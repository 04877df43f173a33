"""K of drafts that cost nothing but their rows: prompt lookup that is asked before a model.

Owns what was seen of them, apart from the model's own drafts and by how much of the context recurred (two tokens in a
row are often chance, eight hardly ever), and their price: a row is worth it where it is likelier to stand than the
goodput of the step has tokens in the time it takes. No switch and no catching up are needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoscale.policy.acceptance_rate import Acceptance
from engine.core.pacing import NUM_MATCH_CLASSES, match_class
from engine.core.stats import RowOutcome

MARGIN = 1.1
"""A row has to promise so many times its price: close to it nothing is won, and looking it up takes time, too."""
EXPLORE_CALLS = 64
"""So often one token is drafted although it does not seem to pay."""
PRIORS = ((0.5, 0.65, 0.7), (0.6, 0.7, 0.75), (0.75, 0.8), (0.85,))
"""Acceptance by position before anything was seen, per match class; the last one goes on."""


class LookupK:
    """Of one engine.

    Args:
        max_k: positions that can ever be drafted.
    """

    def __init__(self, max_k: int) -> None:
        assert len(PRIORS) == NUM_MATCH_CLASSES
        self._acceptance = [Acceptance(max_k, prior) for prior in PRIORS]
        self._num_calls = 0

    def acceptance_of(self, match_len: int) -> Acceptance:
        """What was seen of drafts where so many tokens recurred."""
        return self._acceptance[match_class(match_len)]

    def ks(self, *, tokens_per_s: float, row_s: float, width: int) -> list[tuple[int, ...]]:
        """K per match class, by kind, as kinds are numbered in Acceptance.

        Args:
            tokens_per_s: goodput of the step.
            row_s: seconds that a row more costs the target.
            width: upper bound of K.
        """
        self._num_calls += 1
        least = min(width, int(self._num_calls % EXPLORE_CALLS == 0))
        by_class = []
        for acceptance in self._acceptance:
            stands = np.multiply.accumulate(acceptance.rates()[:, :width], axis=1)
            by_class.append(np.maximum((stands >= MARGIN * tokens_per_s * row_s).sum(axis=1), least).tolist())
        return list(zip(*by_class, strict=True))

    def observe(self, outcomes: Sequence[RowOutcome], ended: Sequence[int]) -> None:
        """Learn from what became of them."""
        found: list[list[RowOutcome]] = [[] for _ in self._acceptance]
        for outcome in outcomes:
            if outcome.source == "lookup":
                found[match_class(outcome.match_len)].append(outcome)
        for acceptance, own in zip(self._acceptance, found, strict=True):
            acceptance.observe(own)
            acceptance.forget(ended)
