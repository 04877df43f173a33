"""The Fleet board: the replicas side by side, and their number.

Owns the choice and text of its panels. Queries come from the declarations; `up` is a series of Prometheus.
"""

from __future__ import annotations

from dashboards.model import Board, Panel, Query, Row
from dashboards.promql import Scope
from dashboards.queries import kv_use, switches

REPLICA = "{{replica}}"


def board(scope: Scope) -> Board:
    """The board for these series."""
    return Board(
        uid="paceline-fleet",
        title="Paceline / Fleet",
        description="Replicas side by side: load, speed, drafts, memory, restarts.",
        rows=(_overview(scope), _scaling(scope), _load(scope), _drafts(scope), _health(scope)),
        annotations=(switches(scope),),
    )


def _overview(scope: Scope) -> Row:
    return Row(
        "Replicas",
        (
            Panel(
                title="Replicas that respond",
                unit="short",
                description="Scrape targets that respond. The autoscaler changes their number.",
                queries=(Query(f"sum by (app) (up{{{scope.selector}}})", "short", "{{app}}"),),
                width=6,
                height=9,
                decimals=0,
            ),
            Panel(
                title="Overview",
                unit="short",
                description="Current values, one line per replica.",
                queries=(
                    scope.gauge("running_requests", "replica", legend="running"),
                    scope.gauge("waiting_requests", "replica", legend="waiting"),
                    scope.rate("generated_tokens_total", "replica", legend="tokens/s"),
                    scope.ratio("accepted_tokens_total", "drafted_tokens_total", "replica", legend="acceptance"),
                    scope.mean("k", "replica", legend="K"),
                    _uptime(scope, "uptime"),
                ),
                shape="table",
                width=18,
                height=9,
            ),
        ),
    )


def _scaling(scope: Scope) -> Row:
    return Row(
        "Number of replicas",
        (
            Panel(
                title="Replicas desired and present",
                unit="short",
                description="Number that the autoscaling policy or the settings ask for, and number of replicas that "
                "respond.",
                queries=(
                    scope.gauge("desired_replicas", "app", over="max", legend="{{app}} desired"),
                    Query(f"sum by (app) (up{{{scope.selector}}})", "short", "{{app}} present"),
                ),
                width=12,
                decimals=0,
            ),
            Panel(
                title="Reason of the number",
                unit="short",
                description="slow, queue: more replicas are needed. spare: fewer are enough. unreachable: a token "
                "takes longer than the objective even at a batch of one; raise the objective, or give each replica "
                "more resources.",
                queries=(scope.gauge("scaling_reason", "app", "reason", over="max", legend="{{app}} {{reason}}"),),
                shape="stacked",
                width=12,
                decimals=0,
            ),
        ),
    )


def _load(scope: Scope) -> Row:
    return Row(
        "Load",
        (
            Panel(
                title="Running",
                unit="short",
                description="Requests in the batch of each replica. One far above the others means that routing is "
                "uneven.",
                queries=(scope.declared("running_requests", REPLICA),),
            ),
            Panel(
                title="Waiting",
                unit="short",
                description="Requests in the queue of each replica.",
                queries=(scope.declared("waiting_requests", REPLICA),),
            ),
            Panel(
                title="Tokens",
                unit="tokens/s",
                description="Tokens sent to clients.",
                queries=(scope.rate("generated_tokens_total", "replica", legend=REPLICA),),
            ),
            Panel(
                title="Time to first token, p95",
                unit="s",
                description="One slow replica shares its device or its cores with another load.",
                queries=(scope.quantile(0.95, "ttft_seconds", "replica", legend=REPLICA),),
            ),
            Panel(
                title="Step duration, mean",
                unit="s",
                description="Duration of whole steps.",
                queries=(scope.mean("step_seconds", "replica", legend=REPLICA),),
            ),
            Panel(
                title="KV blocks in use",
                unit="percentunit",
                description="Used over all KV blocks, by cache.",
                queries=(kv_use(scope, "replica"),),
                maximum=1,
            ),
        ),
    )


def _drafts(scope: Scope) -> Row:
    return Row(
        "Drafts",
        (
            Panel(
                title="Draft attached",
                unit="short",
                description="1 while a draft is attached or none is needed; 0 while it is down and K is 0 for all "
                "requests.",
                queries=(scope.declared("draft_up", REPLICA),),
                maximum=1,
                decimals=0,
                width=6,
            ),
            Panel(
                title="Draft memory against its cap",
                unit="bytes",
                description="Memory of the draft's weights and KV pool, and its upper bound.",
                queries=(
                    scope.declared("draft_memory_bytes", f"{REPLICA} used"),
                    scope.declared("draft_memory_cap_bytes", f"{REPLICA} cap"),
                ),
            ),
            Panel(
                title="Acceptance rate",
                unit="percentunit",
                description="A replica below the others has other traffic, or a draft that does not belong to its "
                "target.",
                queries=(scope.ratio("accepted_tokens_total", "drafted_tokens_total", "replica", legend=REPLICA),),
                maximum=1,
                width=10,
            ),
        ),
    )


def _health(scope: Scope) -> Row:
    return Row(
        "Health",
        (
            Panel(
                title="Restarts",
                unit="short",
                description="Drafts and controllers that were replaced after they died or hung.",
                queries=(scope.growth("restarts_total", "replica", "process", legend=f"{REPLICA} {{{{process}}}}"),),
                shape="stacked",
                width=12,
            ),
            Panel(
                title="Uptime",
                unit="s",
                description="Time since the replica became ready.",
                queries=(_uptime(scope, REPLICA),),
                width=12,
            ),
        ),
    )


def _uptime(scope: Scope, legend: str) -> Query:
    started = scope.gauge("start_time_seconds", "replica", over="max")
    return Query(f"time() - {started.expr}", "s", legend)
