"""Placement on GPUs that Ray only counts: shard 0 and the draft share one GPU, every other shard has its own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deployments.cluster.placement import bundles, draft_bundle, shard_bundle
from deployments.settings import AppSettings

pytestmark = pytest.mark.ray

TP = 4


class Seen:
    """An actor that says which GPUs it sees."""

    def gpus(self) -> str:
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(scope="module", autouse=True)
def _eight_gpus() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="pl-", dir="/tmp") as folder:
        ray.init(
            num_cpus=2 * (TP + 1),
            num_gpus=8,
            include_dashboard=False,
            _temp_dir=folder,
            object_store_memory=100 << 20,
            log_to_driver=False,
        )
        yield
        ray.shutdown()


def placed(group: Any, bundle: int, num_gpus: float) -> Any:
    strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle)
    return ray.remote(Seen).options(num_cpus=0, num_gpus=num_gpus, scheduling_strategy=strategy).remote()


@pytest.mark.parametrize("fraction", [0.1, 1 / 3])
def test_the_draft_shares_the_gpu_of_shard_0_also_after_a_restart(fraction: float) -> None:
    settings = AppSettings.parse(
        {
            "engine": {"model": "m", "device": "cuda", "tensor_parallel_size": TP},
            "num_replicas": 2,
            "draft_gpu_fraction": fraction,
        }
    )
    groups = [placement_group(bundles(settings), strategy="STRICT_PACK") for _ in range(2)]
    ray.get([group.ready() for group in groups], timeout=60)
    seen: set[str] = set()
    for group in groups:
        for _ in range(2):  # The second time is a restart of the whole replica.
            shards = [
                placed(group, shard_bundle(settings.engine, rank), 1.0 - (fraction if rank == 0 else 0.0))
                for rank in range(TP)
            ]
            gpus = ray.get([shard.gpus.remote() for shard in shards], timeout=60)
            draft = placed(group, draft_bundle(settings.engine), fraction)
            assert ray.get(draft.gpus.remote(), timeout=60) == gpus[0]
            assert len(set(gpus)) == TP
            for actor in (*shards, draft):
                ray.kill(actor)
        assert seen.isdisjoint(gpus)
        seen.update(gpus)
    assert len(seen) == 8
    for group in groups:
        remove_placement_group(group)
