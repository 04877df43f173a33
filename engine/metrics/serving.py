"""Metrics of requests, memory and the fleet, and aliases under the names that vLLM uses.

Owns their names, units, labels, buckets and default queries. Holds no value.
"""

from __future__ import annotations

from engine.metrics.labels import (
    CACHES,
    FINISH_REASONS,
    REJECT_CAUSES,
    REQUEST_BUCKETS,
    SCALING_REASONS,
    TOKEN_BUCKETS,
)
from engine.metrics.types import counter, gauge, histogram, over

REQUESTS = (
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
        "Requests refused before their first step. The cause `invalid_request` is an HTTP 400 or 404.",
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
    counter(
        "paceline_adapter_requests_total",
        "serving",
        "Requests of LoRA adapters that ended, by adapter.",
        labels=("adapter",),
    ),
    counter(
        "paceline_adapter_generated_tokens_total",
        "serving",
        "Tokens sent to clients by LoRA adapters, by adapter.",
        labels=("adapter",),
        unit="tokens",
    ),
    counter(
        "paceline_adapter_drafted_tokens_total",
        "serving",
        "Draft tokens verified for LoRA adapters, by adapter, counted when a request ends.",
        labels=("adapter",),
        unit="tokens",
    ),
    counter(
        "paceline_adapter_accepted_tokens_total",
        "serving",
        "Draft tokens accepted for LoRA adapters, by adapter; over drafted tokens it is the acceptance rate.",
        over("paceline_adapter_accepted_tokens_total", "paceline_adapter_drafted_tokens_total", "adapter"),
        labels=("adapter",),
        unit="tokens",
    ),
    gauge("paceline_running_requests", "serving", "Requests in the running batch.", unit="requests"),
    gauge("paceline_waiting_requests", "serving", "Requests in the queue.", unit="requests"),
)

MEMORY = (
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
        "KV blocks that can be allocated, including those that hold cached prefixes.",
        unit="blocks",
        labels=("cache",),
        values=CACHES,
    ),
    counter(
        "paceline_kv_evictions_total",
        "serving",
        "Cached blocks that were allocated again and so lost their content.",
        unit="blocks",
        labels=("cache",),
        values=CACHES,
    ),
    counter("paceline_preemptions_total", "serving", "Running requests sent back to the queue for lack of KV blocks."),
    gauge("paceline_draft_memory_bytes", "fleet", "Draft weights and KV pool.", unit="bytes"),
    gauge("paceline_draft_memory_cap_bytes", "fleet", "Upper bound of draft weights and KV pool.", unit="bytes"),
)

FLEET = (
    gauge(
        "paceline_draft_up", "fleet", "1 while a draft is attached or none is configured, 0 while the draft is down."
    ),
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
        "Replicas that the autoscaling policy wants, or that are set by hand; equal in all replicas of an app.",
        of_app=True,
    ),
    gauge(
        "paceline_scaling_reason",
        "fleet",
        "1 for the reason of the desired number of replicas, 0 for the other reasons.",
        labels=("reason",),
        values=SCALING_REASONS,
        of_app=True,
    ),
    gauge("paceline_start_time_seconds", "fleet", "When the replica became ready, unix time.", unit="seconds"),
)

ALIASES = (
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
