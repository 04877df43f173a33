"""/metrics and /metrics/targets: Prometheus' formats, under the same access rules as the other routes."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable, Sequence

import httpx
from api_harness import dependencies, make_engine

from autoscale.control.metric_targets import MetricTarget
from deployments.http.access import Access
from deployments.http.app import build_api
from deployments.monitoring.exporter import Exporter
from deployments.monitoring.metrics_route import add_metrics_route, add_targets_route
from engine.errors import EngineUnavailable
from engine.metrics.counters import MetricCounters


def scrape(peer: str, exporter: Exporter) -> httpx.Response:
    app = build_api(dependencies(make_engine()), Access())
    add_metrics_route(app, exporter.render)

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app, client=(peer, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get("/metrics")

    return asyncio.run(run())


def test_the_page_is_that_of_the_metrics_port_and_is_made_in_a_thread() -> None:
    counters, threads = MetricCounters(), []
    counters.add("paceline_rejected_total", 3, "unauthorized")

    def read() -> object:
        threads.append(threading.current_thread())
        return counters.read()

    exporter = Exporter(read, {"app": "a", "replica": "r", "model": "m"}, host="127.0.0.1", port=0)
    try:
        response = scrape("127.0.0.1", exporter)
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert response.text == httpx.get(f"http://127.0.0.1:{exporter.port}/metrics").text
        assert re.search(r'paceline_rejected_total{[^}]*cause="unauthorized"[^}]*} 3.0', response.text)
        assert threading.main_thread() not in threads
        assert scrape("10.0.0.1", exporter).status_code == 403
    finally:
        exporter.close()


def discover(peer: str, targets: Callable[[], Awaitable[Sequence[MetricTarget]]]) -> httpx.Response:
    app = build_api(dependencies(make_engine()), Access())
    add_targets_route(app, targets)

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app, client=(peer, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get("/metrics/targets")

    return asyncio.run(run())


def test_targets_are_listed_as_prometheus_reads_them() -> None:
    labels = {"app": "a", "replica": "r1", "model": "m"}

    async def two() -> Sequence[MetricTarget]:
        return [
            MetricTarget(address="192.0.2.1:9400", labels=labels, node_id="n1"),
            MetricTarget(address="192.0.2.2:9400", labels=labels | {"replica": "r2"}, node_id="n2"),
        ]

    response = discover("127.0.0.1", two)
    assert response.headers["content-type"] == "application/json"
    assert response.json() == [
        {"targets": ["192.0.2.1:9400"], "labels": labels},
        {"targets": ["192.0.2.2:9400"], "labels": labels | {"replica": "r2"}},
    ]
    assert discover("10.0.0.1", two).status_code == 403


def test_no_controller_is_not_an_empty_list() -> None:
    """Prometheus keeps the targets that it knows when discovery fails; an empty list would drop them."""

    async def unavailable() -> Sequence[MetricTarget]:
        raise EngineUnavailable("The controller does not respond; try again soon")

    assert discover("127.0.0.1", unavailable).status_code == 503
