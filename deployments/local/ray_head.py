"""A Ray head of our own on loopback: started for one server, stopped with everything it started and nothing else.

Owns the head's process, its folder, ports and token. Never touches another Ray on the machine: own ports, own temp
folder, and stopping goes by the ids of the processes that descend from the one started here.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil

from engine.errors import EngineUnavailable

LOOPBACK = "127.0.0.1"
APPLICATIONS = "/api/serve/applications/"
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 10.0
PUT_TRIES = 4
OBJECT_STORE_BYTES = 100 << 20
"""Ray's smallest comfortable store: nothing large ever goes through it."""


def free_port(preferred: int = 0) -> int:
    """`preferred` if nobody listens there, else any free port on loopback."""
    for port in (preferred, 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((LOOPBACK, port))
            return int(probe.getsockname()[1])
    raise EngineUnavailable("no free port on loopback")


class LocalRay:
    """A context manager around a Ray head.

    Args:
        num_cpus: logical CPUs it offers; more than the machine has is fine, placement only counts.
    """

    def __init__(self, *, num_cpus: int) -> None:
        self._num_cpus = num_cpus
        self._process: subprocess.Popen[bytes] | None = None
        self.folder = Path(tempfile.mkdtemp(prefix="paceline-", dir="/tmp"))  # short: unix sockets live below it
        self.port = free_port(6379)
        self.dashboard_port = free_port(8265)
        token_file = self.folder / "token"
        token_file.touch(mode=0o600)
        token_file.write_text(secrets.token_hex(32))
        self.env = os.environ | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token_file),
            "RAY_ADDRESS": f"{LOOPBACK}:{self.port}",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # nothing to drain to: this is the only node
            "RAY_DISABLE_IMPORT_WARNING": "1",
            "RAY_worker_niceness": "0",  # Ray would let everything else on the machine go before the server
            "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.3",  # each turn costs 2 ms of CPU
            # Ray's accounts of itself; Paceline's metrics are its own. Together 1.4 % of a core.
            "RAY_event_stats": "0",
            "RAY_enable_metrics_collection": "0",
            "RAY_task_events_report_interval_ms": "0",
        }

    @property
    def dashboard_url(self) -> str:
        return f"http://{LOOPBACK}:{self.dashboard_port}"

    @property
    def headers(self) -> dict[str, str]:
        """What the dashboard's HTTP interface wants to see."""
        token = (self.folder / "token").read_text()
        return {"Authorization": f"Bearer {token}"}

    def __enter__(self) -> LocalRay:
        ray_command = Path(sys.executable).with_name("ray")
        ports = {
            "--port": self.port,
            "--dashboard-port": self.dashboard_port,
            "--dashboard-agent-listen-port": free_port(),
            "--dashboard-agent-grpc-port": free_port(),
            "--runtime-env-agent-port": free_port(),
            "--metrics-export-port": free_port(),
            "--ray-client-server-port": free_port(),
        }
        command = [str(ray_command), "start", "--head", "--block", "--disable-usage-stats"]
        command += ["--include-log-monitor", "false", "--no-monitor"]  # for drivers that print, for clusters that grow
        command += ["--node-ip-address", LOOPBACK, "--dashboard-host", LOOPBACK, "--temp-dir", str(self.folder / "ray")]
        command += ["--num-cpus", str(self._num_cpus), "--object-store-memory", str(OBJECT_STORE_BYTES)]
        command += [part for name, port in ports.items() for part in (name, str(port))]
        with (self.folder / "head.log").open("wb") as log:
            # A session of its own, so that Ctrl-C in the terminal reaches us alone and we stop it in order.
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self.env, start_new_session=True
            )
        try:
            self._wait_for_dashboard()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def put_applications(self, values: dict[str, Any]) -> None:
        """Hand a deployment file's content to Serve; returns before it is in force.

        Raises:
            EngineUnavailable: Serve does not take it.
        """
        for tries_left in reversed(range(PUT_TRIES)):
            try:
                answer = httpx.put(
                    f"{self.dashboard_url}{APPLICATIONS}", json=values, headers=self.headers, timeout=120.0
                )
                break
            except httpx.HTTPError as error:  # the first one starts Serve, which a busy machine may not do in time
                if tries_left == 0 or not self.is_running:
                    raise EngineUnavailable(f"the Ray dashboard does not answer: {error}\n{self.log_tail()}") from None
                time.sleep(1.0)
        if not answer.is_success:
            raise EngineUnavailable(f"Serve refused the deployment: {answer.text[-2000:]}")

    def delete_applications(self, timeout_s: float) -> None:
        """Have Serve stop every application, each replica after what it is answering; waits for that."""
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(httpx.HTTPError):
            httpx.delete(f"{self.dashboard_url}{APPLICATIONS}", headers=self.headers, timeout=10.0)
            while time.monotonic() < deadline and self.is_running:
                answer = httpx.get(f"{self.dashboard_url}{APPLICATIONS}", headers=self.headers, timeout=5.0)
                if not answer.json().get("applications"):
                    return
                time.sleep(0.2)

    def log_tail(self, num_lines: int = 15) -> str:
        """The end of the head's output, for error messages."""
        lines = (self.folder / "head.log").read_text(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])

    def stop(self) -> None:
        """Stop the head and all that descends from it. Idempotent."""
        if self._process is not None:
            started = _descendants(self._process.pid)
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
            _end(started)
            self._process.wait()
            self._process = None
        shutil.rmtree(self.folder, ignore_errors=True)

    def _wait_for_dashboard(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if not self.is_running:
                break
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.dashboard_url}/api/version", headers=self.headers, timeout=2.0).is_success:
                    return
            time.sleep(0.2)
        raise EngineUnavailable(f"Ray did not start:\n{self.log_tail()}")


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _end(processes: list[psutil.Process]) -> None:
    """Wait for these to end; kill those that do not. psutil compares start times, so a reused id is never hit."""
    _, alive = psutil.wait_procs(processes, timeout=STOP_TIMEOUT_S)
    late = {child for process in alive for child in _descendants(process.pid)} | set(alive)
    for process in late:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(list(late), timeout=STOP_TIMEOUT_S)
