"""What an operator writes under `args:` in the deployment's YAML: the engine's settings and those of serving it.

Owns names, defaults and bounds; an unknown key or a bad value is a ConfigError naming the field. The same class checks
every YAML file in this folder, the command line and a running deployment.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from engine.config import MAX_K, EngineConfig, PolicyName, Settings
from engine.errors import ConfigError


class AutoscalingSettings(Settings):
    """How many replicas, by the time per output token; `autoscale.replicas.decision` says how."""

    min_replicas: Annotated[int, Field(ge=1, le=1000)] = 1
    max_replicas: Annotated[int, Field(ge=1, le=1000)] = 4
    tpot_s: Annotated[float, Field(gt=0, le=10)] = 0.025
    """Objective: seconds per output token of a request."""
    upscale_delay_s: Annotated[float, Field(ge=0)] = 15.0
    """How long more replicas must be wanted before they start."""
    downscale_delay_s: Annotated[float, Field(ge=0)] = 300.0
    """How long fewer must suffice before one goes."""
    look_back_s: Annotated[float, Field(gt=0)] = 15.0
    """Over so long what replicas say is averaged."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas: {self.min_replicas} is above max_replicas {self.max_replicas}")
        return self


class AppSettings(Settings):
    """One application: a model, its engine, and how many replicas serve it."""

    engine: EngineConfig
    model_name: str | None = None
    """Name clients send as `model`; default: `engine.model`, or its last path component."""
    num_replicas: Annotated[int, Field(ge=1, le=1000)] = 1
    """Engine groups, each with its own shards and draft."""
    autoscaling: AutoscalingSettings | None = None
    """Let the load decide on the number of replicas; `num_replicas` is then not given."""
    api_keys_file: str | None = None
    """Key file as `paceline key` writes it; keys may also come from $PACELINE_API_KEYS. Without any, the server answers
    on loopback only."""
    cors_origins: tuple[Annotated[str, Field(pattern=r"^(\*|https?://[^/\s]+)$")], ...] = ()
    """Web pages of these origins may call the server from a browser, such as https://app.example; `*` is all."""
    max_body_bytes: Annotated[int, Field(ge=1024)] = 4 << 20
    """Largest request body."""
    max_prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    """Longest prompt; default: what the context leaves."""
    strict_max_tokens: bool = False
    """Refuse requests whose `max_tokens` is above what the context leaves. Otherwise it is lowered to that."""
    generic_tools: bool = False
    """Let clients send tools although the model's chat template has none: the system message describes them. The
    default model has this on, see docs/openai.md."""
    request_timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 3600.0
    """Longest time that an answer may take; requests may ask for less."""
    direct_host: str = "127.0.0.1"
    """Address of `direct_port`."""
    direct_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Let each replica listen on this port itself, past Serve's proxy, which costs more than the rest of the way.
    Replicas of one machine share the port; while the only one is being replaced nobody listens."""
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
    def capacity(self) -> int:
        """Answers in flight in one replica, running and waiting."""
        return self.engine.max_num_requests + self.engine.max_num_waiting

    @model_validator(mode="after")
    def _one_number_of_replicas(self) -> Self:
        if self.autoscaling is not None and "num_replicas" in self.model_fields_set and self.num_replicas != 1:
            raise ValueError(f"num_replicas: {self.num_replicas} given, but autoscaling decides; give one of them")
        return self

    @property
    def most_replicas(self) -> int:
        """That can run at once."""
        return self.autoscaling.max_replicas if self.autoscaling is not None else self.num_replicas

    @property
    def served_name(self) -> str:
        return self.model_name or self.engine.model.rstrip("/").rsplit("/", 1)[-1]


class LiveSettings(Settings):
    """What an operator writes under `user_config:` of the deployment `Replica`: changed without a restart.

    `serve deploy` hands it to the running replicas; what is left out is as it was at the start.
    """

    policy: PolicyName | None = None
    """Of the pace, as the other three; see engine.speculative."""
    max_k: Annotated[int, Field(ge=0, le=MAX_K)] | None = None
    max_batch: Annotated[int, Field(ge=1)] | None = None
    enabled: bool | None = None
    max_in_flight: Annotated[int, Field(ge=1)] | None = None
    """Answers in flight in one replica, at most engine.max_num_requests + engine.max_num_waiting."""
    request_timeout_s: Annotated[float, Field(gt=0, le=86_400)] | None = None
    accepts_requests: bool = True
    """false drains: what runs goes on, new requests hear 503 with Retry-After."""
    keys_version: int = 0
    """Any other number has the key file read again."""

    def pace(self) -> dict[str, Any]:
        """Changes of the plan."""
        return self.model_dump(include={"policy", "max_k", "max_batch", "enabled"}, exclude_none=True)


def check_live(live: LiveSettings, settings: AppSettings) -> None:
    """Raises ConfigError where live settings ask for more than the engine was started with."""
    if live.max_k is not None and live.max_k > settings.engine.speculative.k:
        raise ConfigError(
            f"max_k: {live.max_k} given; allowed are 0 to {settings.engine.speculative.k}, the engine's speculative.k"
        )
    if live.max_in_flight is not None and live.max_in_flight > settings.capacity:
        raise ConfigError(
            f"max_in_flight: {live.max_in_flight} given; allowed are 1 to {settings.capacity}, "
            "engine.max_num_requests + engine.max_num_waiting"
        )
