"""Real servers for the end-to-end tests: `paceline serve` as a user starts it, stopped with the signal a user sends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from deployments.local.ports import free_port

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 40.0


@dataclass
class Server:
    """A running `paceline serve`."""

    process: subprocess.Popen[str]
    url: str
    log: Path
    seen: set[psutil.Process] = field(default_factory=set)

    def processes(self) -> list[psutil.Process]:
        """All descendants of the server now. They are recorded for the check after `stop`."""
        now = psutil.Process(self.process.pid).children(recursive=True)
        self.seen.update(now)
        return now

    def actor(self, name: str) -> psutil.Process:
        """The process of an actor class, by its title, which starts with ray::."""
        (found,) = [p for p in self.processes() if p.cmdline() and p.cmdline()[0].startswith(f"ray::{name}")]
        return found

    def stop(self) -> list[psutil.Process]:
        """Send SIGINT as Ctrl-C does. Returns the processes that are still alive afterwards."""
        self.processes()
        self.process.send_signal(signal.SIGINT)
        self.process.wait(STOP_TIMEOUT_S)
        _, alive = psutil.wait_procs(list(self.seen), timeout=1.0)
        return alive


@contextlib.contextmanager
def serving(log: Path, *options: str, env: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Start a server with these options and additional environment variables, and wait until it serves."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("paceline")), "serve", "--port", str(port), *options]
    with log.open("w") as out:
        variables = os.environ | {"COLUMNS": "200"} | (env or {})
        process = subprocess.Popen(command, stdout=out, stderr=out, text=True, env=variables)
    server = Server(process, f"http://127.0.0.1:{port}", log)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while "Serving" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield server
    finally:
        if process.poll() is None:
            left = server.stop()
            assert not left, f"still running after Ctrl-C: {left}"
