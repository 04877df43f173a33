"""The declaration of one metric: a counter, a gauge or a histogram, with its default query.

Owns the declaration, its three kinds and their default queries; `engine.metrics.definitions` lists the metrics. In
`promql`, $selector stands for label matchers (last inside the braces, may be empty) and $window for a range:
`metric.query(selector='app=~"$app"', window="$__rate_interval")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from string import Template
from typing import Literal

MetricKind = Literal["counter", "gauge", "histogram"]
Unit = Literal["", "seconds", "tokens", "requests", "blocks", "bytes", "ratio"]
Group = Literal["speculation", "serving", "fleet"]
"""The dashboard that shows a metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric."""

    name: str
    """The exposed name; counters end in `_total`. Histograms are exposed with `_bucket`, `_sum` and `_count` added."""
    kind: MetricKind
    """How values are counted."""
    group: Group
    """The dashboard that shows the metric."""
    help: str
    """What the metric counts, for the exposition and the documentation."""
    promql: str
    """Query of the metric's panel: a string.Template over $selector and $window."""
    unit: Unit = ""
    """Unit of the values; empty for plain counts."""
    labels: tuple[str, ...] = ()
    """Names of the labels, without `engine.metrics.labels.COMMON_LABELS`."""
    values: tuple[str, ...] = ()
    """All values of the only label, if they are known. Their series exist from the start, at 0."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, without +Inf."""
    alias_of: str | None = None
    """Name of the metric whose values this one repeats, for dashboards made for vLLM; None for all others."""

    def query(self, *, selector: str = "", window: str = "1m") -> str:
        """The panel's query for these label matchers and this range."""
        query = Template(self.promql).substitute(selector=selector, window=window)
        return query if selector else query.replace("{}", "")


def counter(
    name: str,
    group: Group,
    help: str,
    promql: str = "",
    *,
    unit: Unit = "",
    labels: tuple[str, ...] = (),
    values: tuple[str, ...] = (),
    alias_of: str | None = None,
) -> Metric:
    """Declare a counter. The default query is its rate, by the first label if there is one."""
    return Metric(
        name=name,
        kind="counter",
        group=group,
        help=help,
        promql=promql or rate(name, labels[0] if labels else ""),
        unit=unit,
        labels=labels,
        values=values,
        alias_of=alias_of,
    )


def gauge(
    name: str,
    group: Group,
    help: str,
    *,
    unit: Unit = "",
    labels: tuple[str, ...] = (),
    values: tuple[str, ...] = (),
    of_app: bool = False,
) -> Metric:
    """Declare a gauge. The query is its value per replica and label; with `of_app`, per app."""
    by = ", ".join(("app" if of_app else "replica", *labels))
    promql = f"{'max' if of_app else 'sum'} by ({by}) ({name}{{$selector}})"
    return Metric(
        name=name, kind="gauge", group=group, help=help, promql=promql, unit=unit, labels=labels, values=values
    )


def histogram(
    name: str,
    group: Group,
    help: str,
    buckets: tuple[float, ...],
    promql: str = "",
    *,
    unit: Unit = "seconds",
    labels: tuple[str, ...] = (),
    values: tuple[str, ...] = (),
) -> Metric:
    """Declare a histogram. The default query is its 95th percentile."""
    return Metric(
        name=name,
        kind="histogram",
        group=group,
        help=help,
        promql=promql or quantile(name, 0.95),
        unit=unit,
        labels=labels,
        values=values,
        buckets=buckets,
    )


def rate(name: str, by: str = "") -> str:
    """Query: increase per second of a counter, summed over all labels but `by`."""
    return f"sum{f' by ({by})' if by else ''} (rate({name}{{$selector}}[$window]))"


def over(numerator: str, denominator: str, by: str = "") -> str:
    """Query: ratio of the summed rates of two counters."""
    return f"{rate(numerator, by)} / {rate(denominator, by)}"


def mean(name: str, by: str = "") -> str:
    """Query: mean of a histogram's observations."""
    return over(f"{name}_sum", f"{name}_count", by)


def quantile(name: str, quantile: float) -> str:
    """Query: quantile (0 to 1) of a histogram's observations."""
    return f"histogram_quantile({quantile}, {rate(f'{name}_bucket', 'le')})"
