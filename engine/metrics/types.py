"""What a metric is: a counter, a gauge or a histogram, declared as data with the query that makes sense of it.

Owns the declaration, its three kinds and the queries that they usually want. Which metrics there are stands in
`engine.metrics.definitions`. In `promql`, $selector stands for label matchers (always last inside the braces, may be
empty) and $window for a range: `metric.query(selector='app=~"$app"', window="$__rate_interval")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from string import Template
from typing import Literal

MetricKind = Literal["counter", "gauge", "histogram"]
Unit = Literal["", "seconds", "tokens", "requests", "blocks", "bytes", "ratio"]
Group = Literal["speculation", "serving", "fleet"]
"""The dashboard that a metric belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric."""

    name: str
    """As it is exposed; counters end in `_total`. Histograms add `_bucket`, `_sum` and `_count`."""
    kind: MetricKind
    group: Group
    help: str
    promql: str
    """The query of its panel, a string.Template over $selector and $window."""
    unit: Unit = ""
    labels: tuple[str, ...] = ()
    """Beside `engine.metrics.definitions.COMMON_LABELS`."""
    values: tuple[str, ...] = ()
    """What the only label can be, where that is known; such series exist from the start, at 0."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, +Inf left out."""
    alias_of: str | None = None
    """Name of the metric whose values it repeats, for boards made for another server."""

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
    """A counter; its query is its rate, by its first label if it has one, unless `promql` says another."""
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
    """A gauge; its query is its value per replica and label, or per app where every replica says the same: `of_app`."""
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
    """A histogram; its query is the 95th percentile, unless `promql` says another."""
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
    """Increase per second of a counter, summed over everything but the label `by`."""
    return f"sum{f' by ({by})' if by else ''} (rate({name}{{$selector}}[$window]))"


def over(numerator: str, denominator: str, by: str = "") -> str:
    """Ratio of two counters' rates, each summed first."""
    return f"{rate(numerator, by)} / {rate(denominator, by)}"


def mean(name: str, by: str = "") -> str:
    """Mean of a histogram's observations."""
    return over(f"{name}_sum", f"{name}_count", by)


def quantile(name: str, quantile: float) -> str:
    """Quantile, within 0 and 1, of a histogram's observations."""
    return f"histogram_quantile({quantile}, {rate(f'{name}_bucket', 'le')})"
