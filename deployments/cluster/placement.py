"""Placement of the processes of one replica: its device, the bundles of its placement group, the controller's name.

Owns the mapping from roles to bundles, and what device `auto` means on a cluster. Serve places the replica in bundle 0;
the controller and, on CPU, the shards and the draft share it. On GPU each shard has a bundle with one GPU, and the
draft shares the bundle of shard 0.

    cpu     [replica, controller, shards, draft]
    cuda    [replica, controller] [shard 0, draft] [shard 1] ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from deployments.settings import AppSettings
from engine.config import EngineConfig


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """What device `auto` became."""

    device: Literal["cpu", "cuda"]
    """The device of every shard."""
    reason: str
    """Why, and what the operator may have to wait for or to change; for the log."""


def choose_device(num_shards: int, node_gpus: Sequence[float], on_demand_gpus: Sequence[float]) -> DeviceChoice:
    """What device `auto` means: cuda where one node has, or can get, a GPU for every shard of a replica.

    Args:
        num_shards: target shards of a replica. All are on one node.
        node_gpus: GPUs of each living node.
        on_demand_gpus: GPUs of each kind of node that the cluster's autoscaler can start.
    """
    most = max(node_gpus, default=0.0)
    if most >= num_shards:
        return DeviceChoice("cuda", f"a node has {most:g} GPUs")
    if max(on_demand_gpus, default=0.0) >= num_shards:
        reason = f"no living node has {num_shards} GPUs; replicas wait until the autoscaler has started one that does"
        return DeviceChoice("cuda", reason)
    reason = f"no living node has {num_shards} GPUs (the largest has {most:g}); where such nodes join later, set"
    return DeviceChoice("cpu", f"{reason} engine.device: cuda")


def bundles(settings: AppSettings) -> list[dict[str, float]]:
    """Placement group bundles of one replica, for the strategy STRICT_PACK."""
    engine = settings.engine
    if engine.device == "cuda":
        return [{"CPU": 1.0}] + [{"CPU": 1.0, "GPU": 1.0}] * engine.tensor_parallel_size
    return [{"CPU": 1.0 + settings.cpus_per_shard * engine.tensor_parallel_size}]


def most_cpus(settings: AppSettings) -> float:
    """CPUs that Ray needs for the bundles of one replica, on whichever device it runs."""
    on_cuda = 1.0 + settings.engine.tensor_parallel_size
    return max(on_cuda, sum(bundle["CPU"] for bundle in bundles(settings)))


def shard_bundle(engine: EngineConfig, rank: int) -> int:
    """Index of the bundle of a target shard."""
    return 1 + rank if engine.device == "cuda" else 0


def draft_bundle(engine: EngineConfig) -> int:
    """Index of the bundle of the draft."""
    return shard_bundle(engine, 0)


CONTROLLER_NAMESPACE = "paceline"


def controller_name(app_name: str) -> str:
    """Name of the controller actor of an app, in CONTROLLER_NAMESPACE."""
    return f"controller:{app_name}"
