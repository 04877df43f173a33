"""A real Prometheus scrapes two replicas' exporters: every query of every panel returns data, and replicas add up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import prometheus_server
import pytest
from aiohttp import web
from loopback_http import listening
from prometheus_server import Prometheus

from autoscale.control.metric_targets import MetricTarget
from dashboards.alerts import alerts
from deployments.monitoring.discovery import entry_of
from deployments.monitoring.exporter import Exporter
from engine.metrics.counters import MetricCounters
from engine.metrics.definitions import METRICS

REPLICAS = ("r1", "r2")
WINDOW = "10s"


def count_something(counters: MetricCounters, scale: float) -> None:
    """Change every metric once: counters by `scale` for each value of their labels."""
    for metric in METRICS:
        if metric.alias_of:
            continue
        for value in metric.values or (("0", "1") if metric.labels else ("",)):
            labels = (value,) if metric.labels else ()
            if metric.kind == "counter":
                counters.add(metric.name, scale, *labels)
            elif metric.kind == "gauge":
                counters.set(metric.name, 10 * scale, *labels)
            else:
                counters.observe(metric.name, metric.buckets[3], *labels)


class Replica:
    """An exporter whose counters rise ten times a second until it is closed."""

    def __init__(self, name: str, scale: float) -> None:
        self._counters, self._scale = MetricCounters(), scale
        labels = {"app": "chat", "replica": name, "model": "smol"}
        self._exporter = Exporter(self._counters.read, labels, host="127.0.0.1", port=0)
        self.target = MetricTarget(address=f"127.0.0.1:{self._exporter.port}", labels=labels, node_id="n")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._count)
        self._thread.start()

    def _count(self) -> None:
        while not self._over.wait(0.1):
            count_something(self._counters, self._scale)

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._exporter.close()


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    if not prometheus_server.installed():
        pytest.skip("prometheus is not installed (Debian: apt-get install prometheus)")
    replicas = [Replica(name, scale) for scale, name in enumerate(REPLICAS, start=1)]

    async def listed(request: web.Request) -> web.Response:
        entries: list[Any] = [entry_of(replica.target) for replica in replicas]
        return web.json_response(entries)

    with ExitStack() as stack:
        for replica in replicas:
            stack.callback(replica.close)
        port = stack.enter_context(listening(web.get("/metrics/targets", listed)))
        url = f"http://127.0.0.1:{port}/metrics/targets"
        server = stack.enter_context(prometheus_server.running(tmp_path_factory.mktemp("prometheus"), url))
        server.wait(lambda: len(server.values(f"rate(paceline_steps_total[{WINDOW}]) > 0")) == len(REPLICAS))
        server.wait(lambda: min(server.values("count_over_time(paceline_steps_total[1m])").values()) >= 6)
        yield server


def test_every_panel_s_every_query_returns_data(prometheus: Prometheus) -> None:
    assert prometheus.empty_panels(WINDOW) == []


def test_per_replica_queries_return_every_replica(prometheus: Prometheus) -> None:
    split = [expr for _, expr in prometheus_server.panel_exprs(WINDOW) if "by (replica" in expr]
    assert len(split) > 10
    for expr in split:
        assert {dict(labels)["replica"] for labels in prometheus.values(expr)} == set(REPLICAS), expr


def test_counters_of_replicas_add_up(prometheus: Prometheus) -> None:
    """The second replica counts twice as much as the first: two thirds of the sum."""
    rates = prometheus.values("sum by (replica) (rate(paceline_emitted_tokens_total[10s]))")
    by_name = {dict(labels)["replica"]: value for labels, value in rates.items()}
    assert by_name["r2"] / sum(by_name.values()) == pytest.approx(2 / 3, abs=0.1)


def scraped(prometheus: Prometheus, prefix: str) -> set[str]:
    return {name for name in prometheus.get("label/__name__/values") if name.startswith(prefix)}


def test_what_is_scraped_is_what_is_declared(prometheus: Prometheus) -> None:
    suffixes = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    own = [metric for metric in METRICS if not metric.alias_of]
    expected = {metric.name + suffix for metric in own for suffix in suffixes[metric.kind]}
    assert scraped(prometheus, "paceline_") == expected


def test_aliases_are_scraped_under_their_own_name(prometheus: Prometheus) -> None:
    assert scraped(prometheus, "vllm:") == {metric.name for metric in METRICS if metric.alias_of}


def test_targets_carry_the_labels_and_rules_are_loaded(prometheus: Prometheus) -> None:
    assert {dict(labels)["replica"] for labels in prometheus.values('up{app="chat", model="smol"} == 1')} == set(
        REPLICAS
    )
    (group,) = prometheus.get("rules")["groups"]
    assert [rule["name"] for rule in group["rules"]] == [alert.name for alert in alerts()]
    assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"}
