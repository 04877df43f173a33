"""K of prompt lookup drafts, where prompt lookup is asked before a draft model.

Owns the acceptance of these drafts, apart from the model's own drafts and by the length of the match: two recurring
tokens are often chance, eight hardly ever. A tree with nodes of both counts here, because the model's acceptance must
not contain what lookup has without it. A lookup draft costs only its rows in the target's forward. So a row is drafted
where its cumulative acceptance exceeds the tokens that the step yields in the time the row takes. No switch and no
catching up are needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoscale.policy.acceptance_rate import Acceptance, AcceptanceClasses
from engine.core.pacing import NUM_MATCH_CLASSES, match_class
from engine.core.stats import RowOutcome

MARGIN = 1.1
"""Factor by which a row must exceed its price. Near the price nothing is gained, and the lookup also takes time."""
EXPLORE_CALLS = 64
"""One token is drafted in every so many calls although it does not seem to pay, to keep the estimate current."""
PRIORS = ((0.5, 0.65, 0.7), (0.6, 0.7, 0.75), (0.75, 0.8), (0.85,))
"""Acceptance rate by position before the first observation, per match class. The last value goes on."""


class LookupK:
    """K by match class and workload for one engine.

    Args:
        max_k: number of positions that can be drafted.
        classes: gives the rows of requests.
    """

    def __init__(self, max_k: int, classes: AcceptanceClasses | None = None) -> None:
        assert len(PRIORS) == NUM_MATCH_CLASSES
        classes = classes or AcceptanceClasses()
        self._acceptance = [Acceptance(max_k, prior, classes) for prior in PRIORS]
        self._num_calls = 0

    def acceptance_of(self, match_len: int) -> Acceptance:
        """The acceptance estimates of drafts whose match had so many tokens."""
        return self._acceptance[match_class(match_len)]

    def ks(self, *, tokens_per_s: float, row_s: float, width: int) -> list[tuple[int, ...]]:
        """K per match class, in a list by row of `AcceptanceClasses`.

        Args:
            tokens_per_s: goodput of the step.
            row_s: seconds that one more row costs the target.
            width: upper bound of K.
        """
        self._num_calls += 1
        least = min(width, int(self._num_calls % EXPLORE_CALLS == 0))
        by_class = []
        for acceptance in self._acceptance:
            cumulative = np.multiply.accumulate(acceptance.rates()[:, :width], axis=1)
            by_class.append(np.maximum((cumulative >= MARGIN * tokens_per_s * row_s).sum(axis=1), least).tolist())
        return list(zip(*by_class, strict=True))

    def observe(self, outcomes: Sequence[RowOutcome], ended: Sequence[int]) -> None:
        """Learn from the lookup drafts among `outcomes`, and forget the requests that ended."""
        by_class: list[list[RowOutcome]] = [[] for _ in self._acceptance]
        for outcome in outcomes:
            if outcome.source in ("lookup", "merged"):
                by_class[match_class(outcome.match_len)].append(outcome)
        for acceptance, matched in zip(self._acceptance, by_class, strict=True):
            acceptance.observe(matched)
            acceptance.forget(ended)
