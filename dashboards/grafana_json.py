"""Boards as Grafana's dashboard JSON, built by the Grafana Foundation SDK.

Owns the look: visualisation of each shape, legends, units, grid, template variables. Knows nothing of what is shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from grafana_foundation_sdk.builders import bargauge, common, dashboard, heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models import prometheus as prometheus_models
from grafana_foundation_sdk.models import units

from dashboards.model import Annotation, Board, Panel, Query, Unit
from engine.metrics.labels import COMMON_LABELS

SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
UNITS: dict[Unit, str] = {
    "s": units.Seconds,
    "bytes": units.BytesIEC,
    "percentunit": units.PercentUnit,
    "short": units.Short,
    "ops": "suffix: /s",
    "tokens/s": "suffix: tokens/s",
    "x": "suffix: ×",
}
SELECTOR = ", ".join(f'{label}=~"${label}"' for label in COMMON_LABELS)
WINDOW = "$__rate_interval"
SERIES_OF_VARIABLES = "paceline_running_requests"
"""A series that every replica has exactly once from its start. It supplies the values of the template variables."""

AnyPanel = timeseries.Panel | stat.Panel | bargauge.Panel | heatmap.Panel | table.Panel


class _PrometheusEvents(models.AnnotationQuery):
    """The SDK's annotation query with the three fields that Prometheus needs and the SDK does not model."""

    def __init__(self, events: Annotation) -> None:
        super().__init__(name=events.name, datasource=SOURCE, icon_color=events.color, expr=events.expr)
        self._extra = {"titleFormat": events.title, "textFormat": events.text, "step": "60s"}

    def to_json(self) -> dict[str, object]:
        return super().to_json() | self._extra


class _Events(dashboard.AnnotationQuery):
    def __init__(self, events: Annotation) -> None:
        super().__init__()
        self._internal = _PrometheusEvents(events)


def to_json(board: Board) -> dict[str, Any]:
    """Grafana's JSON model of a board as plain values."""
    builder = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags(["paceline"])
        .time("now-30m", "now")
        .refresh("10s")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("Paceline")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags(["paceline"])
            .include_vars(include_vars=True)
            .keep_time(keep_time=True)
        )
    )
    for variable in _variables():
        builder.with_variable(variable)
    for events in board.annotations:
        builder.annotation(_Events(events))
    number = 0
    for row in board.rows:
        builder.with_row(dashboard.Row(row.title).id(number := number + 1))
        for panel in row.panels:
            builder.with_panel(_panel(panel).id(number := number + 1))
    plain: dict[str, Any] = json.loads(JSONEncoder().encode(builder.build()))
    return plain


def _variables() -> Iterator[dashboard.DatasourceVariable | dashboard.QueryVariable]:
    yield dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    chosen: list[str] = []
    for label in COMMON_LABELS:
        query = f"label_values({SERIES_OF_VARIABLES}{{{', '.join(chosen)}}}, {label})"
        yield (
            dashboard.QueryVariable(label)
            .label(label.capitalize())
            .datasource(SOURCE)
            .query({"query": query, "refId": f"variable-{label}"})
            .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(models.VariableSort.ALPHABETICAL_ASC)
            .multi(multi=True)
            .include_all(include_all=True)
            .all_value(".*")
            .current(models.VariableOption(selected=True, text=["All"], value=["$__all"]))
        )
        chosen.append(f'{label}=~"${label}"')


def _panel(panel: Panel) -> AnyPanel:
    builder = _visualisation(panel)
    builder.title(panel.title).description(panel.description).datasource(SOURCE).unit(UNITS[panel.unit])
    builder.span(panel.width).height(panel.height)
    if panel.minimum is not None and panel.shape != "number":
        builder.min(panel.minimum)
    if panel.maximum is not None:
        builder.max(panel.maximum)
    if panel.decimals is not None:
        builder.decimals(panel.decimals)
    builder.thresholds(_thresholds(panel))
    for index, query in enumerate(panel.queries):
        builder.with_target(_target(query, chr(ord("A") + index), panel))
    return builder


def _target(query: Query, ref_id: str, panel: Panel) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(query.expr).ref_id(ref_id).datasource(SOURCE)
    target.legend_format(query.legend or "__auto")
    if panel.shape == "table":
        return target.instant().format(prometheus_models.PromQueryFormat.TABLE)
    if panel.shape == "heatmap":
        target.format(prometheus_models.PromQueryFormat.HEATMAP)
    return target.instant() if panel.shape == "bars" else target.range()


def _visualisation(panel: Panel) -> AnyPanel:
    match panel.shape:
        case "number":
            last = common.ReduceDataOptions().calcs(["lastNotNull"])
            return stat.Panel().reduce_options(last).graph_mode(common_models.BigValueGraphMode.AREA)
        case "bars":
            last = common.ReduceDataOptions().calcs(["lastNotNull"])
            return bargauge.Panel().reduce_options(last).orientation(common_models.VizOrientation.HORIZONTAL)
        case "heatmap":
            axis = heatmap.YAxisConfig().unit(UNITS[panel.unit])
            colors = heatmap.HeatmapColorOptions().mode(heatmap_models.HeatmapColorMode.SCHEME).scheme("Turbo")
            return heatmap.Panel().y_axis(axis).color(colors.steps(64))
        case "table":
            return _table(panel)
        case _:
            return _lines(panel)


def _lines(panel: Panel) -> timeseries.Panel:
    legend = (
        common.VizLegendOptions()
        .display_mode(common_models.LegendDisplayMode.LIST)
        .placement(common_models.LegendPlacement.BOTTOM)
        .show_legend(show_legend=True)
    )
    tooltip = common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI)
    lines = timeseries.Panel().legend(legend).tooltip(tooltip.sort(common_models.SortOrder.DESCENDING))
    lines.line_width(2).show_points(common_models.VisibilityMode.NEVER)
    if panel.shape == "stacked":
        lines.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL)).fill_opacity(40)
    if panel.warn_above is not None or panel.warn_below is not None:
        dashed = common_models.GraphThresholdsStyleMode.DASHED
        lines.thresholds_style(common.GraphThresholdsStyleConfig().mode(dashed))
    return lines


def _table(panel: Panel) -> table.Panel:
    """Instant queries side by side, one line per series. Each column has the unit of its query."""
    names = {f"Value #{chr(ord('A') + i)}": query.legend for i, query in enumerate(panel.queries)}
    builder = table.Panel().with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
    tidy = {"excludeByName": {"Time": True}, "renameByName": names}
    builder.with_transformation(models.DataTransformerConfig(id_val="organize", options=tidy))
    for query in panel.queries:
        unit = models.DynamicConfigValue(id_val="unit", value=UNITS[query.unit])
        builder.override_by_name(query.legend, [unit])
    return builder


def _thresholds(panel: Panel) -> dashboard.ThresholdsConfig:
    below, above = panel.warn_below, panel.warn_above
    steps = [models.Threshold(value=None, color="green" if below is None else "red")]
    if below is not None:
        steps.append(models.Threshold(value=below, color="green"))
    if above is not None:
        steps.append(models.Threshold(value=above, color="red"))
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)
