"""The Serve autoscaling policy: from the load that replicas record to a number of replicas.

Owns the conversion between Serve's context and `autoscale.replicas.decision`, and reports each decision to the app's
controller, so that replicas can expose it. Runs in the process of Serve's controller several times a second. It imports
neither torch nor the engine's processes, and never blocks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Protocol

import ray

from autoscale.replicas.decision import ReplicaDecision, ReplicaLoad, ScalingParams, decide
from deployments.cluster.placement import CONTROLLER_NAMESPACE, controller_name

POLICY_PATH = "deployments.cluster.serve_autoscaling:TpotPolicy"


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
    """

    def __init__(self, tpot_s: float = ScalingParams().tpot_s) -> None:
        self._params = ScalingParams(tpot_s=tpot_s)
        self._told: ReplicaDecision | None = None

    def __call__(self, context: Context) -> tuple[int, dict[str, Any]]:
        """The number of replicas before Serve's delays, and an empty state."""
        decision = decide(
            readings_of(context.aggregated_metrics or {}),
            target=context.target_num_replicas,
            minimum=context.capacity_adjusted_min_replicas,
            maximum=context.capacity_adjusted_max_replicas,
            params=self._params,
        )
        told = self._told
        if told is None or (told.replicas, told.reason) != (decision.replicas, decision.reason):
            self._tell(context.app_name or "", decision)
        return decision.replicas, {}

    def _tell(self, app_name: str, decision: ReplicaDecision) -> None:
        """Let the app's controller know; while it has none, again with the next decision."""
        with contextlib.suppress(ValueError, ray.exceptions.RayError):
            controller = ray.get_actor(controller_name(app_name), namespace=CONTROLLER_NAMESPACE)
            controller.scaled.remote(decision)
            self._told = decision


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
