"""A private Ray head on loopback: started for one server, stopped with everything it started and nothing else.

Owns the head's process, its folder, ports and token. Never touches another Ray on the machine: it has its own ports and
temporary folder, and stops processes by the ids of those that descend from the one started here.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil

from deployments.local.ports import LOOPBACK, free_ports
from engine.errors import EngineUnavailable

APPLICATIONS = "/api/serve/applications/"
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 10.0
PUT_TRIES = 4
START_TRIES = 2
"""A port that was free may be taken before Ray listens on it; the second try uses others."""
GCS_PORT, DASHBOARD_PORT = 6379, 8265
"""Ray's usual ports, used where nobody listens there."""
TEMPORARY = Path("/tmp")
"""Ray's folder is made here: paths of unix sockets below it must stay short."""
OBJECT_STORE_BYTES = 100 << 20
"""Size of Ray's object store, close to the smallest that Ray accepts: nothing large is sent through it."""


class LocalRay:
    """A context manager around a Ray head.

    Args:
        num_cpus: logical CPUs that it offers. They are only counted for placement and may exceed the machine's.
        choose_ports: returns a free port for each one that is preferred; 0 is any.
    """

    def __init__(self, *, num_cpus: int, choose_ports: Callable[..., list[int]] = free_ports) -> None:
        self._num_cpus = num_cpus
        self._choose_ports = choose_ports
        self._process: subprocess.Popen[bytes] | None = None
        self.folder = Path(tempfile.mkdtemp(prefix="paceline-", dir=TEMPORARY))
        self.port, self.dashboard_port = GCS_PORT, DASHBOARD_PORT
        token_file = self.folder / "token"
        token_file.touch(mode=0o600)
        token_file.write_text(secrets.token_hex(32))
        # One client for all calls: each new one reads the certificates of the machine.
        self.http = httpx.Client(headers={"Authorization": f"Bearer {token_file.read_text()}"})
        """Client for the dashboard, with its authorization."""
        self._env = os.environ | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token_file),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # this is the only node: work cannot move to another
            "RAY_DISABLE_IMPORT_WARNING": "1",
            "RAY_worker_niceness": "0",  # by default Ray lowers the priority of its workers
            "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.3",  # each turn costs 2 ms of CPU
            # Ray's metrics about itself; Paceline exports metrics without them. Together 1.4 % of a core.
            "RAY_event_stats": "0",
            "RAY_enable_metrics_collection": "0",
            "RAY_task_events_report_interval_ms": "0",
        }

    @property
    def dashboard_url(self) -> str:
        return f"http://{LOOPBACK}:{self.dashboard_port}"

    @property
    def env(self) -> dict[str, str]:
        """Environment of processes that use this head."""
        return self._env | {"RAY_ADDRESS": f"{LOOPBACK}:{self.port}"}

    def __enter__(self) -> LocalRay:
        try:
            for tries_left in reversed(range(START_TRIES)):
                self._launch()
                if self._wait_for_dashboard():
                    return self
                if tries_left == 0 or self.is_running:
                    raise EngineUnavailable(f"Ray did not start:\n{self.log_tail()}")
        except BaseException:
            self.stop()
            raise
        return self

    def _launch(self) -> None:
        self.port, self.dashboard_port, *others = self._choose_ports(GCS_PORT, DASHBOARD_PORT, *[0] * 5)
        options = ("dashboard-agent-listen", "dashboard-agent-grpc", "runtime-env-agent", "metrics-export")
        names = [f"--{option}-port" for option in (*options, "ray-client-server")]
        ports = {"--port": self.port, "--dashboard-port": self.dashboard_port} | dict(zip(names, others, strict=True))
        command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--disable-usage-stats"]
        command += ["--include-log-monitor", "false", "--no-monitor"]  # for drivers that print, for clusters that grow
        command += ["--include-dashboard", "true"]  # without it the head would run on where the dashboard has failed
        command += ["--node-ip-address", LOOPBACK, "--dashboard-host", LOOPBACK, "--temp-dir", str(self.folder / "ray")]
        command += ["--num-cpus", str(self._num_cpus), "--object-store-memory", str(OBJECT_STORE_BYTES)]
        command += [part for name, port in ports.items() for part in (name, str(port))]
        with (self.folder / "head.log").open("wb") as log:
            # A process session of its own: Ctrl-C in the terminal reaches only this process, which stops it in order.
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self.env, start_new_session=True
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def put_applications(self, values: dict[str, Any]) -> None:
        """Hand a deployment file's content to Serve; returns before it is deployed.

        Raises:
            EngineUnavailable: Serve refuses it, or the dashboard does not respond.
        """
        for tries_left in reversed(range(PUT_TRIES)):
            try:
                response = self.http.put(f"{self.dashboard_url}{APPLICATIONS}", json=values, timeout=120.0)
                break
            except httpx.HTTPError as error:  # the first one starts Serve, which a busy machine may not do in time
                if tries_left == 0 or not self.is_running:
                    raise EngineUnavailable(f"the Ray dashboard does not respond: {error}\n{self.log_tail()}") from None
                time.sleep(1.0)
        if not response.is_success:
            raise EngineUnavailable(f"Serve refused the deployment: {response.text[-2000:]}")

    def delete_applications(self, timeout_s: float) -> None:
        """Have Serve stop every application, each replica after the requests that it runs; waits for that."""
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(httpx.HTTPError):
            self.http.delete(f"{self.dashboard_url}{APPLICATIONS}", timeout=10.0)
            while time.monotonic() < deadline and self.is_running:
                response = self.http.get(f"{self.dashboard_url}{APPLICATIONS}", timeout=5.0)
                if not response.json().get("applications"):
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
        self.http.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _wait_for_dashboard(self) -> bool:
        """Whether the head answers; False once it has ended or the time is over."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self.is_running:
            with contextlib.suppress(httpx.HTTPError):
                if self.http.get(f"{self.dashboard_url}/api/version", timeout=2.0).is_success:
                    return True
            time.sleep(0.1)
        return False


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _end(processes: list[psutil.Process]) -> None:
    """Wait for these to end; kill those that do not. psutil compares start times, so a reused id is safe."""
    _, alive = psutil.wait_procs(processes, timeout=STOP_TIMEOUT_S)
    late = {child for process in alive for child in _descendants(process.pid)} | set(alive)
    for process in late:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(list(late), timeout=STOP_TIMEOUT_S)
