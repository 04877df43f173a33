"""What Prometheus reads: the text format of snapshots over HTTP."""

from __future__ import annotations

import socket

import httpx
import pytest
from scraping import Sample, scrape

from deployments.monitoring.exporter import Exporter
from engine.errors import ConfigError
from engine.metrics.counters import MetricCounters, MetricSnapshot
from engine.metrics.definitions import METRICS

COMMON = {"app": "a", "replica": "r", "model": "m"}


def sample(name: str, **labels: str) -> Sample:
    return name, tuple(sorted((COMMON | labels).items()))


def exported(snapshot: MetricSnapshot) -> dict[Sample, float]:
    exporter = Exporter(lambda: snapshot, COMMON, host="127.0.0.1", port=0)
    try:
        return scrape(exporter.port)
    finally:
        exporter.close()


def test_every_metric_exists_from_the_start() -> None:
    values = exported(MetricSnapshot())
    assert set(values.values()) == {0.0}
    names = {name for name, _ in values}
    for metric in METRICS:
        if metric.kind == "histogram":
            assert {f"{metric.name}_bucket", f"{metric.name}_sum", f"{metric.name}_count"} <= names
        elif metric.values or not metric.labels:
            assert metric.name in names
    assert values[sample("paceline_k_reasons_total", reason="batch")] == 0


def test_values_arrive() -> None:
    counters = MetricCounters()
    counters.add("paceline_accepted_positions_total", 7, "2")
    counters.add("paceline_kv_evictions_total", 3, "draft")
    counters.set("paceline_running_requests", 5)
    for value in (0, 2, 2, 16):
        counters.observe("paceline_k", value)
    counters.observe("paceline_ttft_seconds", 1e6)
    values = exported(counters.read())
    assert values[sample("paceline_accepted_positions_total", position="2")] == 7
    assert values[sample("vllm:spec_decode_num_accepted_tokens_per_pos_total", position="2")] == 7
    assert values[sample("paceline_kv_evictions_total", cache="draft")] == 3
    assert values[sample("paceline_kv_evictions_total", cache="target")] == 0
    assert values[sample("paceline_running_requests")] == 5
    at_most = {le: values[sample("paceline_k_bucket", le=le)] for le in ("0.0", "1.0", "2.0", "15.0", "16.0", "+Inf")}
    assert at_most == {"0.0": 1, "1.0": 1, "2.0": 3, "15.0": 3, "16.0": 4, "+Inf": 4}
    assert (values[sample("paceline_k_count")], values[sample("paceline_k_sum")]) == (4, 20)
    assert values[sample("paceline_ttft_seconds_bucket", le="300.0")] == 0
    assert values[sample("paceline_ttft_seconds_bucket", le="+Inf")] == 1


OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"


def test_http() -> None:
    """Names with colons are kept for every Accept header. A failing read is 500, another path 404."""
    counters = MetricCounters()
    counters.add("paceline_drafts_total", 3)
    states = [counters.read()]
    exporter = Exporter(lambda: states.pop(), COMMON, host="127.0.0.1", port=0)
    try:
        url = f"http://127.0.0.1:{exporter.port}"
        response = httpx.get(f"{url}/metrics", headers={"Accept": OPENMETRICS})
        assert "\nvllm:spec_decode_num_drafts_total{" in response.text
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert httpx.get(f"{url}/metrics").status_code == 500
        assert httpx.get(f"{url}/other").status_code == 404
    finally:
        exporter.close()


def test_a_taken_port_is_an_error_of_the_setting() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"metrics_port.*{port}"):
            Exporter(MetricSnapshot, COMMON, host="127.0.0.1", port=port)
