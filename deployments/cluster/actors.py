"""The engine's classes as Ray actors: what is added to a plain class to live in a process of its own.

Owns the environment of device processes, the link from shard 0 to the controller, and actor options. Knows nothing of
HTTP. Ray calls carry bring-up, reports and lifecycle here, never a decode step.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayError

from autoscale.control.controller import initial_plan
from autoscale.control.report import Aggregator
from autoscale.control.step_metrics import StepRecorder
from autoscale.policy.cost_model import CostTable
from autoscale.policy.goodput import make_goodput
from autoscale.policy.policies import PolicyPacer
from autoscale.policy.profiling import TableCache, profile_draft, profile_target, still_holds
from autoscale.replicas.decision import ReplicaLoad
from autoscale.replicas.tpot_estimate import TpotEstimate
from deployments.cluster.placement import CONTROLLER_NAMESPACE, controller_name
from engine.checkpoint.store import cache_folder
from engine.core.pacing import PlanSlot, SpeculationPlan
from engine.core.stats import StepStats
from engine.draft.messages import DraftRequestRow, DraftResponse
from engine.draft.remote import DraftLink
from engine.metrics.counters import MetricCounters, MetricSnapshot, merge
from engine.model.device import threads_per_shard
from engine.workers.draft_worker import DraftWorker, count_blocks
from engine.workers.target_shard import TargetShard

REPORT_PERIOD_S = 0.25
_log = logging.getLogger(__name__)


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
    """A target shard; rank 0 also measures what steps cost and talks to the controller."""

    def lead(self, app_name: str, engine_id: str) -> str:
        """Measure, build the step loop, and keep its plan fresh from the app's controller. The other shards run.

        Returns:
            Path of the socket for the replica.
        """
        speculative = self.config.speculative
        self._costs = TableCache(cache_folder() / "costs", self._identity())
        self._goodput = make_goodput(speculative.method, speculative.k, self._first_costs(), lookup=speculative.lookup)
        slot = PlanSlot(initial_plan(speculative))
        aggregator = Aggregator(lambda: self._goodput.cost.plain_s, speculative.method)
        self._slot = slot
        self._tpot_estimate = replica_load = TpotEstimate(self._goodput)
        self._asked_s, self._emitted = time.monotonic(), 0.0
        self._recorder = recorder = StepRecorder(self._goodput, lambda: slot.current)
        link = ControllerLink(controller_name(app_name), engine_id, slot, aggregator, recorder)
        threading.Thread(target=link.run, name="controller-link", daemon=True).start()

        def observe(stats: StepStats) -> None:
            aggregator.add(stats)
            replica_load.observe(stats)
            recorder.add(stats)

        return self.listen(PolicyPacer(self._goodput), lambda: slot.current, observe)

    def heartbeat(self) -> int:
        """Turns of the step loop so far; it turns without work too. Rank 0."""
        return self.engine.num_turns if self.engine is not None else 0

    def metrics(self) -> MetricSnapshot:
        """What was counted in this process so far. Rank 0, after `lead`."""
        counters = MetricCounters()
        if self.engine is not None and self.pool is not None:
            scheduler = self.engine.scheduler
            counters.set("paceline_running_requests", scheduler.num_running)
            counters.set("paceline_waiting_requests", scheduler.num_waiting)
            counters.add("paceline_preemptions_total", scheduler.num_preempted)
            count_blocks(counters, self.pool, "target")
        return merge([self._recorder.read(), counters.read()])

    def replica_load(self) -> ReplicaLoad:
        """Load since the last call, and time per token at any batch. Rank 0, after `lead`; one caller."""
        emitted, now_s = self._recorder.read().number("paceline_emitted_tokens_total"), time.monotonic()
        rate = (emitted - self._emitted) / max(1e-3, now_s - self._asked_s)
        self._asked_s, self._emitted = now_s, emitted
        scheduler = self.engine.scheduler if self.engine is not None else None
        return ReplicaLoad(
            num_running=scheduler.num_running if scheduler is not None else 0,
            num_waiting=scheduler.num_waiting if scheduler is not None else 0,
            tokens_per_s=rate,
            tpot_s=self._tpot_estimate.tpot_s(self._slot.current),
        )

    def attach_measured_draft(self, timeout_s: float) -> None:
        """`attach_draft`, and time the draft first."""
        self.attach_draft(timeout_s, self._measure_draft)

    def _measure_draft(self, draft: DraftLink) -> None:
        deadline_s = self.config.speculative.deadline_s

        def ask(rows: Sequence[DraftRequestRow], released: Sequence[int]) -> DraftResponse:
            return draft.ask(rows, released, deadline_s=deadline_s)

        limits = {"max_rows": self.config.max_num_requests, "max_k": max(1, self.config.speculative.k)}
        table = profile_draft(ask, self._goodput.cost.table(), **limits)
        self._goodput.cost.measured(table)
        self._costs.store(table)

    def _first_costs(self) -> CostTable:
        """Of the last start on this machine, or measured now."""
        limits: dict[str, Any] = {
            "block_size": self.config.kv_block_size,
            "num_blocks": self.num_blocks,
            "max_rows": self.config.max_step_tokens,
            "max_spans": self.config.max_num_requests,
        }
        kept = self._costs.load()
        if kept is not None and still_holds(kept, self.forward, **limits):
            return kept
        table = profile_target(self.forward, **limits)
        self._costs.store(table)
        return table

    def _identity(self) -> dict[str, str]:
        """What a cost table belongs to, beside the machine."""
        engine = self.config
        return {
            "model": str(self.folder),
            "draft": str(engine.speculative.draft),
            "device": engine.device,
            "dtype": engine.dtype,
            "kernel": type(self._model).__name__,
            "torch": torch.__version__,
            "shards": str(engine.tensor_parallel_size),
            "threads": str(threads_per_shard(engine)),
            "block_size": str(engine.kv_block_size),
        }


class DraftActor(ProcessMixin, DraftWorker):
    """A draft worker."""


class ControllerLink:
    """Reports to the controller and takes its plan; a dead controller leaves the last plan in force.

    Args:
        name: of the controller actor.
        engine_id: of the engine that reports.
        slot: where the plan goes.
        aggregator: where step stats come from.
        recorder: counts between two reports what its steps left.
    """

    def __init__(
        self, name: str, engine_id: str, slot: PlanSlot, aggregator: Aggregator, recorder: StepRecorder
    ) -> None:
        self._name = name
        self._engine_id = engine_id
        self._slot = slot
        self._aggregator = aggregator
        self._recorder = recorder
        self._controller: Any = None  # found once; looked for again after it failed
        self._stop = threading.Event()

    def run(self) -> None:
        """Report a few times a second until the process ends."""
        while not self._stop.wait(REPORT_PERIOD_S):
            self._recorder.fold()
            self._slot.current = self._exchange(self._slot.current)

    def _exchange(self, plan: SpeculationPlan) -> SpeculationPlan:
        try:
            if self._controller is None:
                self._controller = ray.get_actor(self._name, namespace=CONTROLLER_NAMESPACE)
            report = self._controller.report.remote(self._engine_id, self._aggregator.take(), plan)
            fresh: SpeculationPlan = ray.get(report, timeout=2.0)
        except (RayError, GetTimeoutError, ValueError) as error:  # ValueError: no actor of that name
            _log.debug("no word from the controller: %s", error)
            self._controller = None
            return plan
        return fresh


def actor(cls: type, **options: Any) -> Any:
    """An actor class placed inside the caller's placement group; never restarted by Ray, whoever made it decides."""
    return ray.remote(cls).options(max_restarts=0, max_task_retries=0, **options)
