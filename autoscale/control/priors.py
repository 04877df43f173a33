"""What all engines of an app have seen of each kind of draft, pooled: where every new request's estimate starts.

Owns decayed counts by drafting method and kind of request. Kinds nobody has seen yet start from what was seen of the
others. A plan carries rates with their weights, so that a controller made anew goes on from what engines still hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from engine.config import Method
from engine.core.pacing import Prior
from engine.messages import WORKLOADS, WorkloadClass

DECAY = 0.999
"""Per observation; remembers about a thousand."""
SHARED_WEIGHT = 4.0
"""Observations of its own kind that what the other kinds show is worth."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What drafts are told apart by."""

    method: Method
    workload: WorkloadClass


@dataclass(frozen=True, slots=True)
class Counts:
    """Of one kind, by position."""

    reached: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()

    def __add__(self, other: Counts) -> Counts:
        return Counts(_add(self.reached, other.reached), _add(self.accepted, other.accepted))


def _add(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    longer, shorter = (one, other) if len(one) >= len(other) else (other, one)
    return tuple(a + b for a, b in zip(longer, shorter + (0,) * (len(longer) - len(shorter)), strict=True))


@dataclass(slots=True)
class _Sums:
    """Decayed counts of one kind, by position."""

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
    """Sums over engines."""

    def __init__(self) -> None:
        self._sums: dict[Kind, _Sums] = {}

    @property
    def is_empty(self) -> bool:
        return not self._sums

    def add(self, counts: Mapping[Kind, Counts]) -> None:
        """Take what an engine saw since its last report."""
        for kind, seen in counts.items():
            self._sums.setdefault(kind, _Sums()).add(seen.reached, seen.accepted)

    def adopt(self, priors: Iterable[Prior]) -> None:
        """Go on from what an earlier pool published."""
        for prior in priors:
            accepted = [rate * weight for rate, weight in zip(prior.rates, prior.weights, strict=True)]
            self._sums.setdefault(Kind(prior.method, prior.workload), _Sums()).add(prior.weights, accepted)

    def priors(self) -> tuple[Prior, ...]:
        """One per method that was seen and kind of request."""
        return tuple(
            self._prior(method, workload)
            for method in dict.fromkeys(kind.method for kind in self._sums)
            for workload in WORKLOADS
        )

    def _prior(self, method: Method, workload: WorkloadClass) -> Prior:
        own = self._sums.get(Kind(method, workload), _Sums())
        others = [sums for kind, sums in self._sums.items() if kind.method == method and sums is not own]
        width = max([len(own.reached), *(len(sums.reached) for sums in others)])
        rates, weights = [], []
        for position in range(width):
            reached, accepted = _at(own, position)
            seen = [_at(sums, position) for sums in others]
            all_reached = sum(r for r, _ in seen)
            shared = min(SHARED_WEIGHT, all_reached)
            weight = reached + shared
            mean = sum(a for _, a in seen) / all_reached if all_reached > 0 else 0.0
            rates.append((accepted + shared * mean) / weight if weight > 0 else 0.0)
            weights.append(weight)
        return Prior(method=method, workload=workload, rates=tuple(rates), weights=tuple(weights))


def _at(sums: _Sums, position: int) -> tuple[float, float]:
    return (sums.reached[position], sums.accepted[position]) if position < len(sums.reached) else (0.0, 0.0)
