"""The settings under `args:` and `user_config:` of a deployment's YAML file.

Owns names, defaults and bounds. An unknown key or a bad value is a ConfigError that names the field. The same classes
check the YAML files of this folder, the command line and a running deployment.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from engine.config import MAX_K, EngineConfig, PolicyName, Settings
from engine.errors import ConfigError


class AutoscalingSettings(Settings):
    """Number of replicas by time per output token. The method is in `autoscale.replicas.decision`."""

    min_replicas: Annotated[int, Field(ge=1, le=1000)] = 1
    """Smallest number of replicas."""
    max_replicas: Annotated[int, Field(ge=1, le=1000)] = 4
    """Largest number of replicas."""
    tpot_s: Annotated[float, Field(gt=0, le=10)] = 0.025
    """Objective: time per output token of a request, in seconds."""
    upscale_delay_s: Annotated[float, Field(ge=0)] = 15.0
    """Seconds for which more replicas must be wanted before they start."""
    downscale_delay_s: Annotated[float, Field(ge=0)] = 300.0
    """Seconds for which fewer replicas must suffice before one stops."""
    look_back_s: Annotated[float, Field(gt=0)] = 15.0
    """Seconds over which the load reports of the replicas are averaged."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas: {self.min_replicas} is above max_replicas {self.max_replicas}")
        return self


class StoredResponsesSettings(Settings):
    """Responses of /v1/responses that each replica keeps in memory. The bounds hold for each API key on its own."""

    max_responses: Annotated[int, Field(ge=1, le=100_000)] = 1000
    """Most responses of an API key. The oldest give way."""
    max_bytes: Annotated[int, Field(ge=1024)] = 64 << 20
    """Most bytes of the responses of an API key. A response counts with its whole conversation; one that is larger by
    itself is not kept."""
    max_age_s: Annotated[float, Field(gt=0)] = 3600.0
    """Seconds for which a response is kept."""


class AppSettings(Settings):
    """One application: a model, its engine, and the number of its replicas."""

    engine: EngineConfig
    """Settings of the engine."""
    model_name: str | None = None
    """Name that clients send as `model`. Default: the last path component of `engine.model`."""
    num_replicas: Annotated[int, Field(ge=1, le=1000)] = 1
    """Number of replicas. Each has its own target shards and draft."""
    autoscaling: AutoscalingSettings | None = None
    """Autoscaling of the replicas. Excludes `num_replicas`."""
    api_keys_file: str | None = None
    """Key file as `paceline key` writes it. Keys may also come from $PACELINE_API_KEYS. Without keys the server accepts
    requests from loopback only."""
    cors_origins: tuple[Annotated[str, Field(pattern=r"^(\*|https?://[^/\s]+)$")], ...] = ()
    """Origins of web pages that may call the server from a browser, such as https://app.example. `*` allows all."""
    max_body_bytes: Annotated[int, Field(ge=1024)] = 4 << 20
    """Largest request body, in bytes."""
    max_prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    """Longest prompt, in tokens. Default: the context length."""
    strict_max_tokens: bool = False
    """Refuse requests whose `max_tokens` is above what the context leaves. Otherwise it is lowered to that."""
    generic_tools: bool = False
    """Let clients send tools although the model's chat template has none: the system message describes them. The
    default model has this on, see docs/openai.md."""
    stored_responses: StoredResponsesSettings | None = None
    """Responses of /v1/responses that clients may fetch, delete and continue. Default: none are kept."""
    request_timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 3600.0
    """Longest time that a response may take, in seconds. A request may ask for less."""
    direct_host: str = "127.0.0.1"
    """Address on which `direct_port` listens."""
    direct_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port on which each replica also listens itself. This avoids the cost of Serve's proxy. Replicas of one node share
    the port. While the only replica of a node is being replaced, nothing listens there."""
    cpus_per_shard: Annotated[float, Field(ge=0)] = 0.0
    """CPUs that Ray reserves for each shard when the device is cpu. 0 reserves none."""
    draft_gpu_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of GPU 0 that Ray reserves for the draft. engine.speculative.memory_fraction bounds its memory."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds in which all shards must have loaded their weights and allocated their caches."""
    hang_timeout_s: Annotated[float, Field(ge=1)] = 60.0
    """Seconds without a turn of the step loop after which the target is replaced. Must exceed the longest step."""
    resume_timeout_s: Annotated[float, Field(ge=0)] = 120.0
    """Seconds that a request waits for a new engine after its own failed."""
    drain_timeout_s: Annotated[float, Field(ge=0)] = 120.0
    """Seconds that requests in flight have to finish when a replica stops."""

    metrics_host: str = "127.0.0.1"
    """Address on which each replica exposes its metrics. The default accepts scrapes from its own node only."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the metrics. Further replicas of the same node take the next ports. 0 takes any free port."""
    metrics_dir: str | None = None
    """Folder of target files for Prometheus. Default: $PACELINE_METRICS_DIR, else metrics-targets in the cache."""
    log_format: Literal["text", "json"] = "text"
    """Format of the replica's log lines. `json` also writes one line per request, with its id."""
    trace_file: str | None = None
    """File that receives an OpenTelemetry trace of every request, one JSON object per span."""
    trace_endpoint: str | None = None
    """OTLP/HTTP endpoint that receives the traces. Needs opentelemetry-exporter-otlp-proto-http."""
    num_timelines: Annotated[int, Field(ge=0, le=100_000)] = 256
    """Number of recent requests whose timeline /debug/requests shows."""

    @property
    def capacity(self) -> int:
        """Largest number of choices in flight in one replica, running and waiting."""
        return self.engine.max_num_requests + self.engine.max_num_waiting

    @model_validator(mode="after")
    def _one_number_of_replicas(self) -> Self:
        if self.autoscaling is not None and "num_replicas" in self.model_fields_set and self.num_replicas != 1:
            raise ValueError(f"num_replicas: {self.num_replicas} given, but autoscaling decides; give one of them")
        return self

    @model_validator(mode="after")
    def _names_of_models_differ(self) -> Self:
        if self.engine.lora is not None and self.served_name in self.engine.lora.adapters:
            raise ValueError(f"engine.lora.adapters: {self.served_name!r} is the name of the base model already")
        return self

    @property
    def most_replicas(self) -> int:
        """Largest number of replicas that can run at once."""
        return self.autoscaling.max_replicas if self.autoscaling is not None else self.num_replicas

    @property
    def served_name(self) -> str:
        """Name that clients send as `model`."""
        return self.model_name or self.engine.model.rstrip("/").rsplit("/", 1)[-1]


class LiveSettings(Settings):
    """The settings under `user_config:` of the deployment `Replica`, which change without a restart.

    `serve deploy` sends them to the running replicas. A setting that is left out keeps its value from the start.
    """

    policy: PolicyName | None = None
    """Policy that chooses K; see engine.speculative.policy."""
    max_k: Annotated[int, Field(ge=0, le=MAX_K)] | None = None
    """Largest K, at most engine.speculative.k."""
    max_batch: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """Policy `threshold`: number of decoding requests from which on nothing is drafted."""
    enabled: bool | None = None
    """false turns drafting off under every policy."""
    max_in_flight: Annotated[int, Field(ge=1)] | None = None
    """Largest number of choices in flight in one replica, at most engine.max_num_requests + engine.max_num_waiting."""
    request_timeout_s: Annotated[float, Field(gt=0, le=86_400)] | None = None
    """Longest time that a response may take, in seconds."""
    accepts_requests: bool = True
    """false drains the replica: running requests go on, new ones get 503 with Retry-After."""
    keys_version: int = 0
    """A changed number makes the replica read the key file again."""

    def pace(self) -> dict[str, Any]:
        """The changes of the speculation plan, by field of SpeculationPlan."""
        return self.model_dump(include={"policy", "max_k", "max_batch", "enabled"}, exclude_none=True)


def check_live(live: LiveSettings, settings: AppSettings) -> None:
    """Raises ConfigError if live settings exceed what the engine was started with."""
    if live.max_k is not None and live.max_k > settings.engine.speculative.k:
        raise ConfigError(
            f"max_k: {live.max_k} given; allowed are 0 to {settings.engine.speculative.k}, the engine's speculative.k"
        )
    if live.max_in_flight is not None and live.max_in_flight > settings.capacity:
        raise ConfigError(
            f"max_in_flight: {live.max_in_flight} given; allowed are 1 to {settings.capacity}, "
            "engine.max_num_requests + engine.max_num_waiting"
        )
