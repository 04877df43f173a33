"""Placement of the processes of one replica: the bundles of its placement group, and the controller's name.

Owns the mapping from roles to bundles. Serve places the replica in bundle 0; the controller and, on CPU, the shards and
the draft share it. On GPU each shard has a bundle with one GPU, and the draft shares the bundle of shard 0.

    cpu     [replica, controller, shards, draft]
    cuda    [replica, controller] [shard 0, draft] [shard 1] ...
"""

from __future__ import annotations

from deployments.settings import AppSettings
from engine.config import EngineConfig


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
