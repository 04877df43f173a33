"""The Fleet board: every replica beside the others, and how many there are.

Owns the choice and words of its panels. Queries come from the declarations; `up` is Prometheus's own.
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
                title="Replicas that answer",
                unit="short",
                description="Scrape targets that answer; the autoscaler moves this.",
                queries=(Query(f"sum by (app) (up{{{scope.selector}}})", "short", "{{app}}"),),
                width=6,
                height=9,
                decimals=0,
            ),
            Panel(
                title="Overview",
                unit="short",
                description="One line per replica, as of now.",
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
                title="Replicas wanted and there",
                unit="short",
                description="What the autoscaling policy wants, or what is set, against those that answer.",
                queries=(
                    scope.gauge("desired_replicas", "app", over="max", legend="{{app}} wanted"),
                    Query(f"sum by (app) (up{{{scope.selector}}})", "short", "{{app}} there"),
                ),
                width=12,
                decimals=0,
            ),
            Panel(
                title="Why that many",
                unit="short",
                description="slow, queue: more are wanted. spare: fewer would do. unreachable: even a request alone "
                "takes longer per token than the objective; raise it, or give each replica more.",
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
                description="Requests in each replica's batch. One far above the others: routing is uneven.",
                queries=(scope.declared("running_requests", REPLICA),),
            ),
            Panel(
                title="Waiting",
                unit="short",
                description="Requests in each replica's queue.",
                queries=(scope.declared("waiting_requests", REPLICA),),
            ),
            Panel(
                title="Tokens",
                unit="tokens/s",
                description="Sent to clients.",
                queries=(scope.rate("generated_tokens_total", "replica", legend=REPLICA),),
            ),
            Panel(
                title="Time to first token, p95",
                unit="s",
                description="A slow replica in a fast fleet has a neighbour on its device or on its cores.",
                queries=(scope.quantile(0.95, "ttft_seconds", "replica", legend=REPLICA),),
            ),
            Panel(
                title="Step duration, mean",
                unit="s",
                description="Whole steps.",
                queries=(scope.mean("step_seconds", "replica", legend=REPLICA),),
            ),
            Panel(
                title="KV blocks in use",
                unit="percentunit",
                description="Used over all blocks, per cache.",
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
                description="1 while a draft is attached or none is needed; 0 while it is down and K is 0 for all.",
                queries=(scope.declared("draft_up", REPLICA),),
                maximum=1,
                decimals=0,
                width=6,
            ),
            Panel(
                title="Draft memory against its cap",
                unit="bytes",
                description="Weights and KV pool of the draft, and what they may take.",
                queries=(
                    scope.declared("draft_memory_bytes", f"{REPLICA} used"),
                    scope.declared("draft_memory_cap_bytes", f"{REPLICA} cap"),
                ),
            ),
            Panel(
                title="Acceptance rate",
                unit="percentunit",
                description="A replica below the others serves other traffic, or its draft is not that of its target.",
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
                description="Drafts and controllers replaced after they died or hung.",
                queries=(scope.growth("restarts_total", "replica", "process", legend=f"{REPLICA} {{{{process}}}}"),),
                shape="stacked",
                width=12,
            ),
            Panel(
                title="Uptime",
                unit="s",
                description="Since the replica became ready.",
                queries=(_uptime(scope, REPLICA),),
                width=12,
            ),
        ),
    )


def _uptime(scope: Scope, legend: str) -> Query:
    started = scope.gauge("start_time_seconds", "replica", over="max")
    return Query(f"time() - {started.expr}", "s", legend)
