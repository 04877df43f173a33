"""The engine's classes as Ray actors: what is added to a plain class to live in a process of its own.

Owns the environment of device processes, the link from shard 0 to the controller, and actor options. Knows nothing of
HTTP. Ray calls carry bring-up, reports and lifecycle here, never a decode step.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from autoscale.controller import Controller, initial_plan
from autoscale.observation import Aggregator
from autoscale.policy import PolicyPacer
from engine.draft_worker import DraftWorker
from engine.engine import PlanSlot
from engine.plan import Plan
from engine.target_shard import TargetShard

CONTROLLER_NAMESPACE = "paceline"
REPORT_PERIOD_S = 0.25
_log = logging.getLogger(__name__)


def controller_name(app_name: str) -> str:
    return f"controller:{app_name}"


def device_env(num_threads: int) -> dict[str, str]:
    """Environment of a process that computes, set before it starts.

    OpenMP's default spinning makes two processes that take turns on the same cores 2.5x slower; a short spin costs
    nothing. Ray would otherwise set one thread.
    """
    return {"OMP_NUM_THREADS": str(num_threads), "GOMP_SPINCOUNT": "1000", "TOKENIZERS_PARALLELISM": "false"}


class ProcessMixin:
    """What every actor can say of itself."""

    def pid(self) -> int:
        return os.getpid()


class ShardActor(ProcessMixin, TargetShard):
    """A target shard; rank 0 also talks to the controller."""

    def lead(self, app_name: str, engine_id: str) -> str:
        """Build the step loop and keep its plan fresh from the app's controller.

        Returns:
            Path of the socket for the replica.
        """
        slot = PlanSlot(initial_plan(self.config.speculative))
        aggregator = Aggregator()
        link = ControllerLink(controller_name(app_name), engine_id, slot, aggregator)
        threading.Thread(target=link.run, name="controller-link", daemon=True).start()
        return self.listen(PolicyPacer(), lambda: slot.current, aggregator.add)


class DraftActor(ProcessMixin, DraftWorker):
    """A draft worker."""


class ControllerActor(ProcessMixin, Controller):
    """The controller of one app."""


class ControllerLink:
    """Reports to the controller and takes its plan; a dead controller leaves the last plan in force.

    Args:
        name: of the controller actor.
        engine_id: of the engine that reports.
        slot: where the plan goes.
        aggregator: where step stats come from.
    """

    def __init__(self, name: str, engine_id: str, slot: PlanSlot, aggregator: Aggregator) -> None:
        self._name = name
        self._engine_id = engine_id
        self._slot = slot
        self._aggregator = aggregator
        self._stop = threading.Event()

    def run(self) -> None:
        """Report a few times a second until the process ends."""
        while not self._stop.wait(REPORT_PERIOD_S):
            self._slot.current = self._exchange(self._slot.current)

    def _exchange(self, plan: Plan) -> Plan:
        try:
            controller = ray.get_actor(self._name, namespace=CONTROLLER_NAMESPACE)
            fresh: Plan = ray.get(controller.report.remote(self._engine_id, self._aggregator.take()), timeout=2.0)
        except (RayError, GetTimeoutError, ValueError) as error:  # ValueError: no actor of that name
            _log.debug("no word from the controller: %s", error)
            return plan
        return fresh


def actor(cls: type, **options: Any) -> Any:
    """An actor class placed inside the caller's placement group; never restarted by Ray, whoever made it decides."""
    return ray.remote(cls).options(max_restarts=0, max_task_retries=0, **options)
