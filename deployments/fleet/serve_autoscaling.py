"""The Serve autoscaling policy: from the load that replicas record to a number of replicas.

Owns the conversion between Serve's context and `autoscale.replicas.decision`, and reports each decision to the app's
controller, so that replicas can expose it. Runs in the process of Serve's controller several times a second. It imports
neither torch nor the engine's processes, and never blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import ray

from autoscale.replicas.decision import ReplicaDecision, ReplicaLoad, ScalingParams, decide
from deployments.cluster.placement import CONTROLLER_NAMESPACE, controller_name

POLICY_PATH = "deployments.fleet.serve_autoscaling:TpotPolicy"
REPORT_PERIOD_S = 5.0
"""Seconds after which an unchanged decision is reported again, because the controller may have been replaced."""


class Context(Protocol):
    """The part of Serve's AutoscalingContext that the policy reads."""

    app_name: str | None
    target_num_replicas: int
    capacity_adjusted_min_replicas: int
    capacity_adjusted_max_replicas: int

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None: ...


class TpotPolicy:
    """Serve creates one per deployment.

    Args:
        tpot_s: objective: time per output token, in seconds.
        report: sends a decision to the controller of an app; returns whether there is a controller.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        tpot_s: float = ScalingParams().tpot_s,
        *,
        report: Callable[[str, ReplicaDecision], bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._params = ScalingParams(tpot_s=tpot_s)
        self._report = report or report_to_controller
        self._clock = clock
        self._reported: ReplicaDecision | None = None
        self._reported_s = 0.0

    def __call__(self, context: Context) -> tuple[int, dict[str, Any]]:
        """The number of replicas before Serve's delays, and an empty state."""
        decision = decide(
            readings_of(context.aggregated_metrics or {}),
            target=context.target_num_replicas,
            minimum=context.capacity_adjusted_min_replicas,
            maximum=context.capacity_adjusted_max_replicas,
            params=self._params,
        )
        now_s, last = self._clock(), self._reported
        is_new = last is None or (last.replicas, last.reason) != (decision.replicas, decision.reason)
        is_due = now_s - self._reported_s >= REPORT_PERIOD_S
        if (is_new or is_due) and self._report(context.app_name or "", decision):
            self._reported, self._reported_s = decision, now_s
        return decision.replicas, {}


def report_to_controller(app_name: str, decision: ReplicaDecision) -> bool:
    """Send a decision to the controller of an app. Returns False if the app has no controller now."""
    if not ray.is_initialized():  # `get_actor` would start a cluster
        return False
    try:
        controller = ray.get_actor(controller_name(app_name), namespace=CONTROLLER_NAMESPACE)
        controller.scaled.remote(decision)
    except (ValueError, ray.exceptions.RayError):
        return False
    return True


def readings_of(metrics: Mapping[str, Mapping[Any, float]]) -> list[ReplicaLoad]:
    """The loads of all replicas that have recorded every value.

    Args:
        metrics: values by name, then by replica.
    """
    by_replica: dict[Any, dict[str, float]] = {}
    for name, values in metrics.items():
        for replica, value in values.items():
            by_replica.setdefault(replica, {})[name] = value
    found = [ReplicaLoad.from_numbers(numbers) for numbers in by_replica.values()]
    return [reading for reading in found if reading is not None]
