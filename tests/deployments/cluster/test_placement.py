"""The bundles of a replica's placement group."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.cluster.placement import bundles, choose_device, controller_name, draft_bundle, shard_bundle
from deployments.settings import AppSettings


def settings(**engine: Any) -> AppSettings:
    return AppSettings.parse({"engine": {"model": "smollm2", **engine}, "cpus_per_shard": 2})


def test_on_cpu_everything_shares_the_bundle_of_the_replica() -> None:
    app = settings(device="cpu", tensor_parallel_size=2)
    assert bundles(app) == [{"CPU": 5.0}]
    assert {shard_bundle(app.engine, rank) for rank in range(2)} == {0} == {draft_bundle(app.engine)}


def test_on_gpu_each_shard_has_a_gpu_and_the_draft_shares_the_first() -> None:
    app = settings(device="cuda", tensor_parallel_size=4)
    assert bundles(app) == [{"CPU": 1.0}, *[{"CPU": 1.0, "GPU": 1.0}] * 4]
    assert [shard_bundle(app.engine, rank) for rank in range(4)] == [1, 2, 3, 4]
    assert draft_bundle(app.engine) == 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_bundle_index_exists(device: str) -> None:
    app = settings(device=device, tensor_parallel_size=3)
    used = {0, draft_bundle(app.engine), *(shard_bundle(app.engine, rank) for rank in range(3))}
    assert used == set(range(len(bundles(app))))


@pytest.mark.parametrize(
    ("num_shards", "node_gpus", "on_demand", "device", "reason"),
    [
        (1, [0.0, 1.0], [], "cuda", "a node has 1 GPUs"),
        (4, [0.0, 8.0], [], "cuda", "a node has 8 GPUs"),
        (4, [2.0, 2.0], [], "cpu", "no living node has 4 GPUs (the largest has 2)"),
        (1, [0.0], [], "cpu", "set engine.device: cuda"),
        (1, [], [], "cpu", "set engine.device: cuda"),
        (4, [0.0], [0.0, 8.0], "cuda", "replicas wait until the autoscaler has started one"),
        (4, [2.0], [2.0], "cpu", "the largest has 2"),
    ],
)
def test_device_auto_asks_for_one_node_with_a_gpu_for_every_shard(
    num_shards: int, node_gpus: list[float], on_demand: list[float], device: str, reason: str
) -> None:
    choice = choose_device(num_shards, node_gpus, on_demand)
    assert choice.device == device
    assert reason in choice.reason


def test_each_app_has_its_controller() -> None:
    assert controller_name("a") != controller_name("b")
