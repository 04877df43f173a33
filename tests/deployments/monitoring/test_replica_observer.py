"""The observability of a replica: its metrics endpoint, its target file, and the requests that it records."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import httpx
import pytest
from api_harness import make_engine
from scraping import scrape

from autoscale.control.metric_targets import MetricTarget
from deployments.monitoring.discovery import HOST_LABEL, NODE_LABEL, PID_LABEL
from deployments.monitoring.replica_observer import ReplicaObserver
from deployments.settings import AppSettings
from engine.errors import EngineUnavailable
from engine.messages import SamplingParams, Submit
from engine.metrics.counters import MetricCounters, MetricSnapshot

LABELS = ("app", "replica", "model")


async def no_metrics() -> MetricSnapshot:
    return MetricSnapshot()


def test_replicas_of_a_node_take_successive_ports_from_a_fixed_one(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        first = int(probe.getsockname()[1])
    settings = AppSettings.parse(
        {"engine": {"model": "smollm2"}, "metrics_dir": str(tmp_path), "metrics_port": first, "num_replicas": 2}
    )

    async def run() -> list[int]:
        replicas = [ReplicaObserver(settings, make_engine(), no_metrics, app="app", replica=name) for name in "ab"]
        for replica in replicas:
            replica.start(asyncio.get_running_loop(), node_ip="192.0.2.1", node_id="n1")
        files = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("*.json"))]
        ports = [int(entry["targets"][0].rpartition(":")[2]) for (entry,) in files]
        for port in ports:
            assert await asyncio.to_thread(scrape, port)
        for replica in replicas:
            await asyncio.to_thread(replica.close)
        return ports

    ports = asyncio.run(run())
    assert ports[0] >= first
    assert first <= ports[0] < ports[1] <= first + 2


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
            replica.start(loop, node_ip="192.0.2.1", node_id="n1")
        submit = Submit(request_id="x", prompt=(1, 2), sampling=SamplingParams(max_tokens=4))
        async for _ in replicas[1].engine.generate(submit):
            pass
        ended = {}
        for file in tmp_path.glob("*.json"):
            (entry,) = json.loads(file.read_text())
            values = await asyncio.to_thread(scrape, int(entry["targets"][0].rpartition(":")[2]))
            labels = {name: entry["labels"][name] for name in LABELS}
            assert labels["model"] == "smollm2"
            assert values[("paceline_steps_total", tuple(sorted(labels.items())))] == 11
            reason = tuple(sorted((labels | {"reason": "length"}).items()))
            ended[labels["replica"]] = values[("paceline_requests_total", reason)]
        assert ended == {"one": 0, "two": 1}
        for replica in replicas:
            await asyncio.to_thread(replica.close)

    asyncio.run(run())
    assert list(tmp_path.iterdir()) == []


def test_a_replica_announces_itself_and_removes_the_files_of_lost_nodes(tmp_path: Path) -> None:
    settings = AppSettings.parse(
        {"engine": {"model": "smollm2"}, "metrics_dir": str(tmp_path), "metrics_host": "0.0.0.0"}
    )
    lost = tmp_path / "paceline-lost.json"
    labels = {PID_LABEL: "1", HOST_LABEL: "another-host", NODE_LABEL: "n2"}
    lost.write_text(json.dumps([{"targets": ["192.0.2.2:1"], "labels": labels}]))
    sent: list[MetricTarget] = []

    async def send(target: MetricTarget) -> frozenset[str]:
        sent.append(target)
        if len(sent) == 1:
            raise EngineUnavailable("no controller yet")
        return frozenset({"n2"})

    async def run() -> None:
        observer = ReplicaObserver(settings, make_engine(), no_metrics, app="app", replica="a")
        target = observer.start(asyncio.get_running_loop(), node_ip="192.0.2.1", node_id="n1")
        task = asyncio.create_task(observer.announce(target, send, period_s=0.001))
        while len(sent) < 3:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert {file.name for file in tmp_path.iterdir()} == {"paceline-a.json"}
        await asyncio.to_thread(observer.close)

    asyncio.run(run())
    assert {(target.address.partition(":")[0], target.node_id) for target in sent} == {("192.0.2.1", "n1")}
    assert sent[0].labels == {"app": "app", "replica": "a", "model": "smollm2"}
    assert not lost.exists()


def test_an_engine_that_is_not_read_in_time_is_unavailable_not_an_internal_error(tmp_path: Path) -> None:
    settings = AppSettings.parse({"engine": {"model": "smollm2"}, "metrics_dir": str(tmp_path)})
    cancelled: list[bool] = []

    async def never() -> MetricSnapshot:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        return MetricSnapshot()

    async def run() -> httpx.Response:
        observer = ReplicaObserver(settings, make_engine(), never, app="app", replica="a", read_timeout_s=0.01)
        target = observer.start(asyncio.get_running_loop(), node_ip="127.0.0.1", node_id="n1")
        with pytest.raises(EngineUnavailable, match=r"not read within 0\.01 s"):
            await asyncio.to_thread(observer.render)
        response = await asyncio.to_thread(httpx.get, f"http://{target.address}/metrics", trust_env=False)
        await asyncio.to_thread(observer.close)
        return response

    assert asyncio.run(run()).status_code == 503
    assert cancelled == [True, True]
