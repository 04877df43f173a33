"""What a dashboard is here: rows of panels with queries, as frozen values.

Owns the vocabulary of boards. Knows neither Grafana's JSON (`grafana_json`) nor how a query is put together (`promql`).
A query carries the unit of its value, so that a panel cannot show seconds as percent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Unit = Literal["s", "bytes", "percentunit", "short", "ops", "tokens/s", "x"]
"""seconds, bytes, ratio of one, count, events per second, tokens per second, a factor."""
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
    """One picture. All its queries share its unit."""

    title: str
    unit: Unit
    description: str
    """What it answers, and what to do about a bad value."""
    queries: tuple[Query, ...]
    shape: Shape = "lines"
    width: int = 8
    """Of 24 columns."""
    height: int = 8
    minimum: float | None = 0
    maximum: float | None = None
    decimals: int | None = None
    warn_above: float | None = None
    """Drawn in red from here on."""
    warn_below: float | None = None
    """Drawn in red below this."""

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
    """Events drawn as vertical lines over every panel: wherever `expr` is above zero."""

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
        """File name without ending."""
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
    """How long it must hold, as a Prometheus duration."""
    severity: Literal["page", "ticket"]
    summary: str
    runbook: str
    """What it means, what to look at, what to do: in sentences."""
