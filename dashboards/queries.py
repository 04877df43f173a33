"""Queries and objectives that more than one board or alert uses.

Owns ratios and events that no single declaration brings. Knows no panel and no board.
"""

from __future__ import annotations

from dashboards.model import Annotation, Query
from dashboards.promql import Scope


def switches(scope: Scope) -> Annotation:
    """Events at which drafting was switched on or off, with the cause."""
    moved = Scope(scope.selector, "1m").declared("switches_total")
    return Annotation("Switches", f"{moved.expr} > 0", "Drafting switched", "{{cause}}", "orange")


def gain(scope: Scope) -> Query:
    """Realised goodput over the goodput predicted for the same steps at K = 0."""
    realised, plain = scope.declared("realised_tokens_total"), scope.declared("plain_tokens_total")
    return Query(f"({realised.expr}) / ({plain.expr})", "x", "gain")


TTFT_OBJECTIVE_S = 1.0
"""Objective for the 95th percentile of time to first token in seconds, for the line in the panel and the alert."""


def error_share(scope: Scope) -> Query:
    """Requests that ended in an error over all that ended."""
    failed = scope.rate("requests_total", where='reason="error"')
    return Query(f"{failed.expr} / {scope.rate('requests_total').expr}", "percentunit", "errors")


def kv_use(scope: Scope, *by: str) -> Query:
    """Used over all KV blocks, by cache.

    Args:
        scope: the series.
        by: further labels to split by.
    """
    used, free = (scope.gauge(name, *by, "cache").expr for name in ("kv_used_blocks", "kv_free_blocks"))
    legend = " ".join(f"{{{{{label}}}}}" for label in (*by, "cache"))
    return Query(f"{used} / ({used} + {free})", "percentunit", legend)
