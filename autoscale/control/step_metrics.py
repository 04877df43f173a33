"""Step stats to metrics: what every step did, cost and was expected to, counted for the exporter.

Owns the way from StepStats and the pacer's state to the metrics of group `speculation`. The step loop only appends;
everything is counted when `fold` or `read` is called, in another thread. Knows no client library and no process.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable

import numpy as np
from msgspec import Struct

from autoscale.policy.allocation import Allocation
from autoscale.policy.goodput import Goodput
from engine.core.pacing import SpeculationPlan
from engine.core.stats import StepStats
from engine.core.step import DraftSource
from engine.messages import WorkloadClass
from engine.metrics.counters import MetricCounters, MetricSnapshot

_OFF = (0, 0)


class _Record(Struct, frozen=True, gc=False):
    """A step with the pacer's state right after it."""

    stats: StepStats
    plan: SpeculationPlan
    predicted: Allocation | None
    cost_s: float
    """Duration that the cost model expected of exactly this step."""
    plain_s: float
    """The same without its drafts."""
    num_switches: int
    num_probes: int
    is_on: bool


class StepRecorder:
    """Metrics of one engine's steps.

    Args:
        goodput: the policy whose predictions and switches are reported; told of a step before this is.
        plan: in force.
    """

    def __init__(self, goodput: Goodput, plan: Callable[[], SpeculationPlan]) -> None:
        self._goodput = goodput
        self._plan = plan
        self._counters = MetricCounters()
        self._records: deque[_Record] = deque()
        self._lock = threading.Lock()
        self._before: _Record | None = None
        self._is_draft_down = False

    def add(self, stats: StepStats) -> None:
        """Take a step, in the loop's thread."""
        goodput = self._goodput
        switch = goodput.switch
        self._records.append(
            _Record(
                stats,
                self._plan(),
                goodput.predicted,
                goodput.cost.predicted_s,
                goodput.cost.plain_s,
                switch.num_switches,
                switch.num_probes,
                switch.is_on,
            )
        )

    def fold(self) -> None:
        """Count what was taken since the last call. Call a few times a second, or memory grows."""
        with self._lock:
            while self._records:
                record = self._records.popleft()
                self._count(record)
                self._before = record

    def read(self) -> MetricSnapshot:
        """Everything counted so far."""
        self.fold()
        plan = self._plan()
        self._counters.set("paceline_plan_version", plan.version)
        self._counters.set("paceline_plan_max_k", plan.max_k if plan.enabled and plan.policy != "off" else 0)
        return self._counters.read()

    def _count(self, record: _Record) -> None:
        self._count_time(record.stats)
        self._count_drafts(record.stats)
        self._count_pace(record)
        if record.stats.num_decodes and not record.stats.num_prefill_tokens:
            self._count_goodput(record)

    def _count_time(self, stats: StepStats) -> None:
        counters = self._counters
        counters.add("paceline_steps_total")
        counters.observe("paceline_step_seconds", stats.step_s)
        counters.observe("paceline_batch_requests", stats.num_decodes)
        counters.add("paceline_prefill_tokens_total", stats.num_prefill_tokens)
        counters.observe("paceline_phase_seconds", stats.schedule_s, "schedule")
        if stats.draft_s or stats.handoff_s:
            counters.observe("paceline_phase_seconds", stats.draft_s, "draft")
            counters.observe("paceline_phase_seconds", stats.handoff_s, "handoff")
        counters.observe("paceline_phase_seconds", stats.verify_s, "verify")
        counters.observe("paceline_phase_seconds", stats.sample_s, "sample")

    def _count_drafts(self, stats: StepStats) -> None:
        counters = self._counters
        num_verdicts = sum(stats.k_by_reason.values())
        counters.add("paceline_verdicts_total", num_verdicts)
        counters.add("paceline_emitted_tokens_total", stats.num_emitted)
        for reason, count in stats.k_by_reason.items():
            counters.add("paceline_k_reasons_total", count, reason)
        if num_verdicts > len(stats.outcomes):
            counters.observe("paceline_k", 0, count=num_verdicts - len(stats.outcomes))
        if not stats.outcomes:
            return
        counters.add("paceline_drafts_total", len(stats.outcomes))
        counters.add("paceline_drafted_tokens_total", stats.num_drafted)
        counters.add("paceline_accepted_tokens_total", stats.num_accepted)
        for k, count in Counter([outcome.num_drafted for outcome in stats.outcomes]).items():
            counters.observe("paceline_k", k, count=count)
        for accepted, count in Counter([outcome.num_accepted for outcome in stats.outcomes]).items():
            counters.observe("paceline_accepted_per_draft", accepted, count=count)
        for position, reached in enumerate(stats.drafted_by_position):
            if reached:
                counters.add("paceline_reached_positions_total", reached, str(position))
                counters.add("paceline_accepted_positions_total", stats.accepted_by_position[position], str(position))

    def _count_pace(self, record: _Record) -> None:
        before, stats = self._before, record.stats
        switched_before, probed_before = (before.num_switches, before.num_probes) if before is not None else _OFF
        if record.num_probes > probed_before:
            self._counters.add("paceline_probes_total", record.num_probes - probed_before)
        if record.num_switches > switched_before:
            off_cause = "batch" if "batch" in stats.k_by_reason else "acceptance"
            cause = "gain" if record.is_on else off_cause
            self._counters.add("paceline_switches_total", record.num_switches - switched_before, cause)
        if before is not None and before.plan != record.plan:
            self._counters.add("paceline_switches_total", 1, "plan")
        if "draft_down" in stats.k_by_reason and not self._is_draft_down:
            self._is_draft_down = True
            self._counters.add("paceline_switches_total", 1, "draft_down")
        elif stats.outcomes and self._is_draft_down:
            self._is_draft_down = False
            self._counters.add("paceline_switches_total", 1, "draft_up")
        if stats.step_s > 0 and record.cost_s > 0:
            self._counters.observe("paceline_cost_error_ratio", abs(record.cost_s - stats.step_s) / stats.step_s)

    def _count_goodput(self, record: _Record) -> None:
        """Of steps that only decode, so that expected and real ones are the same ones."""
        counters, stats = self._counters, record.stats
        counters.add("paceline_realised_tokens_total", stats.num_emitted)
        counters.add("paceline_realised_seconds_total", stats.step_s)
        counters.add("paceline_plain_tokens_total", stats.num_decodes)
        counters.add("paceline_plain_seconds_total", record.plain_s)
        tokens, seconds = self._expected(record)
        counters.add("paceline_predicted_tokens_total", tokens)
        counters.add("paceline_predicted_seconds_total", seconds)

    def _expected(self, record: _Record) -> tuple[float, float]:
        """Tokens and seconds: what policy `goodput` counted on, or what it would have said of another one's choice."""
        predicted = record.predicted
        is_asked = record.plan.enabled and record.plan.policy == "goodput"  # else its last prediction stays in place
        if predicted is not None and is_asked:
            return predicted.tokens, predicted.seconds
        tokens = float(record.stats.num_decodes)
        if record.stats.outcomes:
            expected: dict[tuple[WorkloadClass, DraftSource, int], list[float]] = {}
            for outcome in record.stats.outcomes:
                place = (outcome.workload, outcome.source, outcome.match_len)
                if place not in expected:
                    expected[place] = self._accepted_by_k(*place)
                tokens += expected[place][outcome.num_drafted - 1]
        return tokens, record.cost_s

    def _accepted_by_k(self, workload: WorkloadClass, source: DraftSource, match_len: int) -> list[float]:
        """Accepted tokens that were to be expected of a draft, for K from 1 on."""
        lookup = self._goodput.lookup
        if lookup is not None and source == "lookup":
            acceptance = lookup.acceptance_of(match_len)
        else:
            acceptance = self._goodput.acceptance
        expected: list[float] = np.cumprod(acceptance.by_position(workload)).cumsum().tolist()
        return expected
