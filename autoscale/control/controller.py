"""The controller: hears from every engine of an app, and publishes the plan they all follow.

Owns the plan, what each engine last reported, and what they all have learnt of their drafts. A plain class;
`deployments` makes it a named actor. It holds nothing that cannot be lost: engines keep the last plan, with its priors,
when it dies, and tell a new one everything with their next report.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

from autoscale.control.history import History, HistoryView
from autoscale.control.priors import PriorPool
from autoscale.control.report import Observation
from autoscale.replicas.decision import ReplicaDecision
from engine.config import PolicyName, SpeculativeConfig
from engine.core.pacing import SpeculationPlan

PRIORS_PERIOD_S = 1.0
"""How often new priors go out."""


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What one engine last said."""

    observation: Observation
    received_s: float
    """Monotonic time."""


def initial_plan(config: SpeculativeConfig) -> SpeculationPlan:
    """The plan an engine starts with, from its settings."""
    policy = "off" if config.method == "none" or config.k == 0 else config.policy
    return SpeculationPlan(version=1, policy=policy, max_k=config.k, max_batch=config.threshold_max_batch)


class Controller:
    """Gathers observations, publishes plans.

    Args:
        plan: the first plan.
    """

    def __init__(self, plan: SpeculationPlan) -> None:
        self._plan = plan
        self._pool = PriorPool()
        self._pooled_s = -math.inf
        self._reports: dict[str, EngineReport] = {}
        self._history = History()
        self._replicas: ReplicaDecision | None = None

    def report(self, engine_id: str, observation: Observation, plan: SpeculationPlan | None = None) -> SpeculationPlan:
        """Take what an engine did since its last report; answer with the plan in force.

        Args:
            plan: that the engine follows. A newer one than ours comes from the controller before this one.
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
        self._pool.add(observation.by_kind)
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
        """Change what is given, for every engine from its next report on; answers with the new plan."""
        given = {"policy": policy, "max_k": max_k, "max_batch": max_batch, "enabled": enabled}
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        self._plan = replace(self._plan, version=self._plan.version + 1, **changes)
        return self._plan

    def plan(self) -> SpeculationPlan:
        return self._plan

    def scaled(self, decision: ReplicaDecision) -> None:
        """Note what was decided of the number of replicas."""
        self._replicas = decision

    def replicas(self) -> ReplicaDecision | None:
        """What was decided last; None when nobody decides."""
        return self._replicas

    def history(self, since_s: float) -> HistoryView:
        """The last minutes of all engines, from a unix time on."""
        return self._history.view(since_s, self._plan, time.time())

    def reports(self) -> dict[str, EngineReport]:
        """The last report of each engine."""
        return dict(self._reports)
