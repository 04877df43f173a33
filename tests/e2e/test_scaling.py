"""Replicas come and go with the load on a real Serve: a second one while streams are slow, one again when they end."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from serving import Server, serving

from bench.load.servers import Server as Endpoint
from bench.load.streams import Streams
from bench.load.workload import built_in
from deployments.local import yaml_config

pytestmark = [pytest.mark.ray, pytest.mark.slow]

STREAMS = 12
TIMEOUT_S = 300.0


def test_a_second_replica_comes_with_the_load_and_goes_with_it(tmp_path: Path) -> None:
    (targets := tmp_path / "targets").mkdir()
    env = {"PACELINE_METRICS_DIR": str(targets), "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1"}
    with serving(tmp_path / "log", "--config", str(config(tmp_path)), "--draft", "ngram", env=env) as server:
        assert len(replicas(targets)) == 1
        asyncio.run(under_load(server, targets))
        wait_for(lambda: len(replicas(targets)) == 1, "the second replica goes")
        answer = httpx.post(
            f"{server.url}/v1/completions",
            json={"model": "smollm2", "prompt": "One, two,", "max_tokens": 4},
            timeout=60.0,
        )
        assert answer.status_code == 200


async def under_load(server: Server, targets: Path) -> None:
    """Run until both replicas have served."""
    endpoint = Endpoint(f"{server.url}/v1", "smollm2")
    async with Streams(endpoint, built_in()["chat"], max_tokens=64) as load:
        await load.resize(STREAMS)
        await asyncio.to_thread(wait_for, lambda: len(replicas(targets)) == 2, "a second replica comes")
        await load.resize(0)
        await load.resize(STREAMS)  # new connections, so that both are asked
        served = "paceline_generated_tokens_total"
        both = lambda: len(found := replicas(targets)) == 2 and all(one[served] > 0 for one in found)  # noqa: E731
        await asyncio.to_thread(wait_for, both, "both serve")
        wanted = {one["paceline_desired_replicas"] for one in replicas(targets)}
        assert wanted == {2.0}
        assert not load.errors, load.errors[:3]


def config(folder: Path) -> Path:
    """An objective that no batch meets, so that the policy asks for the largest number of replicas."""
    values = yaml_config.load(yaml_config.DEFAULT_FILE)
    scaling: dict[str, Any] = {"max_replicas": 2, "tpot_s": 1e-4, "upscale_delay_s": 1, "downscale_delay_s": 5}
    values["applications"][0]["args"] |= {"autoscaling": scaling | {"look_back_s": 5}, "drain_timeout_s": 5}
    path = folder / "scaling.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def replicas(targets: Path) -> list[dict[str, float]]:
    """The metrics of every replica that responds, summed over labels."""
    found = []
    for file in targets.glob("*.json"):
        try:
            (target,) = json.loads(file.read_text())
            text = httpx.get(f"http://{target['targets'][0]}/metrics", timeout=30.0).text
        except (OSError, ValueError, httpx.HTTPError):
            continue
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
        found.append(values)
    return found


def wait_for(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline, f"not within {TIMEOUT_S:.0f} s: {what}"
        time.sleep(1.0)
