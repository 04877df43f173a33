"""Alert rules for Prometheus, each with a runbook.

Owns conditions, thresholds and text. Queries come from the declarations. Rules are evaluated per replica, because one
bad replica does not show in the mean of a fleet. Rules about a model are evaluated over the whole app.
"""

from __future__ import annotations

from typing import Any

from dashboards.model import Alert
from dashboards.promql import Scope
from dashboards.queries import TTFT_OBJECTIVE_S

REPLICA = ("app", "model", "replica")
MODEL = ("app", "model")
WHERE = "{{ $labels.app }}, {{ $labels.model }}, replica {{ $labels.replica }}"
RECENT, LONG = Scope(window="10m"), Scope(window="6h")
NOW = Scope(window="5m")


def alerts() -> tuple[Alert, ...]:
    """All rules, speculation first."""
    return (
        _acceptance_collapse(),
        _not_paying(),
        _draft_down(),
        _evictions(),
        _preemptions(),
        _ttft(),
        _queue_growing(),
        _errors(),
        _target_down(),
        _replicas_missing(),
    )


def rules(alerts: tuple[Alert, ...]) -> dict[str, Any]:
    """A Prometheus rule file as plain values."""
    return {
        "groups": [
            {
                "name": "paceline",
                "rules": [
                    {
                        "alert": alert.name,
                        "expr": alert.expr,
                        "for": alert.for_,
                        "labels": {"severity": alert.severity},
                        "annotations": {"summary": alert.summary, "runbook": alert.runbook},
                    }
                    for alert in alerts
                ],
            }
        ]
    }


def _acceptance_collapse() -> Alert:
    recent = RECENT.ratio("accepted_tokens_total", "drafted_tokens_total", *MODEL)
    usual = LONG.ratio("accepted_tokens_total", "drafted_tokens_total", *MODEL)
    drafted = RECENT.growth("drafted_tokens_total", *MODEL)
    return Alert(
        name="PacelineAcceptanceCollapse",
        expr=f"{recent.expr} < 0.5 * ({usual.expr}) and {drafted.expr} > 100",
        for_="10m",
        severity="ticket",
        summary="{{ $labels.app }}, {{ $labels.model }}: acceptance {{ $value | humanizePercentage }}, less than half "
        "of what it was over six hours",
        runbook="The target rejects most draft tokens. Responses stay exact; they only come slower. "
        "Look at acceptance by position: a fall at every position points to a draft that does not belong to this "
        "target (new weights, another tokenizer, another chat template), a fall at later ones only to harder traffic "
        "(other language, high temperature). Compare replicas on the Fleet board; if one is off, restart it. If the "
        "traffic has changed for good, distil a new draft on it. Meanwhile the policy lowers K.",
    )


def _not_paying() -> Alert:
    realised = NOW.ratio("realised_tokens_total", "realised_seconds_total", *REPLICA)
    plain = NOW.ratio("plain_tokens_total", "plain_seconds_total", *REPLICA)
    drafted = NOW.growth("drafts_total", *REPLICA)
    return Alert(
        name="PacelineSpeculationNotPaying",
        expr=f"({realised.expr}) / ({plain.expr}) < 0.95 and {drafted.expr} > 100",
        for_="10m",
        severity="ticket",
        summary=f"{WHERE}: {{{{ $value | humanizePercentage }}}} of the goodput that K = 0 is predicted to give",
        runbook="Drafting costs more than it gains, and the policy has not switched it off. Look at the cost-model "
        "error: a high one means that another load shares the device or the cores, and K is chosen by wrong costs. "
        "Look at draft and handoff time: slower than at start means the draft is starved. With policy `fixed` or "
        '`threshold`, change to `goodput`. To stop the loss at once, send PATCH /admin/pace with {"enabled": false}.',
    )


def _draft_down() -> Alert:
    return Alert(
        name="PacelineDraftDown",
        expr=f"{NOW.gauge('draft_up', *REPLICA, over='min').expr} == 0",
        for_="1m",
        severity="ticket",
        summary=f"{WHERE}: no draft, K is 0 for all requests",
        runbook="The draft died or hung, and its replacement has not been attached for a minute. No request is lost; "
        "all run at the speed of plain decoding. Look at restarts by process on the Fleet board and at the log of the "
        "draft worker: out of memory (lower speculative.memory_fraction or free the device), a draft folder that "
        "cannot be read, or a deadline too short for this machine (speculative.deadline_s).",
    )


def _evictions() -> Alert:
    by = (*REPLICA, "cache")
    evicted = NOW.rate("kv_evictions_total", *by)
    used, free = (NOW.gauge(name, *by).expr for name in ("kv_used_blocks", "kv_free_blocks"))
    return Alert(
        name="PacelineEvictions",
        expr=f"{evicted.expr} / ({used} + {free}) > 0.01",
        for_="10m",
        severity="ticket",
        summary=f"{WHERE}: {{{{ $value | humanizePercentage }}}} of the {{{{ $labels.cache }}}} cache is overwritten "
        "each second",
        runbook="The whole cache turns over in less than 100 seconds, so prefixes are overwritten before they are "
        "used again. Look at the prefix-cache hit rate: if it has fallen, time to first token has risen with it. "
        "Enlarge the KV cache (kv_cache_tokens), add a replica, or lower max_num_requests. For the draft's cache: "
        "raise speculative.memory_fraction, or accept that some requests run at K = 0.",
    )


def _preemptions() -> Alert:
    return Alert(
        name="PacelinePreemptions",
        expr=f"{NOW.rate('preemptions_total', *REPLICA).expr} > 0.1",
        for_="10m",
        severity="ticket",
        summary=f"{WHERE}: {{{{ $value | humanize }}}} preemptions per second",
        runbook="More requests run than the KV cache can hold, and tokens are computed twice. Lower max_num_requests "
        "or max_model_len, enlarge the KV cache (kv_cache_tokens), or add a replica.",
    )


def _ttft() -> Alert:
    return Alert(
        name="PacelineTtftObjective",
        expr=f"{NOW.quantile(0.95, 'ttft_seconds', *MODEL).expr} > {TTFT_OBJECTIVE_S:g}",
        for_="10m",
        severity="page",
        summary="{{ $labels.app }}, {{ $labels.model }}: 95th percentile of time to first token is "
        "{{ $value | humanizeDuration }}, objective "
        f"{TTFT_OBJECTIVE_S:g} s",
        runbook="Clients wait for their first token. Look at time in the queue: if that is most of the time, there "
        "are too few replicas or too many requests (see PacelineQueueGrowing). If not, prefill takes it: longer "
        "prompts, a lower prefix-cache hit rate, or large decode batches that prefill chunks must share a step with "
        "(max_step_tokens). Right after a start, the first requests warm caches; wait.",
    )


def _queue_growing() -> Alert:
    slope = f"sum by ({', '.join(REPLICA)}) (deriv({RECENT.series('waiting_requests')}[{RECENT.window}]))"
    return Alert(
        name="PacelineQueueGrowing",
        expr=f"{slope} > 0.05 and {RECENT.gauge('waiting_requests', *REPLICA).expr} > 10",
        for_="5m",
        severity="page",
        summary=f"{WHERE}: the queue grows by {{{{ $value | humanize }}}} requests per second",
        runbook="More requests arrive than are served; when the queue is full, clients get 429. See whether all "
        "replicas are present or wait for a node. If the queue of one replica alone grows, that replica is slow: look "
        "at its step duration and KV blocks. Shed load, or add replicas (num_replicas).",
    )


def _errors() -> Alert:
    failed = NOW.rate("requests_total", *REPLICA, where='reason="error"')
    return Alert(
        name="PacelineErrors",
        expr=f"{failed.expr} / {NOW.rate('requests_total', *REPLICA).expr} > 0.02",
        for_="5m",
        severity="page",
        summary=f"{WHERE}: {{{{ $value | humanizePercentage }}}} of requests end in an error",
        runbook="The engine ends requests that it had admitted. Look at the replica's log for the error's name: "
        "ShardDown means a target shard died or hung, and the replica is about to be replaced; anything else is a "
        "fault in the engine, and the log has its traceback.",
    )


def _target_down() -> Alert:
    return Alert(
        name="PacelineTargetDown",
        expr='up{job="paceline"} == 0',
        for_="2m",
        severity="page",
        summary=f"{WHERE}: {{{{ $labels.instance }}}} does not respond to Prometheus",
        runbook="The replica is listed under /metrics/targets, so it is alive, but its exporter does not respond. If "
        "clients get responses from it, only the exporter or the network between is broken: see metrics_host and the "
        "firewall. A replica that is dead leaves the list, and PacelineReplicasMissing counts it.",
    )


def _replicas_missing() -> Alert:
    wanted = NOW.gauge("desired_replicas", "app", over="max")
    return Alert(
        name="PacelineReplicasMissing",
        expr=f'sum by (app) (up{{job="paceline"}}) < {wanted.expr}',
        for_="5m",
        severity="page",
        summary="{{ $labels.app }}: {{ $value }} replicas respond, fewer than are wanted",
        runbook="Replicas died and no others took their place, or new ones do not start. `serve status` names the "
        "reason: no node with free CPUs or GPUs (see `ray status`), an engine that does not fit its memory, or a model "
        "that cannot be downloaded. When all are gone nobody lists targets; Prometheus then keeps the last ones, and "
        "PacelineTargetDown fires for each.",
    )
