"""Acceptance rates: how likely the target is to accept the next drafted token, per request and per position.

Owns the counts and the estimates made from them. There are three levels. The priors say what all engines of the app
have seen of a workload class. The position rates say what this engine has seen of it at each position. The request
factor says how much better or worse one request does than the position rates. Counts are decayed. Each level starts
from the level above, which counts as a few observations (a Beta prior with a mean and a strength).

Adapters of the target share nothing: a draft that predicts the base model well may predict an adapter badly. Each has
workload classes of its own, which start from the default prior.

Positions after a rejection, and positions at which the draft stopped early, were not reached and are not counted:
whether the draft goes on depends only on the tokens before a position, so leaving them out does not bias the rates.

In a tree the positions are its nodes in their order, the likeliest first. A rate is the acceptance of a node relative
to that of the node before it. So the product of the rates up to a node is the probability that the node is accepted:
its cumulative acceptance. For a chain, that is the rate given that the position is reached, with the same counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from engine.core.pacing import Prior
from engine.core.request import Request
from engine.core.stats import RowOutcome
from engine.messages import WORKLOADS, WorkloadClass

PRIOR_STRENGTH = 4.0
"""Number of observations that the prior of a position counts as."""
REQUEST_STRENGTH = 4.0
"""Number of expected acceptances that the factor 1 of a new request counts as."""
POSITION_DECAY = 0.999
"""Decay of the position counts per observation. The counts remember about a thousand observations."""
REQUEST_DECAY = 0.97
"""Decay of a request's sums per drafting step of that request. The sums remember about thirty steps."""
LOWEST, HIGHEST = 0.01, 0.99
"""Bounds of the acceptance rate of a request at a position."""
CALIBRATION_RATE, MOST_EXPONENT = 0.01, 10.0
"""Learning rate and upper bound of the exponent that maps a draft's confidence to acceptance."""
_INDEX = {workload: index for index, workload in enumerate(WORKLOADS)}

Floats = npt.NDArray[np.float64]


class AcceptanceClasses:
    """Rows of everything that is kept by class: the workload classes of the base model first, then those of each
    adapter in the order in which they were first seen."""

    def __init__(self) -> None:
        self._first: dict[str, int] = {"": 0}

    def row(self, workload: WorkloadClass, adapter: str = "") -> int:
        """Row of a workload class of an adapter, by name; empty for the base model."""
        first = self._first.get(adapter)
        if first is None:
            first = self._first[adapter] = len(self)
        return first + _INDEX[workload]

    def row_of(self, request: Request) -> int:
        """Row of a request."""
        return self.row(request.submit.sampling.workload, request.adapter_name)

    def __len__(self) -> int:
        return len(self._first) * len(WORKLOADS)


@dataclass(slots=True)
class _RequestRecord:
    """Decayed sums of one request, and the factor that follows from them."""

    accepted: float = 0.0
    """Number of accepted tokens."""
    expected: float = 0.0
    """Number of acceptances that the position rates predicted for the same drafts."""
    factor: float = 1.0
    """Acceptance of this request relative to an average request of its workload."""


class Acceptance:
    """Acceptance estimates for one engine and one drafting method.

    Args:
        max_k: number of positions that can be drafted.
        prior: [any length] acceptance rate by position before the first observation. Positions past its end take the
            last value; values past `max_k` are not used.
        classes: gives the rows; shared with whatever passes rows to this object.
    """

    def __init__(self, max_k: int, prior: Sequence[float], classes: AcceptanceClasses | None = None) -> None:
        self.classes = classes or AcceptanceClasses()
        """Rows of the estimates."""
        self._default = np.array([prior[min(j, len(prior) - 1)] for j in range(max_k)])
        self._prior = np.empty((0, max_k))  # [rows, max_k]
        self._reached = np.empty((0, max_k))
        self._accepted = np.empty((0, max_k))
        self._rates = np.empty((0, max_k))  # given that the position is reached
        # Acceptances to expect of a draft by the number of positions that it reaches, from 0 on.
        self._expected: list[list[float]] = []
        self._records: dict[int, _RequestRecord] = {}
        self._exponents: list[float] = []
        self._grow()
        self.has_confidences = False
        """Whether the draft has reported confidences."""

    @property
    def num_tracked(self) -> int:
        """Number of requests with a record."""
        return len(self._records)

    def by_position(self, workload: WorkloadClass = "greedy", adapter: str = "") -> Floats:
        """[max_k] acceptance rate of a workload by position, given that the position is reached."""
        row = self.classes.row(workload, adapter)
        self._grow()
        rates: Floats = self._rates[row].copy()
        return rates

    def rates(self) -> Floats:
        """[rows, max_k] `by_position` of every row of `classes`; a view that the caller must not write to."""
        self._grow()
        return self._rates

    def mean_rates(self) -> Floats:
        """[max_k] mean of `by_position` over all rows, weighted by how often each was observed."""
        weights = self._reached + 1e-3
        rates: Floats = (weights * self._rates).sum(axis=0) / weights.sum(axis=0)
        return rates

    def cumulative_acceptance(self, keys: Sequence[int], workloads: Sequence[WorkloadClass] | None = None) -> Floats:
        """[len(keys), max_k] probability that a request's draft is accepted up to and including each position.

        Args:
            keys: of the requests.
            workloads: class of each request; all greedy when left out.
        """
        indices = np.array([self.classes.row(workload) for workload in workloads or ["greedy"] * len(keys)])
        return self.cumulative_acceptance_of(keys, indices, self._rates.shape[1])

    def cumulative_acceptance_of(self, keys: Sequence[int], class_rows: npt.NDArray[np.int64], width: int) -> Floats:
        """[len(keys), width] `cumulative_acceptance` for classes given by their rows."""
        self._grow()
        records = self._records
        factors = [record.factor if (record := records.get(key)) is not None else 1.0 for key in keys]
        rates = self._rates.take(class_rows, axis=0)[:, :width]
        rates *= np.array(factors)[:, None]
        np.minimum(rates, HIGHEST, out=rates)
        np.maximum(rates, LOWEST, out=rates)
        return np.multiply.accumulate(rates, axis=1, out=rates)

    def observe(self, outcomes: Sequence[RowOutcome]) -> None:
        """Learn from the verification of each drafted row."""
        by_row: dict[int, list[RowOutcome]] = {}
        for outcome in outcomes:
            reached = min(outcome.num_accepted + 1, outcome.num_drafted)
            if reached == 0:
                continue
            row = self.classes.row(outcome.workload, outcome.adapter)
            self._grow()
            by_row.setdefault(row, []).append(outcome)
            expected = self._expected[row][reached] if not outcome.parents else self._of_tree(row, outcome)
            record = self._records.setdefault(outcome.key, _RequestRecord())
            record.accepted = REQUEST_DECAY * record.accepted + outcome.num_accepted
            record.expected = REQUEST_DECAY * record.expected + expected
            record.factor = (REQUEST_STRENGTH + record.accepted) / (REQUEST_STRENGTH + record.expected)
            if outcome.confidences:
                self._calibrate(row, outcome)
        for row, drafts in by_row.items():
            self._count(row, drafts)
            self._update(row)

    def adopt(self, priors: Sequence[Prior]) -> None:
        """Take the app's priors as the means that the position rates start from.

        A prior longer than `max_k` is cut; positions that a shorter one does not reach keep the default.
        """
        for prior in priors:
            row, width = self.classes.row(prior.workload, prior.adapter), min(len(prior.rates), len(self._default))
            self._grow()
            weights = np.minimum(np.array(prior.weights[:width]), PRIOR_STRENGTH) / PRIOR_STRENGTH
            means = weights * np.array(prior.rates[:width]) + (1 - weights) * self._default[:width]
            self._prior[row, :width] = means
            self._update(row)

    def forget(self, keys: Sequence[int]) -> None:
        """Drop the records of these requests; unknown keys are ignored."""
        for key in keys:
            self._records.pop(key, None)

    def confidence_at(self, cumulative_acceptance: float, class_row: int) -> float:
        """The product of a draft's confidences at which its cumulative acceptance has the given value.

        Acceptance is modelled as a power of the draft's confidence. The exponent is learned for each workload.
        """
        return float(min(1.0, max(0.0, cumulative_acceptance)) ** (1.0 / self._exponents[class_row]))

    def deeper_rate(self, class_row: int) -> float:
        """Mean acceptance rate of the second and third position; 0 where only one position can be drafted."""
        return float(self._rates[class_row, 1:3].mean()) if self._rates.shape[1] > 1 else 0.0

    def _grow(self) -> None:
        """Give every row of `classes` its prior and counts of zero."""
        added = len(self.classes) - len(self._rates)
        if added == 0:
            return
        prior = np.tile(self._default, (added, 1))
        self._prior, self._rates = np.vstack((self._prior, prior)), np.vstack((self._rates, prior))
        self._reached = np.vstack((self._reached, 0 * prior))
        self._accepted = np.vstack((self._accepted, 0 * prior))
        self._expected += [[0.0, *np.cumsum(rates).tolist()] for rates in prior]
        self._exponents += [1.0] * added

    def _of_tree(self, row: int, outcome: RowOutcome) -> float:
        """Acceptances to expect of the nodes that a tree has; all of them are verified."""
        return float(np.multiply.accumulate(self._rates[row, : outcome.num_drafted]).sum())

    def _count(self, row: int, drafts: Sequence[RowOutcome]) -> None:
        # All positions decay. A position that is no longer reached falls back to the estimate from those before it.
        keep = POSITION_DECAY ** len(drafts)
        chains = [draft for draft in drafts if not draft.parents]
        reached = [min(draft.num_accepted + 1, draft.num_drafted) for draft in chains]
        accepted = [draft.num_accepted for draft in chains]
        for counts, lengths in ((self._reached, reached), (self._accepted, accepted)):
            counts[row] *= keep
            if lengths:
                by_length = np.bincount(lengths, minlength=counts.shape[1] + 1)
                counts[row] += by_length[:0:-1].cumsum()[::-1]
        for draft in drafts:
            if draft.parents:
                self._count_tree(row, draft)

    def _count_tree(self, row: int, draft: RowOutcome) -> None:
        """A node counts as reached where the node before it in the order of the tree was accepted."""
        self._accepted[row, np.array(draft.accepted_nodes, dtype=np.int64)] += 1
        self._reached[row, np.array(draft.reached_nodes, dtype=np.int64)] += 1

    def _calibrate(self, row: int, outcome: RowOutcome) -> None:
        self.has_confidences = True
        exponent, excess = self._exponents[row], 0.0
        accepted, tried = {-1, *outcome.accepted_nodes}, set[int]()
        for node, confidence in enumerate(outcome.confidences):
            parent = outcome.parents[node] if outcome.parents else node - 1
            if parent in accepted and parent not in tried:  # The first of the siblings is the likeliest.
                tried.add(parent)
                excess += confidence**exponent - (node in accepted)
        changed = exponent * math.exp(CALIBRATION_RATE * excess)
        self._exponents[row] = min(MOST_EXPONENT, max(1 / MOST_EXPONENT, changed))

    def _update(self, row: int) -> None:
        """Recompute the rates from the counts.

        The prior of each position is scaled by how far the position before it was from its own prior. It decides the
        rate where few drafts reached the position.
        """
        rates: list[float] = []
        ratio = 1.0
        counts = (self._prior[row].tolist(), self._accepted[row].tolist(), self._reached[row].tolist())
        for prior, accepted, reached in zip(*counts, strict=True):
            expected = min(HIGHEST, ratio * prior)
            rates.append((accepted + PRIOR_STRENGTH * expected) / (reached + PRIOR_STRENGTH))
            ratio = rates[-1] / prior if prior > 0 else 1.0
        self._rates[row] = rates
        self._expected[row] = [0.0, *accumulate(rates)]


def workload_index(workload: WorkloadClass) -> int:
    """Row of a workload class of the base model, in every `AcceptanceClasses`."""
    return _INDEX[workload]
