"""How likely the next drafted token of a request is to stand: per request and per position, with little evidence.

Owns the counts. Two levels: what holds at each position over all requests of this engine, and how much better or worse
one request does than that. Both are decayed counts with a prior worth a few observations (a Beta prior's mean and
strength). Positions behind a rejection were never reached and count as nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.step import RowOutcome

PRIOR_STRENGTH = 8.0
"""Observations that the prior of a position is worth."""
REQUEST_STRENGTH = 4.0
"""Expected acceptances that the belief in an average request is worth."""
POSITION_DECAY = 0.999
"""Per observation; remembers about a thousand."""
REQUEST_DECAY = 0.97
"""Per drafting step of that request; remembers about thirty."""
LOWEST, HIGHEST = 0.01, 0.99


@dataclass(slots=True)
class _Record:
    """Decayed sums of one request."""

    accepted: float = 0.0
    expected: float = 0.0


class Acceptance:
    """Estimates for one engine and one drafting method.

    Args:
        max_k: positions that can ever be drafted.
        prior: probability at each position before anything was seen; the last one goes on.
    """

    def __init__(self, max_k: int, prior: Sequence[float]) -> None:
        means = [prior[min(j, len(prior) - 1)] for j in range(max_k)]
        self._reached = np.full(max_k, PRIOR_STRENGTH)
        self._accepted = np.array(means) * PRIOR_STRENGTH
        self._records: dict[int, _Record] = {}

    @property
    def num_tracked(self) -> int:
        """Requests something is remembered of."""
        return len(self._records)

    def by_position(self) -> npt.NDArray[np.float64]:
        """[max_k] over all requests: probability of acceptance, given that the position is reached."""
        rates: npt.NDArray[np.float64] = self._accepted / self._reached
        return rates

    def survival(self, keys: Sequence[int]) -> npt.NDArray[np.float64]:
        """[len(keys), max_k] probability that a request's draft stands up to and including each position."""
        skill = np.array([self._skill(key) for key in keys])
        rates = np.clip(skill[:, None] * self.by_position()[None, :], LOWEST, HIGHEST)
        survival: npt.NDArray[np.float64] = np.multiply.accumulate(rates, axis=1)
        return survival

    def observe(self, outcomes: Sequence[RowOutcome]) -> None:
        """Learn from what the verifier said of each drafted row."""
        rates = self.by_position()
        for outcome in outcomes:
            reached = min(outcome.num_accepted + 1, outcome.num_drafted)
            if reached == 0:
                continue
            record = self._records.setdefault(outcome.key, _Record())
            record.accepted = REQUEST_DECAY * record.accepted + outcome.num_accepted
            record.expected = REQUEST_DECAY * record.expected + float(rates[:reached].sum())
            self._reached[:reached] = POSITION_DECAY * self._reached[:reached] + 1.0
            self._accepted[:reached] *= POSITION_DECAY
            self._accepted[: outcome.num_accepted] += 1.0

    def forget(self, keys: Sequence[int]) -> None:
        for key in keys:
            self._records.pop(key, None)

    def _skill(self, key: int) -> float:
        record = self._records.get(key)
        if record is None:
            return 1.0
        return (REQUEST_STRENGTH + record.accepted) / (REQUEST_STRENGTH + record.expected)
