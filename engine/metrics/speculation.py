"""Metrics of the step loop, of drafting and of the pace.

Owns their names, units, labels, buckets and default queries. Holds no value.
"""

from __future__ import annotations

from engine.metrics.labels import (
    BATCH_BUCKETS,
    ERROR_BUCKETS,
    K_BUCKETS,
    K_REASONS,
    PHASES,
    STEP_BUCKETS,
    SWITCH_CAUSES,
)
from engine.metrics.types import counter, gauge, histogram, mean, over, quantile, rate

STEPS = (
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
        "Duration of each phase of a step; draft and handoff only in steps that asked for a draft.",
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
        "Requests that got at least one token in a step, summed over steps.",
        unit="requests",
    ),
)

DRAFTS = (
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
        "paceline_drafted_levels_total",
        "speculation",
        "Draft tokens on the longest path of each draft; over drafts it is the depth of a draft.",
        over("paceline_drafted_levels_total", "paceline_drafts_total"),
        unit="tokens",
    ),
    counter(
        "paceline_branches_taken_total",
        "speculation",
        "Drafts whose accepted path has a token that is not the first one tried at its position.",
        over("paceline_branches_taken_total", "paceline_drafts_total"),
    ),
    counter(
        "paceline_reached_positions_total",
        "speculation",
        "Draft tokens reached by verification, by position from 0: those after a rejection are not counted.",
        unit="tokens",
        labels=("position",),
    ),
    counter(
        "paceline_accepted_positions_total",
        "speculation",
        "Draft tokens accepted, by position from 0; over reached positions it is acceptance by position.",
        over("paceline_accepted_positions_total", "paceline_reached_positions_total", "position"),
        unit="tokens",
        labels=("position",),
    ),
)

ADAPTATION = (
    counter("paceline_draft_adaptation_steps_total", "speculation", "Steps that the trainer of the draft has made."),
    counter(
        "paceline_draft_adaptation_tokens_total",
        "speculation",
        "Positions that the draft was trained on; repeated ones count again.",
        unit="tokens",
    ),
    counter(
        "paceline_draft_adaptation_documents_total",
        "speculation",
        "Requests, or parts of them, that the trainer of the draft has received.",
    ),
    counter(
        "paceline_draft_adaptation_swaps_total",
        "speculation",
        "Times that better weights of the draft were swapped in.",
        "sum (increase(paceline_draft_adaptation_swaps_total{$selector}[$window]))",
    ),
    counter(
        "paceline_draft_adaptation_rollbacks_total",
        "speculation",
        "Times that weights of the draft were taken back, because live requests accepted less.",
        "sum (increase(paceline_draft_adaptation_rollbacks_total{$selector}[$window]))",
    ),
    counter(
        "paceline_draft_adaptation_cpu_seconds_total",
        "speculation",
        "CPU time of the trainer of the draft.",
        unit="seconds",
    ),
    gauge(
        "paceline_draft_adaptation_buffer_bytes",
        "speculation",
        "Requests that are kept to train the draft on.",
        unit="bytes",
    ),
    gauge(
        "paceline_draft_adaptation_live_acceptance_ratio",
        "speculation",
        "Share of first drafted tokens that live requests accepted, with the weights that serve.",
        unit="ratio",
    ),
    gauge(
        "paceline_draft_adaptation_held_out_tokens_per_step",
        "speculation",
        "Tokens per verify step on held-out requests, greedy: of the weights that serve, and of those in training.",
        unit="tokens",
        labels=("weights",),
        values=("serving", "training"),
    ),
)

PACE = (
    histogram(
        "paceline_k",
        "speculation",
        "K of each request and step: draft tokens verified.",
        K_BUCKETS,
        mean("paceline_k"),
        unit="tokens",
    ),
    counter(
        "paceline_k_reasons_total",
        "speculation",
        "Requests summed over steps, by the reason of their K.",
        unit="requests",
        labels=("reason",),
        values=K_REASONS,
    ),
    counter(
        "paceline_switches_total",
        "speculation",
        "Times that drafting was switched on or off, by cause.",
        "sum by (cause) (increase(paceline_switches_total{$selector}[$window]))",
        labels=("cause",),
        values=SWITCH_CAUSES,
    ),
    counter(
        "paceline_probes_total",
        "speculation",
        "Steps that drafted although drafting is off, to measure whether it should be on.",
        "sum (increase(paceline_probes_total{$selector}[$window]))",
    ),
    counter(
        "paceline_predicted_tokens_total",
        "speculation",
        "Predicted tokens of decode-only steps; over predicted seconds it is predicted goodput.",
        over("paceline_predicted_tokens_total", "paceline_predicted_seconds_total"),
        unit="tokens",
    ),
    counter(
        "paceline_predicted_seconds_total",
        "speculation",
        "Predicted duration of decode-only steps, by the cost model.",
        unit="seconds",
    ),
    counter(
        "paceline_realised_tokens_total",
        "speculation",
        "Tokens emitted by decode-only steps; over realised seconds it is goodput.",
        over("paceline_realised_tokens_total", "paceline_realised_seconds_total"),
        unit="tokens",
    ),
    counter("paceline_realised_seconds_total", "speculation", "Duration of decode-only steps.", unit="seconds"),
    counter(
        "paceline_plain_tokens_total",
        "speculation",
        "Tokens that decode-only steps would have emitted at K = 0; over plain seconds it is goodput at K = 0.",
        over("paceline_plain_tokens_total", "paceline_plain_seconds_total"),
        unit="tokens",
    ),
    counter(
        "paceline_plain_seconds_total",
        "speculation",
        "Predicted duration of decode-only steps at K = 0, by the cost model.",
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
