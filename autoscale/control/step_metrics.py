"""Step stats to metrics: what every step did, what it took, and what was predicted of it.

Owns the way from StepStats and Prediction to the metrics of group `speculation`. The step loop only appends; another
thread counts when it calls `fold` or `read`. Knows no policy, no client library and no process.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable

from msgspec import Struct

from engine.core.pacing import Prediction, SpeculationPlan
from engine.core.stats import StepStats
from engine.metrics.counters import MetricCounters, MetricSnapshot


class _Record(Struct, frozen=True, gc=False):
    """A step, the prediction for it, and the plan in force after it."""

    stats: StepStats
    prediction: Prediction
    plan: SpeculationPlan


class StepRecorder:
    """Metrics of one engine's steps.

    Args:
        plan: returns the plan in force.
    """

    def __init__(self, plan: Callable[[], SpeculationPlan]) -> None:
        self._plan = plan
        self._counters = MetricCounters()
        self._records: deque[_Record] = deque()
        self._lock = threading.Lock()
        self._last_plan: SpeculationPlan | None = None
        self._is_draft_down = False

    def add(self, stats: StepStats, prediction: Prediction) -> None:
        """Take a finished step, in the loop's thread."""
        self._records.append(_Record(stats, prediction, self._plan()))

    def fold(self) -> None:
        """Count the steps taken since the last call. Call a few times a second, or memory grows."""
        with self._lock:
            while self._records:
                record = self._records.popleft()
                self._count(record)
                self._last_plan = record.plan

    def read(self) -> MetricSnapshot:
        """All metrics so far."""
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
            self._count_goodput(record.stats, record.prediction)

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
        counters.add("paceline_drafted_levels_total", sum(outcome.num_levels for outcome in stats.outcomes))
        counters.add("paceline_branches_taken_total", sum(outcome.left_first_path for outcome in stats.outcomes))
        for k, count in Counter([outcome.num_drafted for outcome in stats.outcomes]).items():
            counters.observe("paceline_k", k, count=count)
        for accepted, count in Counter([outcome.num_accepted for outcome in stats.outcomes]).items():
            counters.observe("paceline_accepted_per_draft", accepted, count=count)
        for position, reached in enumerate(stats.drafted_by_position):
            if reached:
                counters.add("paceline_reached_positions_total", reached, str(position))
                counters.add("paceline_accepted_positions_total", stats.accepted_by_position[position], str(position))

    def _count_pace(self, record: _Record) -> None:
        stats, prediction = record.stats, record.prediction
        if prediction.probed:
            self._counters.add("paceline_probes_total")
        if prediction.switched is not None:
            off_cause = "batch" if "batch" in stats.k_by_reason else "acceptance"
            cause = "gain" if prediction.switched == "on" else off_cause
            self._counters.add("paceline_switches_total", 1, cause)
        if self._last_plan is not None and self._last_plan != record.plan:
            self._counters.add("paceline_switches_total", 1, "plan")
        if "draft_down" in stats.k_by_reason and not self._is_draft_down:
            self._is_draft_down = True
            self._counters.add("paceline_switches_total", 1, "draft_down")
        elif stats.outcomes and self._is_draft_down:
            self._is_draft_down = False
            self._counters.add("paceline_switches_total", 1, "draft_up")
        if stats.step_s > 0 and prediction.seconds > 0:
            self._counters.observe("paceline_cost_error_ratio", abs(prediction.seconds - stats.step_s) / stats.step_s)

    def _count_goodput(self, stats: StepStats, prediction: Prediction) -> None:
        """Only steps without prompts count, so that predicted and real figures are of the same steps."""
        counters = self._counters
        counters.add("paceline_realised_tokens_total", stats.num_emitted)
        counters.add("paceline_realised_seconds_total", stats.step_s)
        counters.add("paceline_plain_tokens_total", stats.num_decodes)
        counters.add("paceline_plain_seconds_total", prediction.plain_s)
        counters.add("paceline_predicted_tokens_total", prediction.expected_tokens)
        counters.add("paceline_predicted_seconds_total", prediction.expected_s)
