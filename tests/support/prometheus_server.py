"""A real Prometheus on loopback for one test: the shipped configuration with a faster scrape, and its query API.

Owns the process and its folder. `panel_exprs` are the queries of every panel with the template variables filled in as
Grafana does for "All".
"""

from __future__ import annotations

import math
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from dashboards import render
from engine.metrics.labels import COMMON_LABELS

LISTED = "http://127.0.0.1:8000/metrics/targets"
"""URL of the list of targets in the shipped configuration."""


def installed() -> bool:
    """Whether the `prometheus` command is installed."""
    return shutil.which("prometheus") is not None


def panel_exprs(window: str) -> list[tuple[str, str]]:
    """(board and panel, expression) of every query of every panel."""
    exprs = []
    for board in render.boards():
        for panel in board.panels:
            for query in panel.queries:
                expr = query.expr.replace(render.WINDOW, window)
                for label in COMMON_LABELS:
                    expr = expr.replace(f"${label}", ".*")
                exprs.append((f"{board.name}: {panel.title}", expr))
    return exprs


def is_empty(values: Mapping[Any, float]) -> bool:
    """Whether a panel would be empty: no series, or no finite value in any."""
    return all(math.isnan(value) for value in values.values())


class Prometheus:
    """Queries to a running server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **params: str) -> Any:
        """`data` of an API response."""
        response = httpx.get(f"{self.url}/api/v1/{path}", params=params, timeout=10)
        body = response.json()
        assert body["status"] == "success", body
        return body["data"]

    def values(self, expr: str) -> dict[tuple[tuple[str, str], ...], float]:
        """Value of each series, by its sorted labels."""
        found = self.get("query", query=expr)["result"]
        return {tuple(sorted(series["metric"].items())): float(series["value"][1]) for series in found}

    def empty_panels(self, window: str) -> list[tuple[str, str]]:
        """Entries of `panel_exprs` that would be empty."""
        return [(panel, expr) for panel, expr in panel_exprs(window) if is_empty(self.values(expr))]

    def wait(self, what: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Wait until `what` holds.

        Raises:
            TimeoutError: it did not.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                if what():
                    return
            except (httpx.TransportError, ValueError):
                pass  # not listening yet
            time.sleep(0.25)
        raise TimeoutError(f"Prometheus at {self.url}: not within {timeout_s} s")


@contextmanager
def running(folder: Path, targets: str) -> Iterator[Prometheus]:
    """Start Prometheus with its data in `folder`, and stop it at the end.

    Args:
        folder: for data and configuration.
        targets: URL of the list of targets.
    """
    shutil.copy(render.PACKAGE / "rules.yaml", folder)
    config = (render.PACKAGE / "prometheus.yml").read_text()
    config = config.replace(LISTED, targets).replace("/etc/prometheus", str(folder))
    config = config.replace("scrape_interval: 5s", "scrape_interval: 1s").replace("interval: 15s", "interval: 1s")
    (folder / "prometheus.yml").write_text(config)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            server = Prometheus(f"http://127.0.0.1:{port}")
            server.wait(lambda: httpx.get(f"{server.url}/-/ready", timeout=2).is_success)
            yield server
        finally:
            process.terminate()
            process.wait(timeout=30)
