"""The controller: hears from every engine of an app, and publishes the plan they all follow.

Owns the plan and what each engine last reported. A plain class; `deployments` makes it a named actor. It holds nothing
that cannot be lost: engines keep the last plan when it dies, and tell a new one everything with their next report.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from autoscale.observation import Observation
from engine.config import SpeculativeConfig
from engine.plan import Plan


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What one engine last said."""

    observation: Observation
    received_s: float
    """Monotonic time."""


def initial_plan(config: SpeculativeConfig) -> Plan:
    """The plan an engine starts with, from its settings."""
    policy = "off" if config.method == "none" or config.k == 0 else config.policy
    return Plan(version=1, policy=policy, max_k=config.k, max_batch=config.threshold_max_batch)


class Controller:
    """Gathers observations, publishes plans.

    Args:
        plan: the first plan.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._reports: dict[str, EngineReport] = {}

    def report(self, engine_id: str, observation: Observation) -> Plan:
        """Take what an engine did since its last report; answer with the plan in force."""
        self._reports[engine_id] = EngineReport(observation, time.monotonic())
        return self._plan

    def plan(self) -> Plan:
        return self._plan

    def reports(self) -> dict[str, EngineReport]:
        """The last report of each engine."""
        return dict(self._reports)
