"""Values of metrics: counted in the process where they arise, added up where they are exported.

Owns counting; names and kinds are in `engine.metrics.definitions`. Snapshots are plain data, so that they can cross
processes. A snapshot holds only series that were counted; the exporter adds the series that are still 0.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from engine.metrics.definitions import METRICS, by_name
from engine.metrics.types import Metric

LabelValues = tuple[str, ...]
"""Values of a series' labels, in the order of `Metric.labels`."""


@dataclass(slots=True)
class HistogramValue:
    """One histogram series."""

    counts: list[int]
    """Number of observations in each bucket, not cumulative; the last bucket is +Inf."""
    total: float = 0.0
    """Sum of the observed values."""

    @property
    def num(self) -> int:
        """Number of observations."""
        return sum(self.counts)


@dataclass(slots=True)
class MetricSnapshot:
    """Values by metric name, then by label values."""

    numbers: dict[str, dict[LabelValues, float]] = field(default_factory=dict)
    """Values of counters and gauges."""
    histograms: dict[str, dict[LabelValues, HistogramValue]] = field(default_factory=dict)
    """Values of histograms."""

    def number(self, name: str, *labels: str) -> float:
        """Value of a counter or gauge; 0 if it was never counted."""
        return self.numbers.get(name, {}).get(labels, 0.0)


class MetricCounters:
    """Counts metrics. Thread-safe.

    Every method that counts raises KeyError for an undeclared metric, and ValueError for a wrong kind or a wrong number
    of labels.

    Args:
        metrics: the declared metrics.
    """

    def __init__(self, metrics: Iterable[Metric] = METRICS) -> None:
        self._metrics = by_name(metrics)
        self._snapshot = MetricSnapshot()
        self._lock = threading.Lock()

    def add(self, name: str, amount: float = 1.0, *labels: str) -> None:
        """Increase a counter."""
        self._check(name, "counter", labels)
        with self._lock:
            series = self._snapshot.numbers.setdefault(name, {})
            series[labels] = series.get(labels, 0.0) + amount

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge."""
        self._check(name, "gauge", labels)
        with self._lock:
            self._snapshot.numbers.setdefault(name, {})[labels] = value

    def observe(self, name: str, value: float, *labels: str, count: int = 1) -> None:
        """Add a value to a histogram, `count` times."""
        buckets = self._check(name, "histogram", labels).buckets
        with self._lock:
            histogram = self._histogram(name, labels, len(buckets))
            histogram.counts[bisect_left(buckets, value)] += count
            histogram.total += value * count

    def observe_all(self, name: str, values: Collection[float], *labels: str) -> None:
        """Add several values to a histogram."""
        buckets = self._check(name, "histogram", labels).buckets
        if not values:
            return
        with self._lock:
            histogram = self._histogram(name, labels, len(buckets))
            for value in values:
                histogram.counts[bisect_left(buckets, value)] += 1
            histogram.total += sum(values)

    def read(self) -> MetricSnapshot:
        """A copy of the current values."""
        with self._lock:
            return MetricSnapshot(
                {name: dict(series) for name, series in self._snapshot.numbers.items()},
                {
                    name: {labels: HistogramValue(list(h.counts), h.total) for labels, h in series.items()}
                    for name, series in self._snapshot.histograms.items()
                },
            )

    def _histogram(self, name: str, labels: LabelValues, num_buckets: int) -> HistogramValue:
        """The value of one series, created on first use. The caller holds the lock."""
        series = self._snapshot.histograms.setdefault(name, {})
        histogram = series.get(labels)
        if histogram is None:
            histogram = series[labels] = HistogramValue([0] * (num_buckets + 1))
        return histogram

    def _check(self, name: str, kind: str, labels: LabelValues) -> Metric:
        metric = self._metrics[name]
        if metric.kind != kind or len(metric.labels) != len(labels):
            raise ValueError(f"{name} is a {metric.kind} with labels {metric.labels}; counted as {kind} with {labels}")
        return metric


def merge(parts: Iterable[MetricSnapshot]) -> MetricSnapshot:
    """Add up the snapshots of several processes of one replica, series by series."""
    merged = MetricSnapshot()
    for part in parts:
        for name, numbers in part.numbers.items():
            into = merged.numbers.setdefault(name, {})
            for labels, number in numbers.items():
                into[labels] = into.get(labels, 0.0) + number
        for name, histograms in part.histograms.items():
            _merge_histograms(merged.histograms.setdefault(name, {}), histograms)
    return merged


def _merge_histograms(
    into: dict[LabelValues, HistogramValue], histograms: Mapping[LabelValues, HistogramValue]
) -> None:
    for labels, histogram in histograms.items():
        known = into.get(labels)
        counts = (
            histogram.counts if known is None else [a + b for a, b in zip(known.counts, histogram.counts, strict=True)]
        )
        into[labels] = HistogramValue(list(counts), histogram.total + (known.total if known is not None else 0.0))
