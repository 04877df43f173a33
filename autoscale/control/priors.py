"""Acceptance of drafts pooled over all engines of an app: the priors from which every engine's estimates start.

Owns decayed counts by draft class. A class without observations starts from the other classes of the same method
and adapter. A plan carries the rates with their weights, so that a restarted controller continues from what the engines
still hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from engine.config import Method
from engine.core.pacing import Prior
from engine.messages import WORKLOADS, WorkloadClass

DECAY = 0.999
"""Decay of the counts per observation. They remember about a thousand observations."""
MAX_ADAPTERS = 64
"""Adapters whose acceptance is pooled."""
SHARED_WEIGHT = 4.0
"""Number of observations that the mean of the other classes counts as."""


@dataclass(frozen=True, slots=True)
class DraftClass:
    """Drafts that are pooled: those of one method for one workload class of one adapter."""

    method: Method
    workload: WorkloadClass
    adapter: str = ""
    """Name of the adapter; empty for the base model."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Draft tokens of one class by position."""

    reached: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()

    def __add__(self, other: Counts) -> Counts:
        return Counts(_add(self.reached, other.reached), _add(self.accepted, other.accepted))


def _add(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    longer, shorter = (one, other) if len(one) >= len(other) else (other, one)
    return tuple(a + b for a, b in zip(longer, shorter + (0,) * (len(longer) - len(shorter)), strict=True))


@dataclass(slots=True)
class _Sums:
    """Decayed counts of one draft class by position."""

    reached: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def add(self, reached: Iterable[float], accepted: Iterable[float]) -> None:
        for position, (r, a) in enumerate(zip(reached, accepted, strict=True)):
            if position == len(self.reached):
                self.reached.append(0.0)
                self.accepted.append(0.0)
            keep = DECAY**r
            self.reached[position] = keep * self.reached[position] + r
            self.accepted[position] = keep * self.accepted[position] + a


class PriorPool:
    """Sums over all engines of an app."""

    def __init__(self) -> None:
        self._sums: dict[DraftClass, _Sums] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added yet."""
        return not self._sums

    def add(self, counts: Mapping[DraftClass, Counts]) -> None:
        """Add the counts of one engine since its last report."""
        for draft_class, added in counts.items():
            sums = self._sums.pop(draft_class, None) or _Sums()
            sums.add(added.reached, added.accepted)
            self._sums[draft_class] = sums  # last: the order tells which adapters were counted longest ago
        self._bound()

    def adopt(self, priors: Iterable[Prior]) -> None:
        """Continue from the priors that an earlier pool published."""
        for prior in priors:
            accepted = [rate * weight for rate, weight in zip(prior.rates, prior.weights, strict=True)]
            self._sums.setdefault(DraftClass(prior.method, prior.workload, prior.adapter), _Sums()).add(
                prior.weights, accepted
            )

    def priors(self) -> tuple[Prior, ...]:
        """One prior per observed method and adapter, and workload class."""
        return tuple(
            self._prior(method, workload, adapter)
            for method, adapter in dict.fromkeys((each.method, each.adapter) for each in self._sums)
            for workload in WORKLOADS
        )

    def _prior(self, method: Method, workload: WorkloadClass, adapter: str) -> Prior:
        this = self._sums.get(DraftClass(method, workload, adapter), _Sums())
        others = [
            sums
            for each, sums in self._sums.items()
            if (each.method, each.adapter) == (method, adapter) and sums is not this
        ]
        width = max([len(this.reached), *(len(sums.reached) for sums in others)])
        rates, weights = [], []
        for position in range(width):
            reached, accepted = _at(this, position)
            of_others = [_at(sums, position) for sums in others]
            all_reached = sum(r for r, _ in of_others)
            shared = min(SHARED_WEIGHT, all_reached)
            weight = reached + shared
            mean = sum(a for _, a in of_others) / all_reached if all_reached > 0 else 0.0
            rates.append((accepted + shared * mean) / weight if weight > 0 else 0.0)
            weights.append(weight)
        return Prior(method=method, workload=workload, adapter=adapter, rates=tuple(rates), weights=tuple(weights))

    def _bound(self) -> None:
        """Forget the adapters that were counted longest ago, beyond MAX_ADAPTERS."""
        adapters = [adapter for adapter in dict.fromkeys(each.adapter for each in reversed(self._sums)) if adapter]
        for draft_class in [each for each in self._sums if each.adapter in adapters[MAX_ADAPTERS:]]:
            del self._sums[draft_class]


def _at(sums: _Sums, position: int) -> tuple[float, float]:
    """Counts reached and accepted at a position; zeros past the end."""
    return (sums.reached[position], sums.accepted[position]) if position < len(sums.reached) else (0.0, 0.0)
