"""How likely the next drafted token of a request is to stand: per request and per position, with little evidence.

Owns the counts. Three levels: what the whole app has seen of this kind of request (priors, from the plan), what this
engine has seen of it at each position, and how much better or worse one request does than that. Counts are decayed;
the level above is worth a few observations of the level below (a Beta prior's mean and strength). Positions behind a
rejection, and those the draft stopped before, were never reached and count as nothing: whether it goes on depends on
what stands before a position, not on what would have become of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from engine.core.pacing import Prior
from engine.core.stats import RowOutcome
from engine.messages import WORKLOADS, WorkloadClass

PRIOR_STRENGTH = 4.0
"""Observations that the prior of a position is worth."""
REQUEST_STRENGTH = 4.0
"""Expected acceptances that the belief in an average request is worth."""
POSITION_DECAY = 0.999
"""Per observation; remembers about a thousand."""
REQUEST_DECAY = 0.97
"""Per drafting step of that request; remembers about thirty."""
LOWEST, HIGHEST = 0.01, 0.99
CALIBRATION_RATE, MOST_EXPONENT = 0.01, 10.0
_INDEX = {workload: index for index, workload in enumerate(WORKLOADS)}

Floats = npt.NDArray[np.float64]


@dataclass(slots=True)
class _Record:
    """Decayed sums of one request, and what follows from them."""

    accepted: float = 0.0
    expected: float = 0.0
    skill: float = 1.0
    """Acceptance over what an average request of its kind would have had."""


class Acceptance:
    """Estimates for one engine and one drafting method.

    Args:
        max_k: positions that can ever be drafted.
        prior: probability at each position before anything was seen; the last one goes on.
    """

    def __init__(self, max_k: int, prior: Sequence[float]) -> None:
        self._default = np.array([prior[min(j, len(prior) - 1)] for j in range(max_k)])
        self._prior = np.tile(self._default, (len(WORKLOADS), 1))  # [workloads, max_k]
        self._reached = np.zeros((len(WORKLOADS), max_k))
        self._accepted = np.zeros((len(WORKLOADS), max_k))
        self._rates = self._prior.copy()  # given that the position is reached
        # Acceptances to be expected of a draft by the number of positions it reaches, from 0 on.
        self._expected = [[0.0, *np.cumsum(rates).tolist()] for rates in self._rates]
        self._records: dict[int, _Record] = {}
        self._exponents = [1.0] * len(WORKLOADS)
        self.has_confidences = False

    @property
    def num_tracked(self) -> int:
        """Requests something is remembered of."""
        return len(self._records)

    def by_position(self, workload: WorkloadClass = "greedy") -> Floats:
        """[max_k] over all requests of a kind: probability of acceptance, given that the position is reached."""
        rates: Floats = self._rates[_INDEX[workload]].copy()
        return rates

    def rates(self) -> Floats:
        """[kinds, max_k] as `by_position`; not to be written to."""
        return self._rates

    def mean_rates(self) -> Floats:
        """[max_k] as `by_position`, over all kinds in the shares in which they were seen."""
        weights = self._reached + 1e-3
        rates: Floats = (weights * self._rates).sum(axis=0) / weights.sum(axis=0)
        return rates

    def cumulative_acceptance(self, keys: Sequence[int], workloads: Sequence[WorkloadClass] | None = None) -> Floats:
        """[len(keys), max_k] probability that a request's draft stands up to and including each position.

        Args:
            workloads: of each request; all greedy when left out.
        """
        kinds = np.array([_INDEX[workload] for workload in workloads or ["greedy"] * len(keys)])
        return self.cumulative_acceptance_of(keys, kinds, self._rates.shape[1])

    def cumulative_acceptance_of(self, keys: Sequence[int], kinds: npt.NDArray[np.int64], width: int) -> Floats:
        """[len(keys), width] as `cumulative_acceptance`, for kinds that are looked up already (`kind_of`)."""
        records = self._records
        skills = [record.skill if (record := records.get(key)) is not None else 1.0 for key in keys]
        rates = self._rates[kinds, :width]
        rates *= np.array(skills)[:, None]
        np.minimum(rates, HIGHEST, out=rates)
        np.maximum(rates, LOWEST, out=rates)
        return np.multiply.accumulate(rates, axis=1, out=rates)

    def observe(self, outcomes: Sequence[RowOutcome]) -> None:
        """Learn from what the verifier said of each drafted row."""
        lengths: dict[int, list[tuple[int, int]]] = {}  # by kind: reached and accepted tokens of each draft
        for outcome in outcomes:
            reached = min(outcome.num_accepted + 1, outcome.num_drafted)
            if reached == 0:
                continue
            kind = _INDEX[outcome.workload]
            lengths.setdefault(kind, []).append((reached, outcome.num_accepted))
            record = self._records.setdefault(outcome.key, _Record())
            record.accepted = REQUEST_DECAY * record.accepted + outcome.num_accepted
            record.expected = REQUEST_DECAY * record.expected + self._expected[kind][reached]
            record.skill = (REQUEST_STRENGTH + record.accepted) / (REQUEST_STRENGTH + record.expected)
            if outcome.confidences:
                self._calibrate(kind, outcome)
        for kind, drafts in lengths.items():
            self._count(kind, drafts)
            self._update(kind)

    def _count(self, kind: int, drafts: Sequence[tuple[int, int]]) -> None:
        # All positions fade: one that is not asked for any more is told by those before it after a while.
        keep = POSITION_DECAY ** len(drafts)
        for counts, seen in zip((self._reached, self._accepted), zip(*drafts, strict=True), strict=True):
            by_length = np.bincount(seen, minlength=counts.shape[1] + 1)
            counts[kind] *= keep
            counts[kind] += by_length[:0:-1].cumsum()[::-1]

    def believe(self, priors: Sequence[Prior]) -> None:
        """Start from these where nothing, or little, was seen here."""
        for prior in priors:
            kind, width = _INDEX[prior.workload], min(len(prior.rates), len(self._default))
            weights = np.minimum(np.array(prior.weights[:width]), PRIOR_STRENGTH) / PRIOR_STRENGTH
            means = weights * np.array(prior.rates[:width]) + (1 - weights) * self._default[:width]
            self._prior[kind, :width] = means
            self._update(kind)

    def forget(self, keys: Sequence[int]) -> None:
        for key in keys:
            self._records.pop(key, None)

    def confidence_of(self, cumulative_acceptance: float, kind: int) -> float:
        """The product of a draft's confidences at which it stands with this probability.

        Acceptance is taken to be a power of the draft's confidence, learnt for each kind.
        """
        return float(min(1.0, max(0.0, cumulative_acceptance)) ** (1.0 / self._exponents[kind]))

    def deeper(self, kind: int) -> float:
        """Acceptance of the positions right behind the first one."""
        return float(self._rates[kind, 1:3].mean()) if self._rates.shape[1] > 1 else 0.0

    def _calibrate(self, kind: int, outcome: RowOutcome) -> None:
        self.has_confidences = True
        exponent, excess = self._exponents[kind], 0.0
        for position, confidence in enumerate(outcome.confidences[: outcome.num_accepted + 1]):
            excess += confidence**exponent - (position < outcome.num_accepted)
        changed = exponent * math.exp(CALIBRATION_RATE * excess)
        self._exponents[kind] = min(MOST_EXPONENT, max(1 / MOST_EXPONENT, changed))

    def _update(self, kind: int) -> None:
        """Accepted over reached; where little was reached, the prior as far off as it was a position before."""
        rates: list[float] = []
        off = 1.0
        counts = (self._prior[kind].tolist(), self._accepted[kind].tolist(), self._reached[kind].tolist())
        for prior, accepted, reached in zip(*counts, strict=True):
            expected = min(HIGHEST, off * prior)
            rates.append((accepted + PRIOR_STRENGTH * expected) / (reached + PRIOR_STRENGTH))
            off = rates[-1] / prior if prior > 0 else 1.0
        self._rates[kind] = rates
        self._expected[kind] = [0.0, *accumulate(rates)]


def kind_of(workload: WorkloadClass) -> int:
    """Row of a kind of request in `Acceptance`."""
    return _INDEX[workload]
