"""Rank 0 of a target together with its pace: measured costs, the policy that chooses K, and what its steps report.

Owns the cost table, the goodput policy, the plan in force, the statistics of the steps and the engine's load. A plain
class without Ray; `actors` places it in a process. Does not know how reports reach the controller.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from autoscale.control.controller import initial_plan
from autoscale.control.report import Aggregator, Observation
from autoscale.control.step_metrics import StepRecorder
from autoscale.policy.cost_model import CostTable
from autoscale.policy.goodput import make_goodput
from autoscale.policy.policies import PolicyPacer
from autoscale.profiling.profile import adapted, profile_draft, profile_target
from autoscale.profiling.table_cache import TableCache
from autoscale.replicas.decision import ReplicaLoad
from autoscale.replicas.tpot_estimate import TpotEstimate
from engine.core.pacing import PlanSlot
from engine.draft.messages import DraftRequestRow, DraftResponse
from engine.draft.remote import DraftLink
from engine.metrics.counters import MetricCounters, MetricSnapshot, merge
from engine.model.device import gpu_name, release_freed_memory
from engine.threads import threads_per_shard
from engine.workers.leader import Leader
from engine.workers.target_shard import TargetShard

COSTS_PERIOD_S = 30.0
"""Seconds between two writes of the learned costs, while there are steps."""
_LEAST_PERIOD_S = 1e-3


class PacedShard:
    """Measures what steps cost, then builds the leader. The followers must run already.

    Args:
        shard: rank 0, after `bring_up`.
        cost_folder: where cost tables of earlier starts are kept.
        costs_period_s: seconds between two writes of the learned costs.
    """

    def __init__(self, shard: TargetShard, cost_folder: Path, *, costs_period_s: float = COSTS_PERIOD_S) -> None:
        self._config = shard.config
        speculative = shard.config.speculative
        self._costs = TableCache(cost_folder, cost_identity(shard))
        table = first_costs(shard, self._costs)
        shard.runner.clear()
        release_freed_memory()  # of loading and measuring
        goodput = make_goodput(speculative.method, speculative.k, table, lookup=speculative.lookup)
        self._goodput = goodput
        goodput.cost.pad_rows(shard.padded_rows)
        self.slot = slot = PlanSlot(initial_plan(speculative))
        """Holds the plan in force."""
        self._aggregator = Aggregator(speculative.method)
        self._tpot_estimate = TpotEstimate(goodput)
        self._recorder = StepRecorder(lambda: slot.current)
        self.leader = Leader(
            shard,
            pacer=PolicyPacer(goodput),
            plan=lambda: slot.current,
            observers=(self._aggregator.add, self._tpot_estimate.observe, self._recorder.add),
        )
        self._asked_s, self._num_emitted = time.monotonic(), 0.0  # of the last call of `replica_load`
        self._costs_period_s = costs_period_s
        self._kept_s, self._num_kept_steps = time.monotonic(), 0.0  # of the last write of the learned costs

    def fold(self) -> None:
        """Count the steps since the last call. Call a few times a second, or memory grows.

        From time to time the learned costs replace those of the start on disk. The next start and `paceline plan` use
        them: they hold what only steps show, and a busy moment at the start is averaged out.
        """
        self._recorder.fold()
        now_s = time.monotonic()
        if now_s - self._kept_s >= self._costs_period_s:
            num_steps = self._recorder.read().number("paceline_steps_total")
            if num_steps > self._num_kept_steps:
                self._costs.store(self._goodput.cost.table())
            self._kept_s, self._num_kept_steps = now_s, num_steps

    def take_observation(self) -> Observation:
        """Sums over the steps since the last call, for the controller."""
        return self._aggregator.take()

    def heartbeat(self) -> int:
        """Turns of the step loop so far. The loop turns without requests too."""
        return self.leader.engine.num_turns

    def metrics(self) -> MetricSnapshot:
        """Everything that this process has counted so far. Thread-safe."""
        counters = MetricCounters()
        scheduler, blocks = self.leader.engine.scheduler, self.leader.pool.usage()
        counters.set("paceline_running_requests", scheduler.num_running)
        counters.set("paceline_waiting_requests", scheduler.num_waiting)
        counters.add("paceline_preemptions_total", scheduler.num_preempted)
        counters.set("paceline_kv_free_blocks", blocks.num_free, "target")
        counters.set("paceline_kv_used_blocks", blocks.num_used, "target")
        counters.add("paceline_kv_evictions_total", blocks.num_evicted, "target")
        return merge([self._recorder.read(), counters.read()])

    def replica_load(self) -> ReplicaLoad:
        """The load since the last call, and the estimated time per output token at any batch size. One caller."""
        num_emitted = self._recorder.read().number("paceline_emitted_tokens_total")
        now_s = time.monotonic()
        rate = (num_emitted - self._num_emitted) / max(_LEAST_PERIOD_S, now_s - self._asked_s)
        self._asked_s, self._num_emitted = now_s, num_emitted
        scheduler = self.leader.engine.scheduler
        return ReplicaLoad(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            tokens_per_s=rate,
            tpot_s=self._tpot_estimate.tpot_s(self.slot.current),
            max_running=self._config.max_num_requests,
        )

    def attach_measured_draft(self, timeout_s: float) -> None:
        """Time the draft, then draft with it.

        Args:
            timeout_s: seconds for the draft to open its buffer.

        Raises:
            DraftDown: the draft has not opened its buffer in time.
        """
        self.leader.attach_draft(timeout_s, self._measure_draft)

    def _measure_draft(self, draft: DraftLink) -> None:
        speculative = self._config.speculative

        def ask(rows: Sequence[DraftRequestRow], released: Sequence[int]) -> DraftResponse:
            return draft.ask(rows, released, deadline_s=speculative.deadline_s)

        max_rows, max_k = self._config.max_num_requests, max(1, speculative.k)
        table = profile_draft(
            ask,
            self._goodput.cost.table(),
            max_rows=max_rows,
            max_k=max_k,
            positions_per_pass=self.leader.positions_per_pass,
        )
        self._goodput.cost.measured(table)
        self._costs.store(table)


def first_costs(shard: TargetShard, costs: TableCache) -> CostTable:
    """The cost table of an earlier start, corrected where it is off, else a new one, measured now and kept."""
    limits: dict[str, Any] = {
        "block_size": shard.config.kv_block_size,
        "num_blocks": shard.runner.num_blocks,
        "max_rows": shard.config.max_step_tokens,
        "max_spans": shard.config.max_num_requests,
        "vocab_size": shard.runner.model.config.vocab_size,
    }
    kept = costs.load()
    table = adapted(kept, shard.timed_forward, **limits) if kept is not None else None
    if table is None:
        table = profile_target(shard.timed_forward, **limits)
    costs.store(table)
    return table


def cost_identity(shard: TargetShard) -> dict[str, str]:
    """What a cost table depends on, besides the processor."""
    config = shard.config
    return {
        "model": str(shard.folder),
        "draft": str(config.speculative.draft),
        "device": config.device,
        "gpu": gpu_name(shard.device),
        "dtype": config.dtype,
        "kv_cache_dtype": config.kv_cache_dtype,
        "kernel": type(shard.runner.model).__name__,
        "graphs": config.cuda_graphs,
        "packed": shard.runner.model.packed.label,
        "torch": str(torch.__version__),
        "shards": str(config.tensor_parallel_size),
        "threads": str(threads_per_shard(config)),
        "block_size": str(config.kv_block_size),
    }
