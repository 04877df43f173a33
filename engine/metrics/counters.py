"""Values of metrics as plain numbers, kept in the process where they arise and added up where they are exported.

Owns counting; names and kinds are in `engine.metrics.definitions`. Readings are plain data, so that they cross
processes; they hold only what was counted, whoever exports them adds the zeros.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from engine.metrics.definitions import METRICS, by_name
from engine.metrics.types import Metric

LabelValues = tuple[str, ...]


@dataclass(slots=True)
class HistogramValue:
    """One histogram series."""

    counts: list[int]
    """Per bucket, not cumulative; the last one is +Inf."""
    total: float = 0.0
    """Sum of what was observed."""

    @property
    def num(self) -> int:
        return sum(self.counts)


@dataclass(slots=True)
class MetricSnapshot:
    """Values by metric name, then by label values in the order of `Metric.labels`."""

    numbers: dict[str, dict[LabelValues, float]] = field(default_factory=dict)
    histograms: dict[str, dict[LabelValues, HistogramValue]] = field(default_factory=dict)

    def number(self, name: str, *labels: str) -> float:
        """A counter's or gauge's value; 0 where nothing was counted."""
        return self.numbers.get(name, {}).get(labels, 0.0)


class MetricCounters:
    """Counts; safe to use from several threads.

    Args:
        metrics: what may be counted here; anything else is a KeyError.
    """

    def __init__(self, metrics: Iterable[Metric] = METRICS) -> None:
        self._metrics = by_name(metrics)
        self._snapshot = MetricSnapshot()
        self._lock = threading.Lock()

    def add(self, name: str, amount: float = 1.0, *labels: str) -> None:
        """Raise a counter."""
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
        """Put a value into a histogram, `count` times."""
        buckets = self._check(name, "histogram", labels).buckets
        with self._lock:
            histogram = self._histogram(name, labels, len(buckets))
            histogram.counts[bisect_left(buckets, value)] += count
            histogram.total += value * count

    def observe_all(self, name: str, values: Collection[float], *labels: str) -> None:
        """Put several values into a histogram."""
        buckets = self._check(name, "histogram", labels).buckets
        if not values:
            return
        with self._lock:
            histogram = self._histogram(name, labels, len(buckets))
            for value in values:
                histogram.counts[bisect_left(buckets, value)] += 1
            histogram.total += sum(values)

    def read(self) -> MetricSnapshot:
        """A copy of everything counted so far."""
        with self._lock:
            return MetricSnapshot(
                {name: dict(series) for name, series in self._snapshot.numbers.items()},
                {
                    name: {labels: HistogramValue(list(h.counts), h.total) for labels, h in series.items()}
                    for name, series in self._snapshot.histograms.items()
                },
            )

    def _histogram(self, name: str, labels: LabelValues, num_buckets: int) -> HistogramValue:
        """One series, made where there is none yet. With the lock held."""
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
    """Readings of several processes of one replica; a series that several of them have is added up."""
    whole = MetricSnapshot()
    for part in parts:
        for name, numbers in part.numbers.items():
            into = whole.numbers.setdefault(name, {})
            for labels, number in numbers.items():
                into[labels] = into.get(labels, 0.0) + number
        for name, histograms in part.histograms.items():
            _merge_histograms(whole.histograms.setdefault(name, {}), histograms)
    return whole


def _merge_histograms(
    into: dict[LabelValues, HistogramValue], histograms: Mapping[LabelValues, HistogramValue]
) -> None:
    for labels, histogram in histograms.items():
        known = into.get(labels)
        counts = (
            histogram.counts if known is None else [a + b for a, b in zip(known.counts, histogram.counts, strict=True)]
        )
        into[labels] = HistogramValue(list(counts), histogram.total + (known.total if known is not None else 0.0))
