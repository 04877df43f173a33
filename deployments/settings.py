"""What an operator writes under `args:` in the deployment's YAML: the engine's settings and those of serving it.

Owns names, defaults and bounds; an unknown key or a bad value is a ConfigError naming the field. The same class checks
every YAML file in this folder, the command line and a running deployment.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from engine.config import EngineConfig, Settings


class AppSettings(Settings):
    """One application: a model, its engine, and how many replicas serve it."""

    engine: EngineConfig
    model_name: str | None = None
    """Name clients send as `model`; default: `engine.model`, or its last path component."""
    num_replicas: Annotated[int, Field(ge=1, le=1000)] = 1
    """Engine groups, each with its own shards and draft."""
    max_body_bytes: Annotated[int, Field(ge=1024)] = 4 << 20
    """Largest request body."""
    cpus_per_shard: Annotated[float, Field(ge=0)] = 0.0
    """CPUs that Ray reserves for each shard when the device is cpu; 0 lets it fit on any machine."""
    draft_gpu_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of GPU 0 that Ray books for the draft; the memory cap is engine.speculative.memory_fraction."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Deadline for weights and caches of all shards."""
    drain_timeout_s: Annotated[float, Field(ge=0)] = 120.0
    """How long requests in flight may take to finish when a replica stops."""

    @property
    def served_name(self) -> str:
        return self.model_name or self.engine.model.rstrip("/").rsplit("/", 1)[-1]
