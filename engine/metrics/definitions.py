"""The list of all metrics. The exporter, the documentation, the panels and the alerts derive from it.

Owns the list; each metric's name, unit, labels, buckets and query are declared in `serving` and `speculation`. Knows no
client library and no value. Ratios are formed in PromQL only, so that values of several replicas are added first.

Every series also carries COMMON_LABELS. The targets in the discovery files carry the same labels, so that `up` has them
too; scrape with `honor_labels: true`.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.metrics.serving import ALIASES, FLEET, MEMORY, REQUESTS
from engine.metrics.speculation import ADAPTATION, DRAFTS, PACE, STEPS
from engine.metrics.types import Metric

METRICS: tuple[Metric, ...] = STEPS + DRAFTS + ADAPTATION + PACE + REQUESTS + MEMORY + FLEET + ALIASES


def by_name(metrics: Iterable[Metric] = METRICS) -> dict[str, Metric]:
    """Metrics by their exposed names."""
    return {metric.name: metric for metric in metrics}
