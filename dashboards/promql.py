"""Queries over declared metrics.

Owns the way from a declaration to PromQL: the query that the declaration brings, or a rate, mean, quantile or ratio
split by labels that the metric has. Each query carries the unit of its value, derived from the declaration. Counters
are used only through rate() or increase(), and ratios only of summed counters. Knows no panel.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from dashboards.model import Query, Unit
from engine.metrics.definitions import by_name
from engine.metrics.labels import COMMON_LABELS
from engine.metrics.types import Metric

CATALOGUE = by_name()
PER_SECOND: dict[str, Unit] = {"tokens": "tokens/s", "seconds": "percentunit"}
VALUE: dict[str, Unit] = {"seconds": "s", "bytes": "bytes", "ratio": "percentunit"}


def metric(name: str) -> Metric:
    """The declaration of `paceline_<name>`.

    Raises:
        KeyError: not declared.
    """
    return CATALOGUE[f"paceline_{name}"]


@dataclass(frozen=True, slots=True)
class Scope:
    """The series of a query, and the range over which its rates are taken."""

    selector: str = ""
    """Label matchers, without braces."""
    window: str = "5m"
    """Range of rates, as a Prometheus duration."""

    def declared(self, name: str, legend: str = "") -> Query:
        """The query that the declaration brings."""
        declaration = metric(name)
        expr = declaration.query(selector=self.selector, window=self.window)
        return Query(expr, declared_unit(declaration), legend)

    def series(self, name: str, suffix: str = "", where: str = "") -> str:
        """Selector of the series of one metric."""
        matchers = ", ".join(part for part in (where, self.selector) if part)
        return f"{metric(name).name}{suffix}" + (f"{{{matchers}}}" if matchers else "")

    def rate(self, name: str, *by: str, legend: str = "", suffix: str = "", where: str = "") -> Query:
        """Increase per second of a counter, or of a histogram's `_sum` or `_count`."""
        declaration = _checked(name, by)
        if (declaration.kind, bool(suffix)) not in {("counter", False), ("histogram", True)}:
            raise ValueError(f"rate of {declaration.name}{suffix}: a counter or a histogram's _sum or _count is needed")
        expr = f"sum{_by(by)} (rate({self.series(name, suffix, where)}[{self.window}]))"
        unit = "" if suffix == "_count" else declaration.unit
        return Query(expr, PER_SECOND.get(unit, "ops"), legend)

    def ratio(self, above: str, below: str, *by: str, legend: str = "") -> Query:
        """Ratio of the rates of two counters, each summed over all labels but `by` first."""
        unit = _ratio_unit(metric(above).unit, metric(below).unit)
        return Query(f"{self.rate(above, *by).expr} / {self.rate(below, *by).expr}", unit, legend)

    def mean(self, name: str, *by: str, legend: str = "") -> Query:
        """Mean of a histogram's observations."""
        total, count = (self.rate(name, *by, suffix=suffix).expr for suffix in ("_sum", "_count"))
        return Query(f"{total} / {count}", VALUE.get(metric(name).unit, "short"), legend)

    def quantile(self, quantile: float, name: str, *by: str, legend: str = "") -> Query:
        """Quantile of a histogram's observations."""
        declaration = _checked(name, by)
        if declaration.kind != "histogram":
            raise ValueError(f"quantile of {declaration.name}: it is a {declaration.kind}, not a histogram")
        buckets = f"sum{_by(('le', *by))} (rate({self.series(name, '_bucket')}[{self.window}]))"
        unit = VALUE.get(declaration.unit, "short")
        return Query(f"histogram_quantile({quantile:g}, {buckets})", unit, legend or f"p{quantile * 100:g}")

    def buckets(self, name: str) -> Query:
        """Observations per second in each bucket, for a heatmap over the observed value."""
        expr = f"sum by (le) (rate({self.series(name, '_bucket')}[{self.window}]))"
        return Query(expr, VALUE.get(metric(name).unit, "short"), "{{le}}")

    def gauge(self, name: str, *by: str, over: str = "sum", legend: str = "") -> Query:
        """Current value, combined by `over` (sum, min, max) over all labels but `by`."""
        declaration = _checked(name, by)
        if declaration.kind != "gauge":
            raise ValueError(f"value of {declaration.name}: it is a {declaration.kind}, not a gauge")
        return Query(f"{over}{_by(by)} ({self.series(name)})", VALUE.get(declaration.unit, "short"), legend)

    def growth(self, name: str, *by: str, legend: str = "") -> Query:
        """Increase of a counter within the range."""
        declaration = _checked(name, by)
        if declaration.kind != "counter":
            raise ValueError(f"growth of {declaration.name}: it is a {declaration.kind}, not a counter")
        return Query(f"sum{_by(by)} (increase({self.series(name)}[{self.window}]))", "short", legend)


def names_in(expr: str) -> set[str]:
    """Declared names of the metrics that an expression reads."""
    found = set()
    for name in re.findall(r"\b(?:paceline_|vllm:)\w+", expr):
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        found.add(base if base in CATALOGUE and CATALOGUE[base].kind == "histogram" else name)
    return found


def declared_unit(declaration: Metric) -> Unit:
    """Unit of the value of `declaration.promql`."""
    query = declaration.promql
    if "increase(" in query:
        return "short"
    read = [CATALOGUE[name] for name in sorted(names_in(query), key=query.index)]
    if len(read) == 2:
        return _ratio_unit(read[0].unit, read[1].unit)
    quotient = " / " in query or "histogram_quantile" in query
    if declaration.kind == "gauge" or quotient:
        return VALUE.get(declaration.unit, "short")
    return PER_SECOND.get(declaration.unit, "ops")


def _ratio_unit(above: str, below: str) -> Unit:
    if above == below:
        return "percentunit"
    return "tokens/s" if (above, below) == ("tokens", "seconds") else "short"


def _checked(name: str, by: Iterable[str]) -> Metric:
    declaration = metric(name)
    unknown = set(by) - {*declaration.labels, *COMMON_LABELS}
    if unknown:
        raise ValueError(f"{declaration.name} has no label {', '.join(sorted(unknown))}; it has {declaration.labels}")
    return declaration


def _by(labels: Iterable[str]) -> str:
    names = ", ".join(labels)
    return f" by ({names})" if names else ""
