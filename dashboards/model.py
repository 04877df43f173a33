"""Dashboards as frozen values: boards of rows of panels with queries, and alerts.

Owns the types only. Knows neither Grafana's JSON (`grafana_json`) nor how a query is built (`promql`).
A query carries the unit of its value, so that a panel cannot show seconds as percent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Unit = Literal["s", "bytes", "percentunit", "short", "ops", "tokens/s", "x"]
"""Seconds, bytes, share of one, count, events per second, tokens per second, factor."""
Shape = Literal["lines", "stacked", "number", "bars", "heatmap", "table"]
GRID_WIDTH = 24


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL query of a panel."""

    expr: str
    unit: Unit
    legend: str = ""
    """Grafana legend template, such as `{{reason}}`; also the column's name in a table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One visualisation. All its queries have its unit, except in a table."""

    title: str
    unit: Unit
    description: str
    """What the panel shows, and what to do about a bad value."""
    queries: tuple[Query, ...]
    shape: Shape = "lines"
    width: int = 8
    """Width in columns out of 24."""
    height: int = 8
    minimum: float | None = 0
    maximum: float | None = None
    decimals: int | None = None
    warn_above: float | None = None
    """Value from which the panel is drawn in red."""
    warn_below: float | None = None
    """Value below which the panel is drawn in red."""

    def __post_init__(self) -> None:
        if not 1 <= self.width <= GRID_WIDTH:
            raise ValueError(f"panel {self.title!r}: width {self.width}, allowed 1 to {GRID_WIDTH}")
        if self.shape != "table":
            for query in self.queries:
                if query.unit != self.unit:
                    raise ValueError(f"panel {self.title!r} shows {self.unit}, but {query.expr} yields {query.unit}")


@dataclass(frozen=True, slots=True)
class Row:
    """A titled group of panels, laid out left to right."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Annotation:
    """Events that are drawn as vertical lines over every panel, wherever `expr` is above zero."""

    name: str
    expr: str
    title: str
    text: str
    color: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """One dashboard; its file name is `uid` without the prefix `paceline-`."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]
    annotations: tuple[Annotation, ...] = ()

    @property
    def name(self) -> str:
        """Name of the file without its extension."""
        return self.uid.removeprefix("paceline-")

    @property
    def panels(self) -> tuple[Panel, ...]:
        """All panels, in reading order."""
        return tuple(panel for row in self.rows for panel in row.panels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alert rule."""

    name: str
    expr: str
    for_: str
    """How long the condition must hold, as a Prometheus duration."""
    severity: Literal["page", "ticket"]
    summary: str
    runbook: str
    """What the alert means, what to look at and what to do, in full sentences."""
