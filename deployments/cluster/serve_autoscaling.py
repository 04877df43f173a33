"""The Serve autoscaling policy: what replicas record goes in, a number of replicas comes out.

Owns the way between Serve's context and `autoscale.replicas.decision`, and tells the app's controller what was decided,
so that replicas can show it. Runs in Serve's own controller process, several times a second: imports neither torch nor
the engine's processes, and never waits.
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
    """What is used of Serve's AutoscalingContext."""

    app_name: str | None
    target_num_replicas: int
    capacity_adjusted_min_replicas: int
    capacity_adjusted_max_replicas: int

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None: ...


class TpotPolicy:
    """Serve makes one per deployment.

    Args:
        tpot_s: objective, seconds per output token.
    """

    def __init__(self, tpot_s: float = ScalingParams().tpot_s) -> None:
        self._params = ScalingParams(tpot_s=tpot_s)
        self._told: ReplicaDecision | None = None

    def __call__(self, context: Context) -> tuple[int, dict[str, Any]]:
        """The number of replicas, before Serve's delays; and no state."""
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
    """By replica, of those that have recorded all of it.

    Args:
        metrics: by name, then by replica.
    """
    by_replica: dict[Any, dict[str, float]] = {}
    for name, values in metrics.items():
        for replica, value in values.items():
            by_replica.setdefault(replica, {})[name] = value
    found = [ReplicaLoad.from_numbers(numbers) for numbers in by_replica.values()]
    return [reading for reading in found if reading is not None]
