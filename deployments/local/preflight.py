"""Checks before anything is started: what would fail minutes later fails in the first second, with one line.

Owns what a local server needs of this machine: ports, cache folder, key file, device, memory and shared memory. Raises
`ConfigError` with the remedy. Imports neither torch nor Ray.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from deployments.http.keys import KeyRing, has_keys
from deployments.local import machine
from deployments.local.ports import check_port
from deployments.local.ray_head import OBJECT_STORE_BYTES, TEMPORARY
from deployments.local.weights import model_bytes, weight_bytes
from deployments.local.weights import size_text as _size
from deployments.settings import AppSettings
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.store import EMBEDDED, cache_folder, check_cache, embedded_bytes_needed
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.lora.adapter_files import num_adapter_values, read_adapter

PROCESS_BYTES = 1_500_000_000
"""Memory of Ray, Serve, the controller and one replica, without models."""
SHARD_BYTES = 500_000_000
"""Memory of one shard's process without weights and KV cache."""
NCCL_BYTES_PER_SHARD = 64 << 20
"""Shared memory that NCCL may use for each GPU of one machine."""
TEMPORARY_BYTES = 200 << 20
"""Disk space for Ray's logs and sockets."""
Check = Callable[[AppSettings, str, int], None]


def check_machine(settings: AppSettings, host: str, port: int) -> None:
    """Everything that can be said before the model's files are there.

    Args:
        host, port: address of the HTTP server.

    Raises:
        ConfigError: the first thing that is wrong, and the remedy.
    """
    for check in CHECKS.values():
        check(settings, host, port)


def _check_http_port(settings: AppSettings, host: str, port: int) -> None:
    del settings
    check_port("http_options.port", host, port, "stop that server, or choose another port with --port")


def _check_metrics_port(settings: AppSettings, host: str, port: int) -> None:
    del host, port
    if settings.metrics_port:
        remedy = "choose another metrics_port, or 0 for any free one"
        check_port("metrics_port", settings.metrics_host, settings.metrics_port, remedy)


def _check_direct_port(settings: AppSettings, host: str, port: int) -> None:
    del host, port
    if settings.direct_port is not None:
        check_port("direct_port", settings.direct_host, settings.direct_port, "choose another direct_port")


def _check_keys(settings: AppSettings, host: str, port: int) -> None:
    del host, port
    try:
        names = KeyRing.load(settings.api_keys_file).names
    except ConfigError as error:
        raise ConfigError(f"api_keys_file: {error}; `paceline key NAME --file FILE` makes one") from None
    adaptation = settings.engine.speculative.adaptation
    unknown = sorted(set(adaptation.keys) - names) if adaptation.enabled else []
    if unknown:
        raise ConfigError(
            f"engine.speculative.adaptation.keys: no key has the name {', '.join(unknown)}; the keys of this server "
            f"are {', '.join(sorted(names)) or 'none'}"
        )


def _check_trace_file(settings: AppSettings, host: str, port: int) -> None:
    del host, port
    if settings.trace_file is None:
        return
    path = Path(settings.trace_file).expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise ConfigError(f"trace_file: {path}: {error.strerror}; choose another file") from None


def _check_cache(settings: AppSettings, host: str, port: int) -> None:
    del host, port
    check_cache()
    needed = embedded_bytes_needed() if settings.engine.model == EMBEDDED else 0
    free = shutil.disk_usage(cache_folder()).free
    if free < needed:
        raise ConfigError(
            f"cache: {cache_folder()} has {_size(free)} free, the default model needs {_size(needed)}; free some space "
            "there, or set PACELINE_CACHE to another folder"
        )


def _check_device(settings: AppSettings, host: str, port: int) -> None:
    del host, port
    engine = settings.engine
    if engine.device != "cuda":
        return
    found = len(machine.gpus())
    build = machine.torch_build()
    if found < engine.tensor_parallel_size:
        raise ConfigError(
            f"device: cuda with {engine.tensor_parallel_size} shards given, this machine shows {found} NVIDIA GPUs; "
            "use --device cpu, or fewer shards with --tp"
        )
    if build is not None and build.cuda is None:
        raise ConfigError(
            f"device: cuda given, but torch {build.version} is a CPU build; install the build for CUDA, or use "
            "--device cpu"
        )


def _check_shared_memory(settings: AppSettings, host: str, port: int) -> None:
    del host, port
    check_shared_memory(settings.engine, machine.SHARED_MEMORY, TEMPORARY)


def check_shared_memory(engine: EngineConfig, shared: Path, temporary: Path) -> None:
    """Whether Ray's object store and NCCL find room.

    Ray puts its object store into the temporary folder where shared memory is too small. NCCL has no other place.

    Raises:
        ConfigError: they do not.
    """
    free = shutil.disk_usage(shared).free if shared.is_dir() else 0
    spare = shutil.disk_usage(temporary).free
    num_shards = engine.tensor_parallel_size
    remedy = "give the container more, such as docker run --shm-size=1g"
    if engine.device == "cuda" and num_shards > 1 and free < num_shards * NCCL_BYTES_PER_SHARD:
        raise ConfigError(
            f"shared memory: {shared} has {_size(free)} free, NCCL needs {_size(num_shards * NCCL_BYTES_PER_SHARD)} "
            f"for {num_shards} GPUs; {remedy}"
        )
    needed = TEMPORARY_BYTES + (OBJECT_STORE_BYTES if free < OBJECT_STORE_BYTES else 0)
    if spare < needed:
        raise ConfigError(
            f"disk: {temporary} has {_size(spare)} free, Ray needs {_size(needed)} there; free some space there"
            + (f", or {remedy}" if free < OBJECT_STORE_BYTES else "")
        )


CHECKS: dict[str, Check] = {
    "HTTP port": _check_http_port,
    "metrics port": _check_metrics_port,
    "direct port": _check_direct_port,
    "API keys": _check_keys,
    "trace file": _check_trace_file,
    "cache": _check_cache,
    "device": _check_device,
    "shared memory": _check_shared_memory,
}
"""Every check by the name that `paceline doctor` shows."""


def check_memory(settings: AppSettings, folder: Path, draft_folder: Path | None, *, free_bytes: int) -> None:
    """Whether the plan fits into main memory. Weights on a GPU are the shard's own check.

    Raises:
        ConfigError: it does not, with what takes how much.
    """
    weights, cache = model_bytes(settings.engine, folder)
    draft = weight_bytes(draft_folder, ModelConfig.load(draft_folder)) if draft_folder is not None else 0
    lora = settings.engine.lora
    adapters = 4 * num_adapter_values(lora, ModelConfig.load(folder)) if lora is not None else 0  # float32 on a CPU
    if settings.engine.device == "cuda":
        weights = cache = draft = adapters = 0
    processes = PROCESS_BYTES + settings.engine.tensor_parallel_size * SHARD_BYTES
    needed = settings.num_replicas * (weights + cache + draft + adapters + processes)
    if needed > free_bytes:
        raise ConfigError(
            f"memory: {_size(free_bytes)} are free, the plan needs about {_size(needed)} (weights {_size(weights)}, KV "
            f"cache {_size(cache)}, draft {_size(draft)}, adapters {_size(adapters)}, processes {_size(processes)}, "
            f"replicas {settings.num_replicas}); use a smaller model, fewer replicas or a smaller kv_cache_tokens"
        )


def adaptation_line(settings: AppSettings) -> str | None:
    """Whose requests the draft learns from; None if it does not learn."""
    adaptation = settings.engine.speculative.adaptation
    if not adaptation.enabled:
        return None
    if not has_keys(settings):
        return "Online adaptation is on: the draft learns from every request, unless it says learn: false"
    whose = ", ".join(adaptation.keys) or "nobody, because adaptation.keys is empty"
    return f"Online adaptation is on: the draft learns from the requests of {whose}"


def adapter_lines(engine: EngineConfig, folder: Path) -> list[str]:
    """One line per adapter of the settings.

    Raises:
        ConfigError: an adapter cannot be read or does not fit the model.
    """
    if engine.lora is None:
        return []
    lines = []
    for name, given in engine.lora.adapters.items():
        try:
            spec = read_adapter(Path(given).expanduser(), ModelConfig.load(folder), max_rank=engine.lora.max_lora_rank)
        except ConfigError as error:
            raise ConfigError(f"engine.lora.adapters.{name}: {error}") from None
        lines.append(f"Adapter: {name}, rank up to {spec.rank}, {len(spec.modules)} layers")
    return lines
