"""The controller: takes reports from every engine of an app, and publishes the plan they all follow.

Owns the plan, the last report of each engine, and the pooled priors. A plain class; `deployments` makes it a named
actor. It may die at any time: engines keep the last plan with its priors, and a new controller takes them over with the
next report.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from autoscale.control.history import History, HistoryView
from autoscale.control.metric_targets import MetricTarget, TargetRegistry
from autoscale.control.priors import PriorPool
from autoscale.control.report import Observation
from autoscale.replicas.decision import ReplicaDecision
from engine.config import PolicyName, SpeculativeConfig
from engine.core.pacing import SpeculationPlan

PRIORS_PERIOD_S = 1.0
"""Seconds between two updates of the priors in the plan."""


@dataclass(frozen=True, slots=True)
class EngineReport:
    """The last report of one engine."""

    observation: Observation
    """Sums since the report before."""
    received_s: float
    """Monotonic time at which the report arrived, in seconds."""


def initial_plan(config: SpeculativeConfig) -> SpeculationPlan:
    """The plan that an engine starts with, from its settings."""
    policy = "off" if config.method == "none" or config.k == 0 else config.policy
    return SpeculationPlan(version=1, policy=policy, max_k=config.k, max_batch=config.threshold_max_batch)


class Controller:
    """Collects observations and publishes plans.

    Args:
        plan: the first plan.
        dead_nodes: returns the ids of the nodes of this cluster that are gone.
    """

    def __init__(self, plan: SpeculationPlan, dead_nodes: Callable[[], frozenset[str]] = frozenset) -> None:
        self._plan = plan
        self._dead_nodes = dead_nodes
        self._targets = TargetRegistry()
        self._pool = PriorPool()
        self._pooled_s = -math.inf
        self._reports: dict[str, EngineReport] = {}
        self._history = History()
        self._replicas: ReplicaDecision | None = None

    def report(self, engine_id: str, observation: Observation, plan: SpeculationPlan | None = None) -> SpeculationPlan:
        """Take a report and return the plan in force.

        Args:
            engine_id: of the engine that reports.
            observation: sums since its last report.
            plan: the plan that the engine follows. One with a higher version comes from an earlier controller and is
                taken over.
        """
        self._reports[engine_id] = EngineReport(observation, time.monotonic())
        if plan is not None and plan.version > self._plan.version:
            self._plan = replace(plan, priors=self._plan.priors)
        self._learn(observation, plan)
        self._history.add(engine_id, observation, self._plan, time.time())
        return self._plan

    def _learn(self, observation: Observation, plan: SpeculationPlan | None) -> None:
        if self._pool.is_empty and plan is not None:
            self._pool.adopt(plan.priors)
        self._pool.add(observation.by_draft_class)
        now_s = time.monotonic()
        if now_s - self._pooled_s >= PRIORS_PERIOD_S:
            self._pooled_s = now_s
            self._plan = replace(self._plan, priors=self._pool.priors())

    def override(
        self,
        *,
        policy: PolicyName | None = None,
        max_k: int | None = None,
        max_batch: int | None = None,
        enabled: bool | None = None,
    ) -> SpeculationPlan:
        """Change the given fields for every engine from its next report on, and return the new plan."""
        given = {"policy": policy, "max_k": max_k, "max_batch": max_batch, "enabled": enabled}
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        self._plan = replace(self._plan, version=self._plan.version + 1, **changes)
        return self._plan

    def plan(self) -> SpeculationPlan:
        """The plan in force."""
        return self._plan

    def scaled(self, decision: ReplicaDecision) -> None:
        """Keep the last decision on the number of replicas."""
        self._replicas = decision

    def replicas(self) -> ReplicaDecision | None:
        """The last decision on the number of replicas; None where the number is fixed."""
        return self._replicas

    def announce(self, target: MetricTarget) -> frozenset[str]:
        """Note that a replica's metrics endpoint is alive now. Returns the ids of the nodes that are gone."""
        self._targets.announce(target)
        return self._dead_nodes()

    def targets(self) -> tuple[MetricTarget, ...]:
        """The metrics endpoints of the living replicas."""
        return self._targets.living(self._dead_nodes())

    def history(self, since_s: float) -> HistoryView:
        """The last minutes of all engines, from a Unix time on."""
        return self._history.view(since_s, self._plan, time.time())

    def reports(self) -> dict[str, EngineReport]:
        """The last report of each engine."""
        return dict(self._reports)
