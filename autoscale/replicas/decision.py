"""How many replicas: the fewest that keep the time per output token (TPOT) at its objective.

Owns the decision, as one pure function of the replicas' loads. Each replica reports its TPOT by batch size, with the
drafting that would pay there. More replicas mean smaller batches, in which drafting pays more. So one more replica can
both shorten a step and raise the tokens that it yields. Knows neither Serve nor Ray;
`deployments.fleet.serve_autoscaling` is the adapter.

Two demands are compared with the largest batch b* that meets the objective:

    rate    requested tokens/s over tokens/s of a replica at b*      needed where requests arrive at a given rate
    width   concurrent requests over b*                              needed while the objective is missed

b* is at most the largest batch that a replica computes, because requests above it wait however fast the steps are.

At a given arrival rate fewer requests are concurrent when each ends sooner, so the width alone would scale too far.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.metrics.labels import ScalingReason

BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Batch sizes at which a replica reports its TPOT."""
TPOT_PREFIX = "tpot_s_"
"""Name of a TPOT in `ReplicaLoad.as_numbers`, without the batch size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingParams:
    """The operator's objective."""

    tpot_s: float = 0.025
    """Largest TPOT of a request in seconds."""
    headroom: float = 0.85
    """Share of the objective, and of the largest batch, below which the rest must stay after a replica is removed."""
    nearest: float = 1.25
    """The objective where a batch of one misses it: this many times the TPOT of a batch of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """Load of one replica, averaged over its last reports."""

    num_running: float
    """Requests in the batch."""
    num_waiting: float
    """Requests that wait to enter the batch."""
    tokens_per_s: float
    """Emitted tokens per second."""
    tpot_s: tuple[float, ...]
    """[len(BATCHES)] Seconds per output token of a request at each batch size, with the K that pays there."""
    max_running: float
    """Largest batch that the replica computes; further requests wait."""

    def as_numbers(self) -> dict[str, float]:
        """The load as Serve transports it: numbers by name."""
        curve = {f"{TPOT_PREFIX}{batch}": value for batch, value in zip(BATCHES, self.tpot_s, strict=True)}
        counts = {"running": self.num_running, "waiting": self.num_waiting, "tokens_per_s": self.tokens_per_s}
        counts["max_running"] = self.max_running
        return counts | curve

    @classmethod
    def from_numbers(cls, numbers: Mapping[str, float]) -> ReplicaLoad | None:
        """The inverse of `as_numbers`; None where a number is missing."""
        try:
            return cls(
                num_running=numbers["running"],
                num_waiting=numbers["waiting"],
                tokens_per_s=numbers["tokens_per_s"],
                tpot_s=tuple(numbers[f"{TPOT_PREFIX}{batch}"] for batch in BATCHES),
                max_running=numbers["max_running"],
            )
        except KeyError:
            return None


@dataclass(frozen=True, slots=True)
class ReplicaDecision:
    """How many replicas there should be, and why."""

    replicas: int
    """Number of replicas."""
    reason: ScalingReason
    """Why that number."""
    tpot_s: float = 0.0
    """Predicted TPOT at that number in seconds; 0 where no replica has reported."""


def decide(
    loads: Sequence[ReplicaLoad], *, target: int, minimum: int, maximum: int, params: ScalingParams
) -> ReplicaDecision:
    """Decide the number of replicas.

    Args:
        loads: of the replicas that have reported.
        target: current target number of replicas.
        minimum, maximum: bounds of the number.
        params: the objective.
    """
    if not loads:
        return ReplicaDecision(min(maximum, max(minimum, target)), "no_data")
    curve = _mean_curve(loads)
    most = sum(load.max_running for load in loads) / len(loads)
    objective = max(params.tpot_s, params.nearest * curve[0])
    reachable = curve[0] <= params.tpot_s
    demand = _demand(loads)
    wanted = _needed(demand, curve, objective, target, most)
    with_headroom = _needed(demand, curve, max(params.headroom * objective, curve[0]), target, params.headroom * most)
    if wanted > target:
        number, reason = wanted, _scale_up_reason(demand, reachable=reachable)
    elif with_headroom < target:
        number, reason = with_headroom, "spare"
    else:
        number, reason = target, "steady" if reachable else "unreachable"
    number = min(maximum, max(minimum, number))
    return ReplicaDecision(number, reason, _at(curve, _batch(demand, curve, number, most)))


@dataclass(frozen=True, slots=True)
class _Demand:
    """Demand on all replicas together."""

    width: float
    """Concurrent requests, waiting ones included."""
    num_waiting: float
    """Requests that wait."""
    tokens_per_s: float
    """Tokens per second emitted now, plus those that the waiting requests would add."""


def _demand(loads: Sequence[ReplicaLoad]) -> _Demand:
    running = sum(load.num_running for load in loads)
    waiting = sum(load.num_waiting for load in loads)
    rate = sum(load.tokens_per_s for load in loads)
    return _Demand(running + waiting, waiting, rate * (running + waiting) / running if running > 0 else rate)


def _scale_up_reason(demand: _Demand, *, reachable: bool) -> ScalingReason:
    if not reachable:
        return "unreachable"
    return "queue" if demand.num_waiting >= 1 else "slow"


def _needed(demand: _Demand, curve: Sequence[float], objective: float, target: int, most: float) -> int:
    """Number of replicas with which the TPOT stays within `objective` seconds and no request waits.

    Args:
        most: largest batch that a replica computes.
    """
    largest = min(_largest_batch(curve, objective), most)
    # A batch that `most` or the last of BATCHES bounds is faster than the objective.
    needed = demand.tokens_per_s * min(objective, _at(curve, largest)) / largest
    if demand.width > largest * target:
        needed = max(needed, demand.width / largest)
    return max(1, math.ceil(needed - 1e-9))


def _mean_curve(loads: Sequence[ReplicaLoad]) -> list[float]:
    """TPOT by batch size: the mean over replicas, made non-decreasing."""
    curve: list[float] = []
    for index in range(len(BATCHES)):
        mean = sum(load.tpot_s[index] for load in loads) / len(loads)
        curve.append(max(mean, curve[-1] if curve else 1e-6))
    return curve


def _largest_batch(curve: Sequence[float], objective: float) -> float:
    """Batch size at which the curve crosses the objective, within BATCHES."""
    for index in range(1, len(BATCHES)):
        if curve[index] > objective:
            low, high = BATCHES[index - 1], BATCHES[index]
            share = (objective - curve[index - 1]) / (curve[index] - curve[index - 1])
            return low + max(0.0, share) * (high - low)
    return BATCHES[-1]


def _batch(demand: _Demand, curve: Sequence[float], replicas: int, most: float) -> float:
    """Batch size at which a replica serves its share of the rate, bounded by its share of the width (at least one)."""
    rate = demand.tokens_per_s / replicas
    widest = max(1.0, demand.width / replicas)
    batch = 1.0
    while batch / _at(curve, batch) < rate and batch < min(widest, BATCHES[-1], most):
        batch += 0.5
    return batch


def _at(curve: Sequence[float], batch: float) -> float:
    """The TPOT at any batch size, interpolated; beyond the last point the last slope goes on."""
    index = next((i for i in range(1, len(BATCHES)) if batch <= BATCHES[i]), len(BATCHES) - 1)
    low, high = BATCHES[index - 1], BATCHES[index]
    return curve[index - 1] + (batch - low) / (high - low) * (curve[index] - curve[index - 1])
