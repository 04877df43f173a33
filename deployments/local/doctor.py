"""What this machine gives to a server, finding by finding, and the two lines of it that `paceline serve` prints.

Owns the findings and their remedies. A finding fails only where serving cannot work; a note says what would be faster.
Imports neither torch nor Ray.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from deployments.local import machine
from deployments.local.ports import LOOPBACK, free_ports
from deployments.local.preflight import CHECKS
from deployments.local.ray_head import DASHBOARD_PORT, GCS_PORT, OBJECT_STORE_BYTES
from deployments.local.weights import native_problem
from deployments.local.yaml_config import http_address, only_application
from deployments.settings import AppSettings
from engine.checkpoint.store import cache_folder
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.threads import threads_per_shard, usable_cpus

OPEN_FILES = 4096
"""File descriptors that Ray, one replica and a few hundred connections take."""
RAY_PYTHONS = ((3, 11), (3, 14))
"""Oldest and newest Python that Paceline, Ray and torch support."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `paceline doctor`."""

    name: str
    value: str
    status: Literal["ok", "note", "fail"] = "ok"
    remedy: str = ""
    """What makes it better; empty where nothing needs to."""


def examine(values: dict[str, Any]) -> list[Finding]:
    """All findings for a checked deployment file with one application."""
    settings = AppSettings.parse(only_application(values).get("args") or {})
    host, port = http_address(values)
    findings = [_python(), _torch(settings.engine), _gpus(settings.engine), _cpu(), _kernel(settings.engine)]
    findings += [_memory(), _shared_memory(), _open_files(), _ray(), _internal_ports()]
    findings += _checked(settings, host, port)
    return findings


def startup_lines(engine: EngineConfig) -> list[str]:
    """Device and kernel, as `paceline serve` prints them."""
    found = machine.gpus() if engine.device != "cpu" else []
    build = machine.torch_build()
    if len(found) >= engine.tensor_parallel_size and build is not None and build.cuda is not None:
        return [f"Device: cuda, {found[0].name} x {engine.tensor_parallel_size}", "Kernel: torch"]
    why_not = native_problem(engine)
    unused_gpu = f"; {found[0].name} is not used: {_unused_gpu(engine, len(found))}" if found else ""
    return [
        f"Device: cpu, {threads_per_shard(engine)} threads per shard{unused_gpu}",
        "Kernel: native (C++)" if why_not is None else f"Kernel: torch, slower than native: {why_not}",
    ]


def _unused_gpu(engine: EngineConfig, num_gpus: int) -> str:
    if num_gpus < engine.tensor_parallel_size:
        return f"{engine.tensor_parallel_size} shards need as many GPUs"
    return "torch is a CPU build"


def _python() -> Finding:
    oldest, newest = RAY_PYTHONS
    value = f"{platform.python_version()} at {sys.executable}, {platform.system()} on {platform.machine()}"
    if not oldest <= sys.version_info[:2] <= newest:
        remedy = f"use Python {oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}"
        return Finding("Python", value, "fail", remedy)
    return Finding("Python", value)


def _torch(engine: EngineConfig) -> Finding:
    build = machine.torch_build()
    if build is None:
        return Finding("torch", "not installed", "fail", "install Paceline with its dependencies")
    value = f"{build.version}, {f'CUDA {build.cuda}' if build.cuda else 'CPU build'}"
    if build.cuda is None and machine.gpus() and engine.device != "cpu":
        return Finding("torch", value, "note", "a GPU is here: install the CUDA build of torch")
    return Finding("torch", value)


def _gpus(engine: EngineConfig) -> Finding:
    found = machine.gpus()
    if not found:
        return Finding("GPUs", "none (no NVIDIA driver answers)")
    names = ", ".join(f"{gpu.name} {gpu.free_bytes / 1e9:.0f} of {gpu.total_bytes / 1e9:.0f} GB free" for gpu in found)
    few = len(found) < engine.tensor_parallel_size
    remedy = f"tensor_parallel_size {engine.tensor_parallel_size} needs as many GPUs" if few else ""
    return Finding("GPUs", f"{names}; driver {found[0].driver}", "note" if few else "ok", remedy)


def _cpu() -> Finding:
    return Finding("CPU", f"{usable_cpus()} CPUs, {', '.join(machine.instruction_sets()) or 'flags unknown'}")


def _kernel(engine: EngineConfig) -> Finding:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    device, kernel = startup_lines(engine)
    value = f"{device}. {kernel}. Compiler: {compiler or 'none'}"
    has_fallback = engine.kernel != "native"
    if "slower" not in kernel:
        return Finding("kernel", value)
    remedy = "install g++ or clang++" if compiler is None else ""
    return Finding(
        "kernel", value, "note" if has_fallback else "fail", remedy or ("" if has_fallback else "kernel: auto")
    )


def _memory() -> Finding:
    free, speed = machine.free_memory(), machine.memory_bandwidth()
    return Finding("memory", f"{free / 1e9:.1f} GB free, {speed / 1e9:.1f} GB/s read and written by a copy")


def _shared_memory() -> Finding:
    if not machine.SHARED_MEMORY.is_dir():
        return Finding("/dev/shm", "missing", "note", "Ray's object store goes to the temporary folder")
    usage = shutil.disk_usage(machine.SHARED_MEMORY)
    value = f"{usage.free / 1e6:.0f} of {usage.total / 1e6:.0f} MB free"
    if usage.free < OBJECT_STORE_BYTES:
        remedy = "Ray's object store goes to the temporary folder; containers: --shm-size=1g"
        return Finding("/dev/shm", value, "note", remedy)
    return Finding("/dev/shm", value)


def _open_files() -> Finding:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < OPEN_FILES:
        return Finding("open files", f"at most {hard}", "note", f"raise the hard limit to {OPEN_FILES} (ulimit -Hn)")
    return Finding("open files", "no limit" if hard == resource.RLIM_INFINITY else f"at most {hard}")


def _ray() -> Finding:
    pids = machine.ray_processes()
    value = f"runs already (pids {', '.join(map(str, pids))}); it is left alone" if pids else "none runs"
    return Finding("other Ray", value)


def _internal_ports() -> Finding:
    wanted = (GCS_PORT, DASHBOARD_PORT)
    moved = [
        f"{want} is busy, {got} is used" for want, got in zip(wanted, free_ports(*wanted), strict=True) if want != got
    ]
    return Finding("Ray's ports", "; ".join(moved) or f"{GCS_PORT} and {DASHBOARD_PORT} on {LOOPBACK} are free")


def _checked(settings: AppSettings, host: str, port: int) -> Iterator[Finding]:
    """The checks that `paceline serve` makes as well."""
    values = {
        "HTTP port": f"{host}:{port} is free",
        "metrics port": str(settings.metrics_port or "any free one"),
        "direct port": str(settings.direct_port or "none"),
        "API keys": settings.api_keys_file or "no key file",
        "trace file": settings.trace_file or "none",
        "cache": f"{cache_folder()}, {{free}} GB free",
        "device": settings.engine.device,
        "shared memory": "enough",
    }
    for name, check in CHECKS.items():
        try:
            check(settings, host, port)
        except ConfigError as error:
            problem, _, remedy = str(error).partition("; ")
            yield Finding(name, problem, "fail", remedy)
            continue
        value = values[name]
        if name == "cache":
            value = value.format(free=f"{shutil.disk_usage(cache_folder()).free / 1e9:.1f}")
        yield Finding(name, value)
