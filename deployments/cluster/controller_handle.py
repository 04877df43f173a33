"""The controller of one app as its replicas see it: started, asked, and replaced when it dies or hangs.

Owns the handle of the controller actor, the timeout of each question and the watch over the actor. All replicas of an
app share one controller, so nobody stops it. Does not know what the controller decides.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import ray

from autoscale.control.history import HistoryView
from autoscale.control.metric_targets import MetricTarget
from autoscale.replicas.decision import ReplicaDecision
from deployments.cluster.actors import actor
from deployments.cluster.controller_actor import ControllerActor
from deployments.cluster.placement import CONTROLLER_NAMESPACE, controller_name
from engine.core.pacing import SpeculationPlan
from engine.errors import EngineUnavailable

CHECK_PERIOD_S = 2.0
HANG_TIMEOUT_S = 30.0
PLAN_TIMEOUT_S = 3.0
HISTORY_TIMEOUT_S = 3.0
REPLICAS_TIMEOUT_S = 1.0
TARGETS_TIMEOUT_S = 3.0
_log = logging.getLogger(__name__)


def start_controller(app_name: str, plan: SpeculationPlan, options: dict[str, Any]) -> Any:
    """The handle of the app's controller actor, which is created if it does not exist.

    Args:
        plan: the plan in force until the controller makes its own.
        options: Ray options that place the actor.
    """
    named = {"name": controller_name(app_name), "namespace": CONTROLLER_NAMESPACE, "get_if_exists": True}
    return actor(ControllerActor, **options, **named).remote(plan)


class ControllerHandle:
    """Call `start` once, then run `watch` as a task.

    Args:
        make: returns a handle of the controller actor, which it creates if it does not exist.
        kill: ends an actor.
        check_period_s: seconds between two checks of the actor.
        hang_timeout_s: an actor that does not respond for this many seconds is replaced.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        kill: Callable[[Any], None] = ray.kill,
        check_period_s: float = CHECK_PERIOD_S,
        hang_timeout_s: float = HANG_TIMEOUT_S,
    ) -> None:
        self._make = make
        self._kill = kill
        self._check_period_s = check_period_s
        self._hang_timeout_s = hang_timeout_s
        self._actor: Any = None
        self.num_restarts = 0
        """Number of times this replica replaced the controller."""

    def start(self) -> None:
        """Find or create the controller."""
        self._actor = self._make()

    async def watch(self) -> None:
        """Replace the controller each time it dies or hangs. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(self._check_period_s)
            try:
                # Not wait_for: until Python 3.12 it drops a cancellation that comes together with the response.
                async with asyncio.timeout(self._hang_timeout_s):
                    await self._actor.pid.remote()
            except (ray.exceptions.RayError, TimeoutError) as error:
                _log.warning("replacing the controller: %s", type(error).__name__)
                self._replace()

    def _replace(self) -> None:
        self._kill(self._actor)
        try:
            self._actor = self._make()
        except (ray.exceptions.RayError, ValueError):  # ValueError: another replica creates one at the same time
            _log.exception("no new controller; the next check tries again")
            return
        self.num_restarts += 1

    async def plan(self) -> SpeculationPlan:
        """The plan in force. Raises EngineUnavailable when the controller does not respond."""
        plan: SpeculationPlan = await self._ask("plan", PLAN_TIMEOUT_S)
        return plan

    async def override(self, changes: dict[str, Any]) -> SpeculationPlan:
        """Change fields of the plan and return the new plan. Raises as `plan`."""
        plan: SpeculationPlan = await self._ask("override", PLAN_TIMEOUT_S, **changes)
        return plan

    async def history(self, since_s: float) -> HistoryView:
        """Recent measurements of all engines of the app.

        Args:
            since_s: Unix time in seconds of the first measurement wanted.

        Raises:
            EngineUnavailable: the controller does not respond.
        """
        view: HistoryView = await self._ask("history", HISTORY_TIMEOUT_S, since_s)
        return view

    async def replicas(self) -> ReplicaDecision | None:
        """The last decision on the number of replicas; None before the first. Raises as `plan`."""
        decision: ReplicaDecision | None = await self._ask("replicas", REPLICAS_TIMEOUT_S)
        return decision

    async def announce(self, target: MetricTarget) -> frozenset[str]:
        """Say that a metrics endpoint is alive. Returns the ids of the nodes that are gone. Raises as `plan`."""
        dead: frozenset[str] = await self._ask("announce", TARGETS_TIMEOUT_S, target)
        return dead

    async def targets(self) -> tuple[MetricTarget, ...]:
        """The metrics endpoints of the living replicas. Raises as `plan`."""
        targets: tuple[MetricTarget, ...] = await self._ask("targets", TARGETS_TIMEOUT_S)
        return targets

    async def _ask(self, method: str, timeout_s: float, *values: Any, **arguments: Any) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                return await getattr(self._actor, method).remote(*values, **arguments)
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise EngineUnavailable("The controller does not respond; try again soon") from error
