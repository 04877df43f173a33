"""Boards: committed JSON is current and valid, queries read declared metrics by labels they have, units agree."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_grafana import FakeGrafana, running
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from dashboards import render
from dashboards.alerts import alerts
from dashboards.model import Board, Panel, Query
from dashboards.promql import CATALOGUE, Scope, declared_unit, names_in
from deployments.settings import AppSettings
from engine.config import EngineConfig, SpeculativeConfig
from engine.metrics.definitions import METRICS
from engine.metrics.labels import COMMON_LABELS
from paceline.cli import main

BOARDS = render.boards()
QUERIES = [(board.name, panel, query) for board in BOARDS for panel in board.panels for query in panel.queries]
EXPRS = [query.expr for _, _, query in QUERIES] + [events.expr for board in BOARDS for events in board.annotations]
FOREIGN = {"up"}
"""Series that Prometheus makes; targets carry COMMON_LABELS."""
NOT_SHOWN = {metric.name for metric in METRICS if metric.alias_of}
"""Aliases repeat another metric, for boards made for another server."""


def identifiers(board: Board) -> str:
    return board.name


def labels_by_metric(expr: str) -> dict[str, set[str]]:
    """Labels that an expression matches or groups by, for each name it reads, parsed from the text."""
    used: dict[str, set[str]] = {}
    aggregation = r"by \(([^)]*)\) \((?:rate|increase|deriv)?\(?(\w+)"
    for labels, name in re.findall(aggregation, expr):
        used.setdefault(name, set()).update(label.strip() for label in labels.split(","))
    for name, matchers in re.findall(r"(\w+)\{([^}]*)\}", expr):
        used.setdefault(name, set()).update(re.findall(r"(\w+)\s*[=!]~?", matchers))
    return used


def allowed_labels(name: str) -> set[str]:
    (declared,) = names_in(name) or {None}
    metric = CATALOGUE.get(declared or "")
    own = set(metric.labels) if metric else {"job"}
    return own | set(COMMON_LABELS) | ({"le"} if name.endswith("_bucket") else set())


def test_committed_files_are_current() -> None:
    assert render.stale() == [], "run `paceline dashboards render`"


def test_a_stale_missing_or_orphaned_file_is_seen(tmp_path: Path) -> None:
    render.write(tmp_path)
    assert render.stale(tmp_path) == []
    (tmp_path / "rendered/fleet.json").unlink()
    (tmp_path / "rules.yaml").write_text("groups: []\n")
    (tmp_path / "rendered/old.json").write_text("{}")
    assert set(render.stale(tmp_path)) == {Path("rendered/fleet.json"), Path("rules.yaml"), Path("rendered/old.json")}


@pytest.mark.parametrize("board", BOARDS, ids=identifiers)
def test_json_is_what_the_sdk_s_own_schema_holds(board: Board) -> None:
    """Reading it into the SDK's classes and writing it again loses nothing, so they know every field."""

    def restricted(again: Any, written: Any) -> Any:
        """Without defaults that the SDK adds."""
        if isinstance(written, dict) and isinstance(again, dict):
            return {key: restricted(value, written[key]) for key, value in again.items() if key in written}
        if isinstance(written, list) and isinstance(again, list) and len(written) == len(again):
            return [restricted(one, other) for one, other in zip(again, written, strict=True)]
        return again

    register_default_plugins()
    written = json.loads((render.PACKAGE / "rendered" / f"{board.name}.json").read_text())
    again = json.loads(JSONEncoder().encode(Dashboard.from_json(written)))
    for events in written["annotations"]["list"]:
        for extra in ("titleFormat", "textFormat", "step"):  # Prometheus' own fields, which the SDK does not model
            assert events.pop(extra)
    assert restricted(again, written) == written


@pytest.mark.parametrize("board", BOARDS, ids=identifiers)
def test_panels_lie_side_by_side_on_the_grid(board: Board) -> None:
    written = json.loads((render.PACKAGE / "rendered" / f"{board.name}.json").read_text())
    taken: set[tuple[int, int]] = set()
    for panel in written["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert place["x"] + place["w"] <= 24
        assert not taken & cells, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in written["panels"]]
    assert len(set(ids)) == len(ids)
    assert [row.title for row in board.rows] == [p["title"] for p in written["panels"] if p["type"] == "row"]
    for row in board.rows:
        assert sum(panel.width for panel in row.panels) % 24 == 0, f"{row.title} leaves a gap"


@pytest.mark.parametrize("board", BOARDS, ids=identifiers)
def test_every_query_is_filtered_by_every_template_variable(board: Board) -> None:
    written = json.loads((render.PACKAGE / "rendered" / f"{board.name}.json").read_text())
    names = [variable["name"] for variable in written["templating"]["list"]]
    assert names == ["datasource", *COMMON_LABELS]
    for panel in (panel for panel in written["panels"] if panel["type"] != "row"):
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            for selector in re.findall(r"(?:paceline_\w+|up)\{([^}]*)\}", target["expr"]):
                assert all(f'{label}=~"${label}"' in selector for label in COMMON_LABELS)
            assert not re.search(r"(paceline_\w+)(?![\w{])", target["expr"]), target["expr"]


@pytest.mark.parametrize("expr", [*EXPRS, *(alert.expr for alert in alerts())])
def test_queries_read_declared_metrics_by_labels_they_have(expr: str) -> None:
    assert names_in(expr) <= set(CATALOGUE)
    functions = {"sum", "min", "max", "rate", "increase", "deriv", "time", "histogram_quantile", "by", "and"}
    used = labels_by_metric(expr)
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|by \([^)]*\)", "", expr)
    assert set(re.findall(r"[A-Za-z_]\w*", bare)) - functions - FOREIGN - set(used) <= _selected(expr)
    for name, labels in used.items():
        assert labels <= allowed_labels(name), f"{name} has no {labels - allowed_labels(name)}"


def _selected(expr: str) -> set[str]:
    return set(re.findall(r"paceline_\w+", expr))


@pytest.mark.parametrize("expr", [*EXPRS, *(alert.expr for alert in alerts())])
def test_counters_are_read_through_rates_and_gauges_are_not(expr: str) -> None:
    bare = re.sub(r"\{[^}]*\}", "", expr)
    for name in re.findall(r"paceline_\w+", bare):
        (declared,) = names_in(name)
        counted = CATALOGUE[declared].kind != "gauge"
        pattern = r"(rate|increase)\(NAME\[" if counted else r"(deriv\(NAME\[|\(NAME\))"
        assert re.search(pattern.replace("NAME", name), bare), f"{name} in {bare}"


def test_the_check_of_labels_sees_what_it_should() -> None:
    used = labels_by_metric('sum by (le, bogus) (rate(paceline_k_bucket{cause="x", app=~"$app"}[5m]))')
    assert used == {"paceline_k_bucket": {"le", "bogus", "cause", "app"}}
    assert used["paceline_k_bucket"] - allowed_labels("paceline_k_bucket") == {"bogus", "cause"}
    assert names_in("rate(paceline_no_such_total[5m]) + vllm:other") == {"paceline_no_such_total", "vllm:other"}


def test_every_metric_is_in_a_panel_or_deliberately_left_out() -> None:
    shown = set().union(*(names_in(expr) for expr in EXPRS))
    declared = {metric.name for metric in METRICS}
    assert declared - shown == NOT_SHOWN


def test_a_metric_is_on_the_board_of_its_group() -> None:
    for board in BOARDS:
        shown = set().union(*(names_in(query.expr) for panel in board.panels for query in panel.queries))
        own = {metric.name for metric in METRICS if metric.group == board.name} - NOT_SHOWN
        assert own <= shown, f"{board.name} lacks {sorted(own - shown)}"


@pytest.mark.parametrize("metric", [m for m in METRICS if not m.alias_of], ids=lambda metric: metric.name)
def test_the_declaration_s_own_query_is_what_panels_show(metric: Any) -> None:
    """A further split is allowed where the plain sum has no meaning."""
    own = metric.query(selector=render.SELECTOR, window=render.WINDOW)
    split = {"paceline_start_time_seconds", "paceline_restarts_total"}
    supports = {name for name in CATALOGUE if name.endswith(("drafted_tokens_total", "emitted_tokens_total"))}
    supports |= {"paceline_reached_positions_total"}
    if metric.name not in split | supports | {"paceline_switches_total"}:
        assert own in EXPRS
    assert declared_unit(metric)


def test_units_agree() -> None:
    """Panels refuse queries of another unit; durations, bytes and tokens are never shown as plain numbers."""
    with pytest.raises(ValueError, match="yields s"):
        Panel(title="t", unit="percentunit", description="d", queries=(Query("x", "s"),))
    scope = Scope()
    assert scope.declared("ttft_seconds").unit == scope.mean("step_seconds").unit == "s"
    assert scope.declared("draft_memory_bytes").unit == "bytes"
    assert scope.declared("realised_tokens_total").unit == scope.rate("emitted_tokens_total").unit == "tokens/s"
    assert scope.declared("accepted_positions_total").unit == scope.declared("cost_error_ratio").unit == "percentunit"
    for _, panel, query in QUERIES:
        read = {CATALOGUE[name].unit for name in names_in(query.expr)}
        if query.unit == "s":
            assert read == {"seconds"}, panel.title
        if query.unit == "bytes":
            assert read == {"bytes"}, panel.title
        if query.unit == "tokens/s":
            assert read in ({"tokens"}, {"tokens", "seconds"}), panel.title


def test_panels_explain_themselves_and_no_legend_names_a_missing_label() -> None:
    for board in BOARDS:
        titles = [panel.title for panel in board.panels]
        assert len(set(titles)) == len(titles)
        for panel in board.panels:
            assert panel.description.endswith(".")
            for query in panel.queries:
                grouped = {label.strip() for by in re.findall(r"by \(([^)]*)\)", query.expr) for label in by.split(",")}
                named = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
                assert named <= grouped, panel.title
                if panel.shape not in ("table", "heatmap"):
                    assert grouped - {"le"} <= named, f"{panel.title}: lines that look the same"


def test_a_label_that_a_metric_lacks_or_a_wrong_kind_is_refused() -> None:
    scope = Scope()
    for wrong in (
        lambda: scope.rate("drafts_total", "reason"),
        lambda: scope.rate("running_requests"),
        lambda: scope.rate("ttft_seconds"),
        lambda: scope.gauge("drafts_total"),
        lambda: scope.quantile(0.5, "drafts_total"),
        lambda: scope.growth("k", "replica"),
    ):
        with pytest.raises(ValueError, match="paceline_"):
            wrong()
    with pytest.raises(KeyError):
        scope.declared("no_such_metric")


def test_compose_file_mounts_what_exists_pins_images_and_listens_on_loopback() -> None:
    compose = yaml.safe_load((render.PACKAGE / "docker-compose.yaml").read_text())
    for service in compose["services"].values():
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", service["image"])
        for volume in service["volumes"]:
            source = volume["source"] if isinstance(volume, dict) else volume.split(":")[0]
            if source.startswith("./"):
                assert (render.PACKAGE / source).exists()
    assert "--web.listen-address=127.0.0.1:9090" in compose["services"]["prometheus"]["command"]
    grafana = compose["services"]["grafana"]["environment"]
    assert grafana["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    mounts = dict(volume.split(":")[:2] for volume in compose["services"]["grafana"]["volumes"])
    provider = yaml.safe_load((render.PACKAGE / "provisioning/dashboards/paceline.yaml").read_text())["providers"][0]
    assert provider["options"]["path"] == mounts["./rendered"]
    home = grafana["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home.removeprefix(mounts["./rendered"] + "/") in {f"{board.name}.json" for board in BOARDS}
    source = yaml.safe_load((render.PACKAGE / "provisioning/datasources/prometheus.yaml").read_text())["datasources"][0]
    assert source["url"] == "http://127.0.0.1:9090"


def test_install_writes_folder_and_dashboards_and_can_be_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeGrafana()) as grafana:
        for _ in range(2):
            assert main(["dashboards", "install", "--grafana", grafana.url, "--token", "secret"]) == 0
        assert grafana.folders == {"paceline": "Paceline"}
        assert set(grafana.dashboards) == {board.uid for board in BOARDS}
        assert set(grafana.versions.values()) == {2}
        printed = capsys.readouterr().out.split()
        assert printed[:3] == [f"{grafana.url}/d/{board.uid}/x" for board in BOARDS]
        committed = json.loads((render.PACKAGE / "rendered/serving.json").read_text())
        assert grafana.dashboards["paceline-serving"] == {**committed, "id": None}


def test_install_takes_the_token_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAFANA_TOKEN", "secret")
    with running(FakeGrafana()) as grafana:
        assert main(["dashboards", "install", "--grafana", grafana.url]) == 0


@pytest.mark.parametrize(
    ("token", "state", "named"),
    [
        ("wrong", FakeGrafana(), "--token: .* does not accept the credentials"),
        ("secret", FakeGrafana(may_write=False), "not allowed to write folder 'Paceline'.*Editor"),
        (
            "secret",
            FakeGrafana(may_write=False, folders={"paceline": "Paceline"}),
            "not allowed to write dashboard 'Paceline / Speculation'",
        ),
    ],
)
def test_a_refusal_of_grafana_is_explained(
    token: str, state: FakeGrafana, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(state) as grafana:
        assert main(["dashboards", "install", "--grafana", grafana.url, "--token", token]) == 2
    said = capsys.readouterr().err
    assert re.search(named, said)
    assert token not in said


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("http://127.0.0.1:9", "no response from http://127.0.0.1:9"),
        ("http://user:hidden@127.0.0.1:9", "no response from http://127.0.0.1:9"),
        ("localhost:3000", "allowed: an address such as"),
        ("http://[::1", "--grafana|paceline:"),
    ],
)
def test_an_address_without_grafana_is_explained(url: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboards", "install", "--grafana", url]) == 2
    said = capsys.readouterr().err
    assert re.search(named, said)
    assert "hidden" not in said


def test_another_server_is_not_mistaken_for_grafana(capsys: pytest.CaptureFixture[str]) -> None:
    class Other(FakeGrafana):
        def answer(self, method: str, path: str, token: str | None, body: Any) -> tuple[int, Any]:
            return (200, ["hello"]) if method == "GET" or path.endswith("/db") else (404, {})

    with running(Other()) as other:
        assert main(["dashboards", "install", "--grafana", other.url]) == 2
    assert "did not respond as Grafana does" in capsys.readouterr().err


def test_the_documentation_lists_the_alerts() -> None:
    text = (render.PACKAGE.parent / "docs" / "dashboards.md").read_text()
    assert re.findall(r"^\| `(Paceline\w+)` \|", text, re.MULTILINE) == [alert.name for alert in alerts()]


def test_runbooks_name_settings_that_exist() -> None:
    fields = {*EngineConfig.model_fields, *AppSettings.model_fields}
    fields |= {f"speculative.{name}" for name in SpeculativeConfig.model_fields}
    for alert in alerts():
        named = set(re.findall(r"\b(?:speculative\.)?[a-z]+(?:_[a-z]+)+\b", alert.runbook))
        assert named <= fields, f"{alert.name}: {named - fields}"


def test_render_writes_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboards", "render", "--out", str(tmp_path), "--check"]) == 1
    assert "speculation.json: not current" in capsys.readouterr().err
    assert main(["dashboards", "render", "--out", str(tmp_path)]) == 0
    assert main(["dashboards", "render", "--out", str(tmp_path), "--check"]) == 0
