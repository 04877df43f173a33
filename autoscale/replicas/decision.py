"""How many replicas: as few as keep the time per output token at its objective.

Owns the decision, as one pure function of what the replicas say. Each replica says how its time per token grows with
its batch, with drafting as it would be there: more replicas mean smaller batches, where drafting pays, so a replica
more can shorten a step and lengthen what it yields. Knows neither Serve nor Ray;
`deployments.cluster.serve_autoscaling` is the adapter.

Two demands are weighed against the largest batch b* that meets the objective:

    rate    tokens/s asked for over tokens/s of a replica at b*      what is needed if requests arrive at a rate
    width   requests at once over b*                                 what is needed while the objective is missed

At a given arrival rate fewer requests are under way when each ends sooner, so the second alone would scale too far.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.metrics.labels import ScalingReason

BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Batches at which a replica says its time per token."""
TPOT_PREFIX = "tpot_s_"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingParams:
    """What the operator wants."""

    tpot_s: float = 0.025
    """Objective: seconds per output token of a request."""
    headroom: float = 0.85
    """A replica goes only if the others then stay below this share of the objective."""
    nearest: float = 1.25
    """Where even a batch of one misses the objective: this many times what a batch of one takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """What one replica says, averaged over the last while."""

    num_running: float
    num_waiting: float
    tokens_per_s: float
    """Emitted."""
    tpot_s: tuple[float, ...]
    """Seconds per token of a request at each of BATCHES, with the K that pays there."""

    def as_numbers(self) -> dict[str, float]:
        """As Serve carries it: names and numbers."""
        curve = {f"{TPOT_PREFIX}{batch}": value for batch, value in zip(BATCHES, self.tpot_s, strict=True)}
        counts = {"running": self.num_running, "waiting": self.num_waiting, "tokens_per_s": self.tokens_per_s}
        return counts | curve

    @classmethod
    def from_numbers(cls, numbers: Mapping[str, float]) -> ReplicaLoad | None:
        """The reverse of `as_numbers`; None while a replica has not said everything."""
        try:
            return cls(
                num_running=numbers["running"],
                num_waiting=numbers["waiting"],
                tokens_per_s=numbers["tokens_per_s"],
                tpot_s=tuple(numbers[f"{TPOT_PREFIX}{batch}"] for batch in BATCHES),
            )
        except KeyError:
            return None


@dataclass(frozen=True, slots=True)
class ReplicaDecision:
    """How many replicas there should be, and why."""

    replicas: int
    reason: ScalingReason
    tpot_s: float = 0.0
    """Predicted at that number; 0 where nothing is known."""


def decide(
    snapshot: Sequence[ReplicaLoad], *, target: int, minimum: int, maximum: int, params: ScalingParams
) -> ReplicaDecision:
    """The number of replicas.

    Args:
        readings: of the replicas that said something.
        target: replicas wanted so far.
        minimum, maximum: bounds.
    """
    if not snapshot:
        return ReplicaDecision(min(maximum, max(minimum, target)), "no_data")
    curve = _mean_curve(snapshot)
    objective = max(params.tpot_s, params.nearest * curve[0])
    reachable = curve[0] <= params.tpot_s
    demand = _demand(snapshot)
    wanted = _needed(demand, curve, objective, target)
    with_headroom = _needed(demand, curve, max(params.headroom * objective, curve[0]), target)
    if wanted > target:
        number, reason = wanted, _why(demand, reachable)
    elif with_headroom < target:
        number, reason = with_headroom, "spare"
    else:
        number, reason = target, "steady" if reachable else "unreachable"
    number = min(maximum, max(minimum, number))
    return ReplicaDecision(number, reason, _at(curve, _batch(demand, curve, number)))


@dataclass(frozen=True, slots=True)
class _Demand:
    """Of all replicas."""

    width: float
    """Requests at once, those that wait included."""
    num_waiting: float
    tokens_per_s: float
    """Emitted now, and what those that wait would add."""


def _demand(snapshot: Sequence[ReplicaLoad]) -> _Demand:
    running = sum(reading.num_running for reading in snapshot)
    waiting = sum(reading.num_waiting for reading in snapshot)
    rate = sum(reading.tokens_per_s for reading in snapshot)
    return _Demand(running + waiting, waiting, rate * (running + waiting) / running if running > 0 else rate)


def _why(demand: _Demand, reachable: bool) -> ScalingReason:
    if not reachable:
        return "unreachable"
    return "queue" if demand.num_waiting >= 1 else "slow"


def _needed(demand: _Demand, curve: Sequence[float], objective: float, target: int) -> int:
    """Replicas with which the time per token stays within `objective`."""
    largest = _largest_batch(curve, objective)
    needed = demand.tokens_per_s * objective / largest
    if demand.width > largest * target:
        needed = max(needed, demand.width / largest)
    return max(1, math.ceil(needed - 1e-9))


def _mean_curve(snapshot: Sequence[ReplicaLoad]) -> list[float]:
    """Mean over replicas, made non-decreasing."""
    curve: list[float] = []
    for index in range(len(BATCHES)):
        mean = sum(reading.tpot_s[index] for reading in snapshot) / len(snapshot)
        curve.append(max(mean, curve[-1] if curve else 1e-6))
    return curve


def _largest_batch(curve: Sequence[float], objective: float) -> float:
    """Where the curve crosses the objective; within BATCHES."""
    for index in range(1, len(BATCHES)):
        if curve[index] > objective:
            low, high = BATCHES[index - 1], BATCHES[index]
            share = (objective - curve[index - 1]) / (curve[index] - curve[index - 1])
            return low + max(0.0, share) * (high - low)
    return BATCHES[-1]


def _batch(demand: _Demand, curve: Sequence[float], replicas: int) -> float:
    """The batch at which a replica serves its share of the rate; at most its share of the width when that is larger."""
    rate = demand.tokens_per_s / replicas
    widest = max(1.0, demand.width / replicas)
    batch = 1.0
    while batch / _at(curve, batch) < rate and batch < min(widest, BATCHES[-1]):
        batch += 0.5
    return batch


def _at(curve: Sequence[float], batch: float) -> float:
    """The curve between its points; beyond the last one its last slope goes on."""
    index = next((i for i in range(1, len(BATCHES)) if batch <= BATCHES[i]), len(BATCHES) - 1)
    low, high = BATCHES[index - 1], BATCHES[index]
    return curve[index - 1] + (batch - low) / (high - low) * (curve[index] - curve[index - 1])
