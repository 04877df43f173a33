"""What an operator writes under `args:` in the deployment's YAML: the engine's settings and those of serving it.

Owns names, defaults and bounds; an unknown key or a bad value is a ConfigError naming the field. The same class checks
every YAML file in this folder, the command line and a running deployment.
"""

from __future__ import annotations

from typing import Annotated, Literal

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
    hang_timeout_s: Annotated[float, Field(ge=1)] = 60.0
    """A target whose loop has not turned for so long counts as hung and is replaced; longer than its longest step."""
    resume_timeout_s: Annotated[float, Field(ge=0)] = 120.0
    """How long a request may wait for a new engine after its own went away."""
    drain_timeout_s: Annotated[float, Field(ge=0)] = 120.0
    """How long requests in flight may take to finish when a replica stops."""

    metrics_host: str = "127.0.0.1"
    """Address on which each replica exposes its metrics; another one lets Prometheus come from another machine."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of it; 0 takes a free one, which is needed where a machine has several replicas."""
    metrics_dir: str | None = None
    """Folder of target files for Prometheus; default: $PACELINE_METRICS_DIR, else metrics-targets in the cache."""
    log_format: Literal["text", "json"] = "text"
    """How the replica's log lines are written; `json` also writes one line per request, with its id."""
    trace_file: str | None = None
    """Write an OpenTelemetry trace of every request to this file, one JSON object per span."""
    trace_endpoint: str | None = None
    """Send traces to this OTLP/HTTP endpoint; needs opentelemetry-exporter-otlp-proto-http."""
    num_timelines: Annotated[int, Field(ge=0, le=100_000)] = 256
    """Last requests whose timeline /debug/requests shows."""

    @property
    def served_name(self) -> str:
        return self.model_name or self.engine.model.rstrip("/").rsplit("/", 1)[-1]
