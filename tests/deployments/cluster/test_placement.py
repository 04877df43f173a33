"""The bundles of a replica's placement group."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.cluster.placement import bundles, controller_name, draft_bundle, shard_bundle
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


def test_each_app_has_its_controller() -> None:
    assert controller_name("a") != controller_name("b")
