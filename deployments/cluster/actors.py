"""The engine's classes as Ray actors: what a plain class needs to run in its own process.

Owns the environment of processes that compute, the actor options, and the link from shard 0 to the controller. Knows no
HTTP. Ray calls carry bring-up, reports and lifecycle, never a decode step.

The replica imports this module to name the classes, so torch is imported only by the constructors and calls that run in
the actor's own process.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import ray
from ray.exceptions import RayError

from autoscale.control.report import Observation
from autoscale.replicas.decision import ReplicaLoad
from deployments.cluster.placement import CONTROLLER_NAMESPACE, controller_name
from deployments.settings import AppSettings
from engine.checkpoint.store import cache_folder
from engine.core.pacing import PlanSlot
from engine.draft.messages import DraftInfo
from engine.draft_buffer.handle import BufferHandle
from engine.errors import EngineUnavailable
from engine.ipc.forward_broadcast import ForwardHandle
from engine.messages import AdapterRef, CheckedGrammar, GrammarSpec
from engine.metrics.counters import MetricSnapshot
from engine.threads import threads_per_shard
from engine.workers.shard_ready import ShardReady

if TYPE_CHECKING:
    from deployments.cluster.paced_shard import PacedShard

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


def draft_options(settings: AppSettings) -> dict[str, Any]:
    """Ray options of the draft's actor."""
    env = {"env_vars": device_env(threads_per_shard(settings.engine))}
    gpu = {"num_gpus": settings.draft_gpu_fraction} if settings.engine.device == "cuda" else {}
    return {"runtime_env": env, "max_concurrency": 4, **gpu}  # `run` occupies one thread until the draft ends


class ProcessMixin:
    """Calls that every actor answers."""

    def pid(self) -> int:
        """Process id of this actor."""
        return os.getpid()


class ShardActor(ProcessMixin):
    """A target shard. On rank 0 `start_leader` makes it the leader; the calls below it are for rank 0 only.

    The calls above `start_leader` are those of `TargetShard`. Its arguments are those of the constructor.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        from engine.workers.target_shard import TargetShard

        self._shard = TargetShard(*args, **kwargs)
        self._paced: PacedShard | None = None  # on rank 0

    def open_rendezvous(self) -> int:
        """See `TargetShard.open_rendezvous`."""
        return self._shard.open_rendezvous()

    def load(self, rendezvous_port: int | None) -> ShardReady:
        """See `TargetShard.load`."""
        return self._shard.load(rendezvous_port)

    def measure(self) -> int:
        """See `TargetShard.measure`."""
        return self._shard.measure()

    def allocate(self, num_blocks: int, max_model_len: int) -> None:
        """See `TargetShard.allocate`."""
        self._shard.allocate(num_blocks, max_model_len)

    def forward_handle(self, rank: int) -> ForwardHandle:
        """See `TargetShard.forward_handle`."""
        return self._shard.forward_handle(rank)

    def follow(self, handle: ForwardHandle) -> None:
        """See `TargetShard.follow`."""
        self._shard.follow(handle)

    def load_adapter(self, number: int, folder: Path) -> None:
        """See `TargetShard.load_adapter`."""
        self._shard.load_adapter(number, folder)

    def drop_adapter(self, number: int) -> None:
        """See `TargetShard.drop_adapter`."""
        self._shard.drop_adapter(number)

    def stop(self) -> None:
        """See `TargetShard.stop`."""
        self._shard.stop()

    def run(self) -> None:
        """Lead on rank 0, follow on the others, until `stop`."""
        if self._shard.rank == 0:
            self._leading().leader.run()
        else:
            self._shard.run()

    def start_leader(self, app_name: str, engine_id: str) -> str:
        """Measure costs, build the step loop, and report to the app's controller from now on. The other shards run.

        Returns:
            Path of the unix socket that the replica connects to.
        """
        from deployments.cluster.paced_shard import PacedShard

        self._paced = paced = PacedShard(self._shard, cache_folder() / "costs")
        name = controller_name(app_name)
        link = ControllerLink(
            engine_id, paced, find=lambda: ray.get_actor(name, namespace=CONTROLLER_NAMESPACE), wait=_wait
        )
        threading.Thread(target=link.run, name="controller-link", daemon=True).start()
        return paced.leader.path

    def heartbeat(self) -> int:
        """See `PacedShard.heartbeat`."""
        return self._leading().heartbeat()

    def metrics(self) -> MetricSnapshot:
        """See `PacedShard.metrics`."""
        return self._leading().metrics()

    def replica_load(self) -> ReplicaLoad:
        """See `PacedShard.replica_load`."""
        return self._leading().replica_load()

    def serve_adapter(self, adapter: AdapterRef) -> None:
        """See `Leader.serve_adapter`."""
        self._leading().leader.serve_adapter(adapter)

    def retire_adapter(self, number: int) -> None:
        """See `Leader.retire_adapter`."""
        self._leading().leader.retire_adapter(number)

    def is_unused(self, number: int) -> bool:
        """See `Leader.is_unused`."""
        return self._leading().leader.is_unused(number)

    def open_draft_buffer(self, info: DraftInfo, epoch: int) -> BufferHandle:
        """See `DraftConnection.open`."""
        return self._leading().leader.open_draft_buffer(info, epoch)

    def attach_measured_draft(self, timeout_s: float) -> None:
        """See `PacedShard.attach_measured_draft`."""
        self._leading().attach_measured_draft(timeout_s)

    def check_grammar(self, spec: GrammarSpec, before: str) -> CheckedGrammar:
        """See `engine.sampling.grammar.checked`."""
        from engine.sampling.grammar import checked

        return checked(spec, before)

    def _leading(self) -> PacedShard:
        if self._paced is None:
            raise EngineUnavailable("this shard does not lead yet")
        return self._paced


class DraftActor(ProcessMixin):
    """A draft worker. The calls and the arguments are those of `DraftWorker`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        from engine.workers.draft_worker import DraftWorker

        self._worker = DraftWorker(*args, **kwargs)

    def load(self) -> DraftInfo:
        """See `DraftWorker.load`."""
        return self._worker.load()

    def connect(self, handle: BufferHandle) -> None:
        """See `DraftWorker.connect`."""
        self._worker.connect(handle)

    def run(self) -> None:
        """See `DraftWorker.run`."""
        self._worker.run()

    def stop(self) -> None:
        """See `DraftWorker.stop`."""
        self._worker.stop()

    def metrics(self) -> MetricSnapshot:
        """See `DraftWorker.metrics`."""
        return self._worker.metrics()


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
