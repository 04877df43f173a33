"""Alert rules and panel queries under the tools of Prometheus: all parse, and alerts fire exactly when they should."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards import render
from dashboards.alerts import alerts
from engine.metrics.labels import COMMON_LABELS

LABELS = 'app="chat",replica="r1",model="smol"'
VARIABLES = {"$__rate_interval": "1m", **{f"${label}": ".*" for label in COMMON_LABELS}}


@pytest.fixture(scope="module")
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    return found


def run(promtool: str, *args: str | Path) -> str:
    done = subprocess.run([promtool, *map(str, args)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def series(name: str, values: str, labels: str = "", common: str = LABELS) -> dict[str, str]:
    return {"series": f"{name}{{{common}{',' if labels else ''}{labels}}}", "values": values}


def counter(name: str, per_minute: float, labels: str = "", *, start: float = 0, minutes: int = 60) -> dict[str, str]:
    return series(f"paceline_{name}", f"{start:g}+{per_minute:g}x{minutes}", labels)


@dataclass(frozen=True)
class Case:
    """Input series, one sample a minute, and whether the alert fires at a minute."""

    alert: str
    inputs: tuple[dict[str, str], ...]
    at: int
    fires: bool
    labels: dict[str, str] = field(default_factory=dict)


def accepted(before: float, after: float) -> tuple[dict[str, str], ...]:
    """300 drafted tokens a minute for 400 minutes; acceptance changes after 360."""
    return (
        counter("drafted_tokens_total", 300, minutes=400),
        series(
            "paceline_accepted_tokens_total",
            f"0+{300 * before:g}x360 {360 * 300 * before:g}+{300 * after:g}x40",
        ),
    )


def goodput(realised: float, plain: float, drafts: float = 600) -> tuple[dict[str, str], ...]:
    return (
        counter("realised_tokens_total", 60 * realised),
        counter("realised_seconds_total", 60),
        counter("plain_tokens_total", 60 * plain),
        counter("plain_seconds_total", 60),
        counter("drafts_total", drafts),
    )


def cache(per_minute: float) -> tuple[dict[str, str], ...]:
    target = 'cache="target"'
    return (
        counter("kv_evictions_total", per_minute, target),
        series("paceline_kv_used_blocks", "600x60", target),
        series("paceline_kv_free_blocks", "400x60", target),
    )


def ttft(fast: float, slow: float) -> tuple[dict[str, str], ...]:
    """Requests a minute that take under 0.5 s, and between 2.5 and 5 s."""
    both = fast + slow
    bounds = (("0.5", fast), ("1.0", fast), ("2.5", fast), ("5.0", both), ("+Inf", both))
    return tuple(counter("ttft_seconds_bucket", rate, f'le="{bound}"') for bound, rate in bounds)


def ended(good: float, bad: float) -> tuple[dict[str, str], ...]:
    return (
        counter("requests_total", good, 'reason="stop"'),
        counter("requests_total", bad, 'reason="error"'),
    )


def up(values: str) -> tuple[dict[str, str], ...]:
    return (series("up", values, 'job="paceline",instance="127.0.0.1:9400"'),)


MODEL = {"app": "chat", "model": "smol"}
REPLICA = MODEL | {"replica": "r1"}
TARGET = REPLICA | {"cache": "target"}
TICKET, PAGE = {"severity": "ticket"}, {"severity": "page"}


def replicas(wanted: int, *up: str) -> tuple[dict[str, str], ...]:
    """The series `up` of each replica, and how many replicas the app wants."""
    listed = [series("up", values, 'job="paceline"', f'app="chat",replica="r{n}"') for n, values in enumerate(up)]
    return *listed, series("paceline_desired_replicas", f"{wanted}x30")


CASES = (
    Case("PacelineAcceptanceCollapse", accepted(0.8, 0.2), 395, fires=True, labels=MODEL | TICKET),
    Case("PacelineAcceptanceCollapse", accepted(0.8, 0.2), 365, fires=False),
    Case("PacelineAcceptanceCollapse", accepted(0.8, 0.6), 395, fires=False),
    Case("PacelineSpeculationNotPaying", goodput(80, 100), 30, fires=True, labels=REPLICA | TICKET),
    Case("PacelineSpeculationNotPaying", goodput(80, 100), 8, fires=False),
    Case("PacelineSpeculationNotPaying", goodput(99, 100), 30, fires=False),
    Case("PacelineSpeculationNotPaying", goodput(150, 100), 30, fires=False),
    Case("PacelineSpeculationNotPaying", goodput(80, 100, drafts=1), 30, fires=False),
    Case("PacelineDraftDown", (series("paceline_draft_up", "1x5 0x30"),), 9, fires=True, labels=REPLICA | TICKET),
    Case("PacelineDraftDown", (series("paceline_draft_up", "1x5 0x0 1x30"),), 9, fires=False),
    Case("PacelineEvictions", cache(900), 30, fires=True, labels=TARGET | TICKET),
    Case("PacelineEvictions", cache(300), 30, fires=False),
    Case("PacelinePreemptions", (counter("preemptions_total", 12),), 30, fires=True, labels=REPLICA | TICKET),
    Case("PacelinePreemptions", (counter("preemptions_total", 3),), 30, fires=False),
    Case("PacelineTtftObjective", ttft(90, 10), 30, fires=True, labels=MODEL | PAGE),
    Case("PacelineTtftObjective", ttft(98, 2), 30, fires=False),
    Case(
        "PacelineQueueGrowing", (series("paceline_waiting_requests", "0+6x60"),), 30, fires=True, labels=REPLICA | PAGE
    ),
    Case("PacelineQueueGrowing", (series("paceline_waiting_requests", "200x60"),), 30, fires=False),
    Case("PacelineQueueGrowing", (series("paceline_waiting_requests", "400-6x60"),), 30, fires=False),
    Case("PacelineErrors", ended(90, 10), 20, fires=True, labels=REPLICA | PAGE),
    Case("PacelineErrors", ended(990, 10), 20, fires=False),
    Case(
        "PacelineTargetDown",
        up("1x5 0x30"),
        12,
        fires=True,
        labels=REPLICA | PAGE | {"job": "paceline", "instance": "127.0.0.1:9400"},
    ),
    Case("PacelineTargetDown", up("1x30"), 12, fires=False),
    Case("PacelineTargetDown", (series("up", "0x30", 'job="other"'),), 12, fires=False),
    Case("PacelineReplicasMissing", replicas(2, "1x30", "1x5 _x25"), 20, fires=True, labels={"app": "chat"} | PAGE),
    Case("PacelineReplicasMissing", replicas(2, "1x30", "1x5 0x25"), 20, fires=True, labels={"app": "chat"} | PAGE),
    Case("PacelineReplicasMissing", replicas(2, "1x30", "1x30"), 20, fires=False),
    Case("PacelineReplicasMissing", replicas(1, "1x30", "1x30"), 20, fires=False),
)


def test_every_alert_is_seen_firing_and_silent() -> None:
    names = {alert.name for alert in alerts()}
    assert {case.alert for case in CASES if case.fires} == names
    assert {case.alert for case in CASES if not case.fires} == names


def test_every_alert_has_a_runbook() -> None:
    for alert in alerts():
        assert len(alert.runbook) > 100
        assert alert.runbook.endswith(".")
        assert "{{" in alert.summary


def test_the_rules_pass_promtool(promtool: str) -> None:
    said = run(promtool, "check", "rules", render.PACKAGE / "rules.yaml")
    assert f"SUCCESS: {len(alerts())} rules found" in said


@pytest.mark.parametrize(
    "index", range(len(CASES)), ids=lambda i: f"{CASES[i].alert}-{'on' if CASES[i].fires else 'off'}-{i}"
)
def test_alerts_fire_when_they_should(promtool: str, tmp_path: Path, index: int) -> None:
    case = CASES[index]
    rule = next(alert for alert in alerts() if alert.name == case.alert)
    expected = [{"exp_labels": case.labels, "exp_annotations": _annotations(rule.name)}] if case.fires else []
    test: dict[str, Any] = {
        "interval": "1m",
        "input_series": list(case.inputs),
        "alert_rule_test": [{"eval_time": f"{case.at}m", "alertname": case.alert, "exp_alerts": expected}],
    }
    rules = yaml.safe_load((render.PACKAGE / "rules.yaml").read_text())
    for entry in rules["groups"][0]["rules"]:
        entry["annotations"] = _annotations(entry["alert"])  # the text of the alert is not tested here
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules))
    content = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(content))
    run(promtool, "test", "rules", tmp_path / "test.yaml")


def _annotations(name: str) -> dict[str, str]:
    return {"summary": name}


def test_summaries_can_be_filled_in(promtool: str, tmp_path: Path) -> None:
    """A template that Prometheus cannot expand appears in the alert as an error text."""
    case = CASES[0]
    alert = alerts()[0]
    filled = "chat, smol: acceptance 20%, less than half of what it was over six hours"
    expected = {"exp_labels": case.labels, "exp_annotations": {"summary": filled, "runbook": alert.runbook}}
    test = {
        "interval": "1m",
        "input_series": list(case.inputs),
        "alert_rule_test": [{"eval_time": "395m", "alertname": case.alert, "exp_alerts": [expected]}],
    }
    shutil.copy(render.PACKAGE / "rules.yaml", tmp_path)
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": [test]}))
    run(promtool, "test", "rules", tmp_path / "test.yaml")


def test_no_template_fails_to_expand(promtool: str, tmp_path: Path) -> None:
    """Promtool prints the alerts it got where none is expected."""
    for number, case in enumerate(case for case in CASES if case.fires):
        test = {
            "interval": "1m",
            "input_series": list(case.inputs),
            "alert_rule_test": [{"eval_time": f"{case.at}m", "alertname": case.alert, "exp_alerts": []}],
        }
        shutil.copy(render.PACKAGE / "rules.yaml", tmp_path)
        path = tmp_path / f"{number}.yaml"
        path.write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": [test]}))
        done = subprocess.run([promtool, "test", "rules", str(path)], capture_output=True, text=True, timeout=60)
        said = done.stdout + done.stderr
        assert done.returncode == 1
        assert "summary=" in said
        assert "no value" not in said
        assert "error expanding" not in said


def test_every_panel_s_query_parses(promtool: str, tmp_path: Path) -> None:
    exprs = [query.expr for board in render.boards() for panel in board.panels for query in panel.queries]
    exprs += [events.expr for board in render.boards() for events in board.annotations]
    rules = [{"record": f"q{i}", "expr": _without_variables(expr)} for i, expr in enumerate(sorted(set(exprs)))]
    (tmp_path / "queries.yaml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    said = run(promtool, "check", "rules", tmp_path / "queries.yaml")
    assert f"SUCCESS: {len(rules)} rules found" in said


def test_prometheus_takes_its_configuration(promtool: str, tmp_path: Path) -> None:
    text = (render.PACKAGE / "prometheus.yml").read_text()
    shutil.copy(render.PACKAGE / "rules.yaml", tmp_path)
    (tmp_path / "prometheus.yml").write_text(text.replace("/etc/prometheus", str(tmp_path)))
    run(promtool, "check", "config", tmp_path / "prometheus.yml")


def _without_variables(expr: str) -> str:
    for name, value in VARIABLES.items():
        expr = expr.replace(name, value)
    assert not re.search(r"\$", expr)
    return expr
