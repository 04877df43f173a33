"""`paceline serve`: a model served on this machine, from nothing to a healthy URL, until Ctrl-C.

Owns the order of starting (checks, model, Ray, deployment, health), what is printed, and that everything started here
is stopped. Imports neither torch nor Ray: this process only waits.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
from rich.console import Console
from rich.markup import escape

from deployments.cluster.drafts import resolve_draft
from deployments.cluster.placement import most_cpus
from deployments.http.keys import has_keys
from deployments.local import machine, preflight, yaml_config
from deployments.local.doctor import startup_lines
from deployments.local.ports import LOOPBACK, free_port
from deployments.local.ray_head import APPLICATIONS, LocalRay
from deployments.local.weights import cache_line, weights_line
from deployments.monitoring.discovery import clear_dead, targets_folder
from deployments.settings import AppSettings
from engine.adaptation.supported import check_adaptable
from engine.checkpoint.draft_check import check_draft
from engine.checkpoint.store import resolve_model
from engine.errors import ConfigError, EngineUnavailable

WILDCARDS = ("0.0.0.0", "::")
ASK_PERIOD_S = 1.0
"""Seconds between two questions to Serve whether the deployment has failed; each one costs Serve time."""
SPARE_CPUS = 2
"""Logical CPUs for Serve's own tasks, in addition to the replica's."""


class _Stopped(Exception):
    """SIGINT arrived, or a second SIGTERM."""


def serve(values: dict[str, Any], *, start_timeout_s: float) -> int:
    """Serve what a checked deployment file says, until SIGINT (at once) or SIGTERM (after the requests that run).

    Args:
        values: the file's content, with one application.
        start_timeout_s: from deploying to healthy.

    Returns:
        Exit status.

    Raises:
        ConfigError: this machine cannot serve it, or its model does not exist; nothing was started.
        EngineUnavailable: Ray or the deployment failed, or ended by itself.
    """
    console = Console(stderr=True)
    yaml_config.only_application(values)
    (settings,) = yaml_config.check(values)
    host, port = yaml_config.http_address(values)
    preflight.check_machine(settings, host, port)
    values = yaml_config.past_proxy(values, proxy_host=LOOPBACK, proxy_port=free_port())
    signal.signal(signal.SIGINT, _raise_stopped)
    signal.signal(signal.SIGTERM, _raise_draining)
    try:
        _prepare(settings, console)
        with console.status("Starting Ray"):
            ray = LocalRay(num_cpus=SPARE_CPUS + settings.most_replicas * math.ceil(most_cpus(settings))).__enter__()
        with contextlib.closing(_Closing(ray, console, targets_folder(settings.metrics_dir))):
            base = f"http://{LOOPBACK if host in WILDCARDS else host}:{port}"
            with console.status("Deploying"):
                ray.put_applications(values)
                _wait_until_healthy(ray, base, start_timeout_s)
            _print_hello(base, settings.served_name, needs_key=has_keys(settings))
            try:
                while ray.is_running:
                    time.sleep(0.5)
            except _Draining:
                console.print(f"Draining; requests that run have {settings.drain_timeout_s:g} s. Ctrl-C stops at once.")
                drain(ray, values, base, settings)
                return 0
            raise EngineUnavailable(f"Ray ended by itself:\n{ray.log_tail()}")
    except (_Stopped, _Draining):
        return 0


def _prepare(settings: AppSettings, console: Console) -> None:
    """Find, fetch or convert the model and its draft, and check that they fit together and into memory."""
    console.print(f"Model [bold]{escape(settings.engine.model)}[/bold]")
    for line in startup_lines(settings.engine):
        console.print(line, markup=False, highlight=False)
    if (cache := cache_line(settings.engine)) is not None:
        console.print(cache, markup=False, highlight=False)
    folder = resolve_model(settings.engine.model)
    if (weights := weights_line(settings.engine, folder)) is not None:
        console.print(weights, markup=False, highlight=False)
    for line in preflight.adapter_lines(settings.engine, folder):
        console.print(line, markup=False, highlight=False)
    if (adaptation := preflight.adaptation_line(settings)) is not None:
        console.print(adaptation, markup=False, highlight=False)
    draft, draft_folder = settings.engine.speculative.draft, None
    if draft is not None:
        try:
            draft_folder = resolve_draft(draft, progress=True)
            check_adaptable(settings.engine, check_draft(draft_folder, folder))
        except ConfigError as error:
            raise ConfigError(f"speculative.draft: {error}") from None
    preflight.check_memory(settings, folder, draft_folder, free_bytes=machine.free_memory())


def drain(ray: LocalRay, values: dict[str, Any], base: str, settings: AppSettings) -> None:
    """Refuse new requests with 503 and Retry-After, and wait for those that run, at most until the drain timeout."""
    deadline = time.monotonic() + settings.drain_timeout_s
    ray.put_applications(yaml_config.with_user_config(values, accepts_requests=False))
    while time.monotonic() < deadline and ray.is_running:
        with contextlib.suppress(httpx.HTTPError, ValueError):
            if httpx.get(f"{base}/health", timeout=2.0).json()["status"] == "drained":
                break
        time.sleep(0.2)
    if settings.most_replicas > 1:  # /health answered for one of them; Serve waits for each
        ray.delete_applications(max(0.0, deadline - time.monotonic()))


class _Closing:
    """Stops Ray and says so; further signals do not interrupt it."""

    def __init__(self, ray: LocalRay, console: Console, targets: Path) -> None:
        self._ray = ray
        self._console = console
        self._targets = targets

    def close(self) -> None:
        _ignore_signals()
        with self._console.status("Stopping"):
            self._ray.stop()
        clear_dead(self._targets)  # replicas that were killed could not remove theirs
        self._console.print("Stopped.")


class _Draining(Exception):
    """SIGTERM arrived."""


def _raise_draining(number: int, frame: FrameType | None) -> None:
    del number, frame
    signal.signal(signal.SIGTERM, _raise_stopped)
    raise _Draining


def _raise_stopped(number: int, frame: FrameType | None) -> None:
    del number, frame
    _ignore_signals()  # One that arrived together with this would end the stop before it has begun.
    raise _Stopped


def _ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _ignored)


def _ignored(number: int, frame: FrameType | None) -> None:
    """A handler, because Python complains of a signal that arrived before it was set to be ignored."""
    del number, frame


def _wait_until_healthy(ray: LocalRay, base: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    ask_s = time.monotonic() + ASK_PERIOD_S
    with httpx.Client(timeout=2.0) as client:
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                if client.get(f"{base}/health").is_success:
                    return
            if not ray.is_running:
                raise EngineUnavailable(f"Ray ended by itself:\n{ray.log_tail()}")
            if time.monotonic() >= ask_s:
                failed = _deploy_failure(ray)
                if failed is not None:
                    raise EngineUnavailable(f"the deployment failed:\n{failed}")
                ask_s = time.monotonic() + ASK_PERIOD_S
            time.sleep(0.1)
    raise EngineUnavailable(f"not healthy within {timeout_s:.0f} s; Ray's logs are under {ray.folder}")


def _deploy_failure(ray: LocalRay) -> str | None:
    """Why Serve gave up; None while it has not."""
    try:
        response = ray.http.get(f"{ray.dashboard_url}{APPLICATIONS}", timeout=5.0)
        applications = response.json().get("applications", {})
    except (httpx.HTTPError, ValueError):
        return None
    for app in applications.values():
        messages = [app.get("message", "")] + [d.get("message", "") for d in app.get("deployments", {}).values()]
        broken = any(d.get("status") in ("UNHEALTHY", "DEPLOY_FAILED") for d in app.get("deployments", {}).values())
        if app.get("status") == "DEPLOY_FAILED" or broken:
            return "\n".join(summarize(message) for message in messages if message)
    return None


def summarize(message: str) -> str:
    """A message of Serve; of one that holds a traceback only the error itself, which is its last line."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    has_traceback = any(line.startswith(("Traceback", 'File "')) for line in lines)
    return lines[-1] if has_traceback else "\n".join(lines)


def _print_hello(base: str, model: str, *, needs_key: bool) -> None:
    """The URL, a curl line and two lines of Python, on stdout."""
    messages = '[{"role": "user", "content": "What is the capital of France?"}]'
    body = f'{{"model": "{model}", "messages": {messages}, "temperature": 0}}'
    print(f"\nServing {model} at {base}/v1 (Ctrl-C stops it)\n")
    header = " -H 'Authorization: Bearer YOUR_KEY'" if needs_key else ""
    print(f"  curl {base}/v1/chat/completions -H 'Content-Type: application/json'{header} -d '{body}'\n")
    print(f'  client = openai.OpenAI(base_url="{base}/v1", api_key="{"YOUR_KEY" if needs_key else "none"}")')
    create = f'client.chat.completions.create(model="{model}", messages={messages}, temperature=0)'
    print(f"  print({create}.choices[0].message.content)\n", flush=True)
