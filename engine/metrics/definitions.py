"""Every metric, declared once as data: exporter, documentation, panels and alerts derive from this list.

Owns names, units, labels, buckets, and the query that makes sense of each. Knows no client library and no value.
Ratios are formed in PromQL only, so figures of several replicas can be added first.

Every series also carries COMMON_LABELS. The targets in the discovery files carry the same ones, so that `up` has them
too; scrape with `honor_labels: true`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from engine.core.step import KReason
from engine.metrics.types import Group, Metric, counter, gauge, histogram, mean, over, quantile, rate

__all__ = [
    "COMMON_LABELS",
    "K_REASONS",
    "METRICS",
    "SCALING_REASONS",
    "Group",
    "Metric",
    "ScalingReason",
    "by_name",
]

Phase = Literal["schedule", "draft", "handoff", "verify", "sample"]
SwitchCause = Literal["gain", "acceptance", "batch", "plan", "draft_down", "draft_up"]
"""Drafting came on because it pays; went off because it is not believed, or the batch is too large; the plan's policy,
bounds or switch changed; the draft was lost or came back."""

ScalingReason = Literal["steady", "slow", "queue", "spare", "unreachable", "no_data", "fixed"]
"""The objective is met; time per token is above it; requests wait; fewer replicas would do; no number of replicas
meets it, so as near as can be; nothing is known yet; the number is set by hand."""

COMMON_LABELS = ("app", "replica", "model")
K_REASONS: tuple[str, ...] = get_args(KReason)
PHASES: tuple[str, ...] = get_args(Phase)
SWITCH_CAUSES: tuple[str, ...] = get_args(SwitchCause)
CACHES = ("target", "draft")
FINISH_REASONS = ("stop", "length", "abort", "error")
SCALING_REASONS: tuple[str, ...] = get_args(ScalingReason)
REJECT_CAUSES = ("queue_full", "unavailable", "rate_limit", "unauthorized")

STEP_BUCKETS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
TOKEN_BUCKETS = (1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
REQUEST_BUCKETS = (5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
K_BUCKETS = tuple(float(k) for k in range(17))
BATCH_BUCKETS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
ERROR_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0)

_STEPS = (
    counter("paceline_steps_total", "speculation", "Steps of the engine's loop."),
    histogram(
        "paceline_step_seconds",
        "speculation",
        "Duration of a whole step.",
        STEP_BUCKETS,
        mean("paceline_step_seconds"),
    ),
    histogram(
        "paceline_phase_seconds",
        "speculation",
        "Duration of each phase of a step; draft and handoff only in steps that asked a draft.",
        STEP_BUCKETS,
        rate("paceline_phase_seconds_sum", "phase"),
        labels=("phase",),
        values=PHASES,
    ),
    histogram(
        "paceline_batch_requests",
        "speculation",
        "Decoding requests per step.",
        BATCH_BUCKETS,
        mean("paceline_batch_requests"),
        unit="requests",
    ),
    counter("paceline_prefill_tokens_total", "serving", "Prompt tokens computed in steps.", unit="tokens"),
    counter(
        "paceline_verdicts_total",
        "speculation",
        "Requests that a step gave at least one token, summed over steps.",
        unit="requests",
    ),
)

_DRAFTS = (
    counter("paceline_drafts_total", "speculation", "Drafts verified: one per request and step that drafted for it."),
    counter("paceline_drafted_tokens_total", "speculation", "Draft tokens verified.", unit="tokens"),
    counter(
        "paceline_accepted_tokens_total",
        "speculation",
        "Draft tokens accepted; over drafted tokens it is the acceptance rate.",
        over("paceline_accepted_tokens_total", "paceline_drafted_tokens_total"),
        unit="tokens",
    ),
    counter(
        "paceline_emitted_tokens_total",
        "speculation",
        "Tokens emitted; over verdicts it is the number of tokens per request and step.",
        over("paceline_emitted_tokens_total", "paceline_verdicts_total"),
        unit="tokens",
    ),
    histogram(
        "paceline_accepted_per_draft",
        "speculation",
        "Accepted tokens of each draft.",
        K_BUCKETS,
        mean("paceline_accepted_per_draft"),
        unit="tokens",
    ),
    counter(
        "paceline_reached_positions_total",
        "speculation",
        "Draft tokens that the verdict reached, by position from 0: those after a rejection are not counted.",
        unit="tokens",
        labels=("position",),
    ),
    counter(
        "paceline_accepted_positions_total",
        "speculation",
        "Draft tokens accepted, by position from 0; over the reached ones it is acceptance by position.",
        over("paceline_accepted_positions_total", "paceline_reached_positions_total", "position"),
        unit="tokens",
        labels=("position",),
    ),
)

_PACE = (
    histogram(
        "paceline_k",
        "speculation",
        "K of each request and step: draft tokens that were verified for it.",
        K_BUCKETS,
        mean("paceline_k"),
        unit="tokens",
    ),
    counter(
        "paceline_k_reasons_total",
        "speculation",
        "Why K was what it was, per request and step.",
        unit="requests",
        labels=("reason",),
        values=K_REASONS,
    ),
    counter(
        "paceline_switches_total",
        "speculation",
        "Times that drafting went on or off, by cause.",
        "sum by (cause) (increase(paceline_switches_total{$selector}[$window]))",
        labels=("cause",),
        values=SWITCH_CAUSES,
    ),
    counter(
        "paceline_probes_total",
        "speculation",
        "Looks at whether off is still right.",
        "sum (increase(paceline_probes_total{$selector}[$window]))",
    ),
    counter(
        "paceline_predicted_tokens_total",
        "speculation",
        "Tokens expected of decode-only steps; over predicted seconds it is predicted goodput.",
        over("paceline_predicted_tokens_total", "paceline_predicted_seconds_total"),
        unit="tokens",
    ),
    counter(
        "paceline_predicted_seconds_total",
        "speculation",
        "What the cost model expected those steps to last.",
        unit="seconds",
    ),
    counter(
        "paceline_realised_tokens_total",
        "speculation",
        "Tokens emitted by decode-only steps; over realised seconds it is goodput.",
        over("paceline_realised_tokens_total", "paceline_realised_seconds_total"),
        unit="tokens",
    ),
    counter("paceline_realised_seconds_total", "speculation", "What those steps lasted.", unit="seconds"),
    counter(
        "paceline_plain_tokens_total",
        "speculation",
        "Tokens the same steps would have emitted at K = 0; over plain seconds it is goodput without speculation.",
        over("paceline_plain_tokens_total", "paceline_plain_seconds_total"),
        unit="tokens",
    ),
    counter(
        "paceline_plain_seconds_total",
        "speculation",
        "What the same steps would have lasted at K = 0, by the cost model.",
        unit="seconds",
    ),
    histogram(
        "paceline_cost_error_ratio",
        "speculation",
        "Relative error of the cost model's prediction for each step.",
        ERROR_BUCKETS,
        quantile("paceline_cost_error_ratio", 0.5),
        unit="ratio",
    ),
    gauge("paceline_plan_version", "speculation", "Version of the plan in force."),
    gauge(
        "paceline_plan_max_k", "speculation", "Upper bound of K in force; 0 when drafting is disabled.", unit="tokens"
    ),
)

_REQUESTS = (
    histogram("paceline_ttft_seconds", "serving", "Time to first token.", REQUEST_BUCKETS),
    histogram(
        "paceline_itl_seconds", "serving", "Inter-token latency: time between messages of a stream.", TOKEN_BUCKETS
    ),
    histogram(
        "paceline_tpot_seconds", "serving", "Time per output token after the first, mean of a request.", TOKEN_BUCKETS
    ),
    histogram("paceline_e2e_seconds", "serving", "Time from arrival to the last token.", REQUEST_BUCKETS),
    histogram("paceline_queue_seconds", "serving", "Time from arrival to the first step.", REQUEST_BUCKETS),
    counter(
        "paceline_requests_total",
        "serving",
        "Requests that ended, by finish reason.",
        labels=("reason",),
        values=FINISH_REASONS,
    ),
    counter(
        "paceline_rejected_total",
        "serving",
        "Requests refused before they entered the engine.",
        labels=("cause",),
        values=REJECT_CAUSES,
    ),
    counter(
        "paceline_prompt_tokens_total", "serving", "Prompt tokens of requests that entered the engine.", unit="tokens"
    ),
    counter("paceline_generated_tokens_total", "serving", "Tokens sent to clients.", unit="tokens"),
    counter(
        "paceline_prefix_cache_hit_tokens_total",
        "serving",
        "Prompt tokens found in the prefix cache; over prompt tokens it is the hit rate.",
        over("paceline_prefix_cache_hit_tokens_total", "paceline_prompt_tokens_total"),
        unit="tokens",
    ),
    gauge("paceline_running_requests", "serving", "Requests in the running batch.", unit="requests"),
    gauge("paceline_waiting_requests", "serving", "Requests in the queue.", unit="requests"),
)

_MEMORY = (
    gauge(
        "paceline_kv_used_blocks",
        "serving",
        "KV blocks held by requests.",
        unit="blocks",
        labels=("cache",),
        values=CACHES,
    ),
    gauge(
        "paceline_kv_free_blocks",
        "serving",
        "KV blocks that can be handed out; cached prefixes are among them.",
        unit="blocks",
        labels=("cache",),
        values=CACHES,
    ),
    counter(
        "paceline_kv_evictions_total",
        "serving",
        "Cached blocks overwritten because space was needed.",
        unit="blocks",
        labels=("cache",),
        values=CACHES,
    ),
    counter("paceline_preemptions_total", "serving", "Running requests sent back to the queue for lack of KV blocks."),
    gauge("paceline_draft_memory_bytes", "fleet", "Draft weights and KV pool.", unit="bytes"),
    gauge("paceline_draft_memory_cap_bytes", "fleet", "What draft weights and KV may take.", unit="bytes"),
)

_FLEET = (
    gauge("paceline_draft_up", "fleet", "1 while a draft is attached or none is needed, 0 while it is down."),
    counter(
        "paceline_restarts_total",
        "fleet",
        "Processes replaced after they died or hung.",
        "sum by (process) (increase(paceline_restarts_total{$selector}[$window]))",
        labels=("process",),
        values=("draft", "controller", "target"),
    ),
    gauge(
        "paceline_desired_replicas",
        "fleet",
        "Replicas that the autoscaling policy wants, or that are set; every replica of an app says the same.",
        of_app=True,
    ),
    gauge(
        "paceline_scaling_reason",
        "fleet",
        "1 for why that many replicas are wanted, 0 for the other reasons.",
        labels=("reason",),
        values=SCALING_REASONS,
        of_app=True,
    ),
    gauge("paceline_start_time_seconds", "fleet", "When the replica became ready, unix time.", unit="seconds"),
)

_ALIASES = (
    counter(
        "vllm:spec_decode_num_drafts_total",
        "speculation",
        "Alias of paceline_drafts_total.",
        alias_of="paceline_drafts_total",
    ),
    counter(
        "vllm:spec_decode_num_draft_tokens_total",
        "speculation",
        "Alias of paceline_drafted_tokens_total.",
        unit="tokens",
        alias_of="paceline_drafted_tokens_total",
    ),
    counter(
        "vllm:spec_decode_num_accepted_tokens_total",
        "speculation",
        "Alias of paceline_accepted_tokens_total.",
        unit="tokens",
        alias_of="paceline_accepted_tokens_total",
    ),
    counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "speculation",
        "Alias of paceline_accepted_positions_total.",
        unit="tokens",
        labels=("position",),
        alias_of="paceline_accepted_positions_total",
    ),
)

METRICS: tuple[Metric, ...] = _STEPS + _DRAFTS + _PACE + _REQUESTS + _MEMORY + _FLEET + _ALIASES


def by_name(metrics: Iterable[Metric] = METRICS) -> dict[str, Metric]:
    """Metrics by the name they are exposed under."""
    return {metric.name: metric for metric in metrics}
