"""The Serving board: latencies, load, errors, the KV cache and adapters.

Owns the choice and text of its panels. Queries come from the declarations.
"""

from __future__ import annotations

from dashboards.model import Board, Panel, Query, Row
from dashboards.promql import Scope
from dashboards.queries import TTFT_OBJECTIVE_S, error_share, kv_use, switches


def board(scope: Scope) -> Board:
    """The board for these series."""
    return Board(
        uid="paceline-serving",
        title="Paceline / Serving",
        description="Latencies, queue, errors, use of the KV cache, and adapters.",
        rows=(_latency(scope), _load(scope), _errors(scope), _cache(scope), _adapters(scope)),
        annotations=(switches(scope),),
    )


def _percentiles(scope: Scope, name: str) -> tuple[Query, ...]:
    return (
        scope.quantile(0.5, name),
        scope.declared(name, "p95"),
        scope.quantile(0.99, name),
    )


def _latency(scope: Scope) -> Row:
    return Row(
        "Latency",
        (
            Panel(
                title="Time to first token",
                unit="s",
                description="From arrival to the first token: queue and prefill. Above the objective, look at the "
                "queue first, then at prefill tokens.",
                queries=_percentiles(scope, "ttft_seconds"),
                warn_above=TTFT_OBJECTIVE_S,
            ),
            Panel(
                title="Inter-token latency",
                unit="s",
                description="Time between two messages of a stream. With speculation one message carries several "
                "tokens, so compare it with the time per output token.",
                queries=_percentiles(scope, "itl_seconds"),
            ),
            Panel(
                title="Time per output token",
                unit="s",
                description="Mean time per token of each request, after the first one.",
                queries=_percentiles(scope, "tpot_seconds"),
            ),
            Panel(
                title="End to end",
                unit="s",
                description="From arrival to the last token; it grows with the length of responses.",
                queries=_percentiles(scope, "e2e_seconds"),
            ),
            Panel(
                title="Time in the queue",
                unit="s",
                description="From arrival to the first step.",
                queries=_percentiles(scope, "queue_seconds"),
            ),
            Panel(
                title="Time to first token, distribution",
                unit="s",
                description="Requests per second in each bucket.",
                queries=(scope.buckets("ttft_seconds"),),
                shape="heatmap",
            ),
        ),
    )


def _load(scope: Scope) -> Row:
    return Row(
        "Load",
        (
            Panel(
                title="Running and waiting",
                unit="short",
                description="Requests in the batch and in the queue. A queue that grows while the number of running "
                "requests is constant needs another replica or more KV blocks.",
                queries=(
                    scope.gauge("running_requests", legend="running"),
                    scope.gauge("waiting_requests", legend="waiting"),
                ),
            ),
            Panel(
                title="Tokens in and out",
                unit="tokens/s",
                description="Prompt tokens of admitted requests, prompt tokens computed (the rest came from the prefix "
                "cache), tokens sent to clients.",
                queries=(
                    scope.declared("prompt_tokens_total", "prompt"),
                    scope.declared("prefill_tokens_total", "prefill"),
                    scope.declared("generated_tokens_total", "generated"),
                ),
            ),
            Panel(
                title="Requests that ended",
                unit="ops",
                description="By finish reason.",
                queries=(scope.declared("requests_total", "{{reason}}"),),
                shape="stacked",
            ),
        ),
    )


def _errors(scope: Scope) -> Row:
    return Row(
        "Errors",
        (
            Panel(
                title="Share of errors",
                unit="percentunit",
                description="Requests that ended in an error over all that ended; should be zero.",
                queries=(error_share(scope),),
                maximum=1,
                warn_above=0.01,
            ),
            Panel(
                title="Rejected",
                unit="ops",
                description="Requests refused before their first step, by cause. Clients cause `invalid_request`.",
                queries=(scope.declared("rejected_total", "{{cause}}"),),
                shape="stacked",
            ),
            Panel(
                title="Preemptions",
                unit="ops",
                description="Running requests that lost their KV blocks for lack of free ones; they compute their "
                "tokens again. More than a few per minute: lower max_num_requests or enlarge the KV cache.",
                queries=(scope.declared("preemptions_total", "preemptions"),),
            ),
        ),
    )


def _cache(scope: Scope) -> Row:
    return Row(
        "KV cache",
        (
            Panel(
                title="KV blocks in use",
                unit="percentunit",
                description="Used over all blocks, of target and draft. At 100 % of the target's, requests are "
                "preempted; at 100 % of the draft's, requests run at K = 0.",
                queries=(kv_use(scope),),
                maximum=1,
                warn_above=0.95,
                width=6,
            ),
            Panel(
                title="KV blocks",
                unit="short",
                description="Free blocks include cached prefixes that may be overwritten.",
                queries=(
                    scope.declared("kv_used_blocks", "{{replica}} {{cache}} used"),
                    scope.declared("kv_free_blocks", "{{replica}} {{cache}} free"),
                ),
                width=6,
            ),
            Panel(
                title="Evictions",
                unit="ops",
                description="Cached blocks overwritten per second. Harmless while the prefix-cache hit rate stays "
                "constant.",
                queries=(scope.declared("kv_evictions_total", "{{cache}}"),),
                width=6,
            ),
            Panel(
                title="Prefix-cache hit rate",
                unit="percentunit",
                description="Share of prompt tokens taken from the prefix cache.",
                queries=(scope.declared("prefix_cache_hit_tokens_total", "hit rate"),),
                maximum=1,
                width=6,
            ),
        ),
    )


def _adapters(scope: Scope) -> Row:
    return Row(
        "Adapters",
        (
            Panel(
                title="Requests by adapter",
                unit="ops",
                description="Requests of LoRA adapters that ended. Requests of the base model are not among them.",
                queries=(scope.declared("adapter_requests_total", "{{adapter}}"),),
                shape="stacked",
                width=6,
            ),
            Panel(
                title="Tokens by adapter",
                unit="tokens/s",
                description="Tokens sent to clients by LoRA adapters.",
                queries=(scope.declared("adapter_generated_tokens_total", "{{adapter}}"),),
                shape="stacked",
                width=6,
            ),
            Panel(
                title="Draft tokens by adapter",
                unit="tokens/s",
                description="Draft tokens verified. Few of them where others have many: the draft predicts this "
                "adapter badly, so that its requests get a small K.",
                queries=(scope.declared("adapter_drafted_tokens_total", "{{adapter}}"),),
                width=6,
            ),
            Panel(
                title="Acceptance by adapter",
                unit="percentunit",
                description="Share of draft tokens accepted. The draft is not adapted. A low share calls for a draft "
                "trained on this adapter's texts.",
                queries=(scope.declared("adapter_accepted_tokens_total", "{{adapter}}"),),
                maximum=1,
                width=6,
            ),
        ),
    )
