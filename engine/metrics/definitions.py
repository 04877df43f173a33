"""Every metric, declared once as data: exporter, documentation, panels and alerts derive from this list.

Owns names, units, labels, buckets, and the query that makes sense of each. Knows no client library and no value.
Ratios are formed in PromQL only, so figures of several replicas can be added first.

Every series also carries COMMON_LABELS. The targets in the discovery files carry the same ones, so that `up` has them
too; scrape with `honor_labels: true`.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.metrics.serving import ALIASES, FLEET, MEMORY, REQUESTS
from engine.metrics.speculation import DRAFTS, PACE, STEPS
from engine.metrics.types import Metric

METRICS: tuple[Metric, ...] = STEPS + DRAFTS + PACE + REQUESTS + MEMORY + FLEET + ALIASES


def by_name(metrics: Iterable[Metric] = METRICS) -> dict[str, Metric]:
    """Metrics by the name they are exposed under."""
    return {metric.name: metric for metric in metrics}
