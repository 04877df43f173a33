"""The engine's classes as Ray actors: what a plain class needs to run in its own process.

Owns the environment of processes that compute, the actor options, and the link from shard 0 to the controller. Knows no
HTTP. Ray calls carry bring-up, reports and lifecycle, never a decode step.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any, Protocol

import ray
from ray.exceptions import RayError

from autoscale.control.report import Observation
from autoscale.replicas.decision import ReplicaLoad
from deployments.cluster.paced_shard import PacedShard
from deployments.cluster.placement import CONTROLLER_NAMESPACE, controller_name
from engine.checkpoint.store import cache_folder
from engine.core.pacing import PlanSlot
from engine.draft.messages import DraftInfo
from engine.draft_buffer.target_endpoint import BufferHandle
from engine.metrics.counters import MetricSnapshot
from engine.workers.draft_worker import DraftWorker
from engine.workers.target_shard import TargetShard

REPORT_PERIOD_S = 0.25
REPORT_TIMEOUT_S = 2.0
_log = logging.getLogger(__name__)


def device_env(num_threads: int) -> dict[str, str]:
    """Environment variables of a process that computes; they must be set before it starts.

    The default spinning of OpenMP makes two processes that take turns on the same cores 2.5x slower; a short spin costs
    nothing. Without OMP_NUM_THREADS, Ray sets one thread.
    """
    return {"OMP_NUM_THREADS": str(num_threads), "GOMP_SPINCOUNT": "1000", "TOKENIZERS_PARALLELISM": "false"}


def actor(cls: type, **options: Any) -> Any:
    """An actor class with these Ray options. Ray never restarts it: the process that made it decides."""
    return ray.remote(cls).options(max_restarts=0, max_task_retries=0, **options)


class ProcessMixin:
    """Calls that every actor answers."""

    def pid(self) -> int:
        """Process id of this actor."""
        return os.getpid()


class ShardActor(ProcessMixin, TargetShard):
    """A target shard. On rank 0 `start_leader` makes it the leader; the calls below it are for rank 0 only."""

    paced: PacedShard
    """The leader and its pace. Set by `start_leader`."""

    def start_leader(self, app_name: str, engine_id: str) -> str:
        """Measure costs, build the step loop, and report to the app's controller from now on. The other shards run.

        Returns:
            Path of the unix socket that the replica connects to.
        """
        self.paced = PacedShard(self, cache_folder() / "costs")
        name = controller_name(app_name)
        link = ControllerLink(
            engine_id, self.paced, find=lambda: ray.get_actor(name, namespace=CONTROLLER_NAMESPACE), wait=_wait
        )
        threading.Thread(target=link.run, name="controller-link", daemon=True).start()
        return self.paced.leader.path

    def run(self) -> None:
        """Lead on rank 0, follow on the others, until `stop`."""
        if self.rank == 0:
            self.paced.leader.run()
        else:
            super().run()

    def heartbeat(self) -> int:
        """See `PacedShard.heartbeat`."""
        return self.paced.heartbeat()

    def metrics(self) -> MetricSnapshot:
        """See `PacedShard.metrics`."""
        return self.paced.metrics()

    def replica_load(self) -> ReplicaLoad:
        """See `PacedShard.replica_load`."""
        return self.paced.replica_load()

    def open_draft_buffer(self, info: DraftInfo, epoch: int) -> BufferHandle:
        """See `DraftConnection.open`."""
        return self.paced.leader.open_draft_buffer(info, epoch)

    def attach_measured_draft(self, timeout_s: float) -> None:
        """See `PacedShard.attach_measured_draft`."""
        self.paced.attach_measured_draft(timeout_s)


class DraftActor(ProcessMixin, DraftWorker):
    """A draft worker."""


class Reporter(Protocol):
    """What `ControllerLink` reads from a `PacedShard`, and the plan that it sets there."""

    slot: PlanSlot

    def fold(self) -> None: ...

    def take_observation(self) -> Observation: ...


class ControllerLink:
    """Reports to the controller and takes its plan. While there is no controller, the last plan stays in force.

    Args:
        engine_id: names the engine in reports.
        reporter: gives observations and follows the plan.
        find: returns the controller's actor handle; raises ValueError when there is no such actor.
        wait: returns the result of an actor call; raises RayError when the actor is dead or does not answer in time.
    """

    def __init__(
        self, engine_id: str, reporter: Reporter, *, find: Callable[[], Any], wait: Callable[[Any], Any]
    ) -> None:
        self._engine_id = engine_id
        self._reporter = reporter
        self._find = find
        self._wait = wait
        self._controller: Any = None  # kept until a call fails
        self._stop = threading.Event()

    def run(self, period_s: float = REPORT_PERIOD_S) -> None:
        """Report every `period_s` seconds until `stop`, or until the process ends."""
        while not self._stop.wait(period_s):
            self._reporter.fold()
            self.exchange()

    def stop(self) -> None:
        """Make `run` return. Thread-safe."""
        self._stop.set()

    def exchange(self) -> None:
        """Send one report and take the plan that answers it. A failed call is repeated with the next report."""
        try:
            if self._controller is None:
                self._controller = self._find()
            observation, plan = self._reporter.take_observation(), self._reporter.slot.current
            self._reporter.slot.current = self._wait(self._controller.report.remote(self._engine_id, observation, plan))
        except (RayError, ValueError) as error:
            _log.debug("no plan from the controller: %s", error)
            self._controller = None


def _wait(result: Any) -> Any:
    return ray.get(result, timeout=REPORT_TIMEOUT_S)
