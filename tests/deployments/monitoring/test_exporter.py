"""What Prometheus reads: the text format of snapshots over HTTP, and the target files."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from api_harness import make_engine
from prometheus_client.parser import text_string_to_metric_families

from deployments.monitoring.discovery import HOST_LABEL, PID_LABEL, TargetFile, clear_dead, targets_folder
from deployments.monitoring.exporter import Exporter
from deployments.monitoring.replica_observer import ReplicaObserver
from deployments.settings import AppSettings
from engine.errors import ConfigError
from engine.messages import SamplingParams, Submit
from engine.metrics.counters import MetricCounters, MetricSnapshot
from engine.metrics.definitions import METRICS

COMMON = {"app": "a", "replica": "r", "model": "m"}
Sample = tuple[str, tuple[tuple[str, str], ...]]


def scrape(port: int) -> dict[Sample, float]:
    text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


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


class TestTargetFiles:
    def test_written_whole_and_removed(self, tmp_path: Path) -> None:
        target = TargetFile(tmp_path / "made", "app#1/x")
        target.write("127.0.0.1:1234", COMMON)
        (entry,) = json.loads(target.path.read_text())
        assert entry["targets"] == ["127.0.0.1:1234"]
        assert entry["labels"] == COMMON | {PID_LABEL: str(os.getpid()), HOST_LABEL: socket.gethostname()}
        assert list((tmp_path / "made").iterdir()) == [target.path]  # nothing partial is left
        target.remove()
        target.remove()
        assert not target.path.exists()

    def test_only_the_dead_of_this_host_are_cleared(self, tmp_path: Path) -> None:
        dead = subprocess.Popen([sys.executable, "-c", ""])
        dead.wait()
        entries = {
            "paceline-dead": {PID_LABEL: str(dead.pid), HOST_LABEL: socket.gethostname()},
            "paceline-alive": {PID_LABEL: str(os.getpid()), HOST_LABEL: socket.gethostname()},
            "paceline-elsewhere": {PID_LABEL: str(dead.pid), HOST_LABEL: "another-host"},
            "paceline-other": {},
            "foreign": {PID_LABEL: str(dead.pid), HOST_LABEL: socket.gethostname()},
        }
        for name, labels in entries.items():
            (tmp_path / f"{name}.json").write_text(json.dumps([{"targets": [], "labels": labels}]))
        (tmp_path / "paceline-broken.json").write_text("{")
        clear_dead(tmp_path)
        left = {file.stem for file in tmp_path.iterdir()}
        assert left == {*entries, "paceline-broken"} - {"paceline-dead"}

    def test_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PACELINE_METRICS_DIR", str(tmp_path))
        assert targets_folder(None) == tmp_path
        assert targets_folder("/elsewhere") == Path("/elsewhere")
        monkeypatch.delenv("PACELINE_METRICS_DIR")
        assert targets_folder(None).name == "metrics-targets"


def test_replicas_are_targets_of_their_own(tmp_path: Path) -> None:
    """Two replicas in one process: each exposes its metrics, writes a target file, and removes it at the end."""
    settings = AppSettings.parse({"engine": {"model": "smollm2"}, "metrics_dir": str(tmp_path)})

    async def read_engine() -> MetricSnapshot:
        counters = MetricCounters()
        counters.add("paceline_steps_total", 11)
        return counters.read()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        replicas = [
            ReplicaObserver(settings, make_engine(), read_engine, app="app", replica=name) for name in ("one", "two")
        ]
        for replica in replicas:
            replica.start(loop, node_ip="192.0.2.1")
        submit = Submit(request_id="x", prompt=(1, 2), sampling=SamplingParams(max_tokens=4))
        async for _ in replicas[1].engine.generate(submit):
            pass
        ended = {}
        for file in tmp_path.glob("*.json"):
            (entry,) = json.loads(file.read_text())
            values = await asyncio.to_thread(scrape, int(entry["targets"][0].rpartition(":")[2]))
            labels = {name: entry["labels"][name] for name in COMMON}
            assert labels["model"] == "smollm2"
            assert values[("paceline_steps_total", tuple(sorted(labels.items())))] == 11
            reason = tuple(sorted((labels | {"reason": "length"}).items()))
            ended[labels["replica"]] = values[("paceline_requests_total", reason)]
        assert ended == {"one": 0, "two": 1}
        for replica in replicas:
            await asyncio.to_thread(replica.close)

    asyncio.run(run())
    assert list(tmp_path.iterdir()) == []
