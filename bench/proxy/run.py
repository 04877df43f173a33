"""`bench proxy`: CPU time per token behind Serve's proxy and on the replica's direct port, paired in one run.

Owns the deployment with both entries, the turns that they take, and the attribution of CPU time to processes. One
replica serves both, so the engine's work is the same. CPU time is what the kernel charged to each process, so other
work on the machine disturbs it little.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import psutil
import yaml
from rich.console import Console
from rich.table import Table

from bench.load.meter import Meter
from bench.load.servers import Server, paceline
from bench.load.streams import Streams
from bench.load.workload import built_in
from deployments.local import yaml_config
from deployments.local.ports import LOOPBACK, free_port
from deployments.monitoring.discovery import FOLDER_ENV

ENTRIES = ("proxy", "direct")
ENGINE, REPLICA, PROXY, CLIENT, REST = "engine", "replica", "proxy", "load generator", "Ray, Serve, controller"
ROLES = (REPLICA, PROXY, CLIENT, REST, ENGINE)
"""The engine last: its work per token is no part of the way to the replica."""
TITLES = {"ShardActor": ENGINE, "DraftActor": ENGINE, "ServeReplica": REPLICA, "ProxyActor": PROXY}
"""Roles by a part of the process title. HAProxy's own processes count as the proxy."""
SETTLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Reading:
    """What one turn of an entry cost."""

    tokens: float
    """Emitted tokens."""
    cpu_s: Mapping[str, float]
    """CPU seconds by role."""

    def per_token_us(self, role: str) -> float:
        """Microseconds of CPU per token."""
        return self.cpu_s.get(role, 0.0) / self.tokens * 1e6


def proxy(options: argparse.Namespace) -> int:
    """Run `bench proxy`; returns the exit status."""
    readings = asyncio.run(_measure(options))
    console = Console()
    for streams, by_entry in readings.items():
        console.print(table(streams, by_entry))
    if options.out is not None:
        lines = [
            {"streams": streams, "entry": entry, "role": role, "us_per_token": per_token_us(turns, role)}
            for streams, by_entry in readings.items()
            for entry, turns in by_entry.items()
            for role in ROLES
        ]
        options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 0


def per_token_us(turns: list[Reading], role: str) -> float:
    """Median over the turns of an entry, in microseconds."""
    return median(turn.per_token_us(role) for turn in turns)


def table(streams: int, by_entry: Mapping[str, list[Reading]]) -> Table:
    """The figures of one number of streams."""
    made = Table(title=f"CPU time per token at {streams} streams, us")
    for name in ("process", *by_entry):
        made.add_column(name, justify="left" if name == "process" else "right")
    for role in ROLES:
        made.add_row(role, *(f"{per_token_us(turns, role):.0f}" for turns in by_entry.values()))
    totals = [sum(per_token_us(turns, role) for role in ROLES) for turns in by_entry.values()]
    made.add_row("all", *(f"{total:.0f}" for total in totals))
    made.add_row("over direct", *(f"{total / totals[-1]:.2f}" for total in totals))
    return made


async def _measure(options: argparse.Namespace) -> dict[int, dict[str, list[Reading]]]:
    with _both_entries(options.haproxy) as (servers, targets):
        readings: dict[int, dict[str, list[Reading]]] = {}
        async with Meter(targets) as meter:
            for streams in options.streams:
                found: dict[str, list[Reading]] = {entry: [] for entry in ENTRIES}
                readings[streams] = found
                for turn in range(options.rounds):
                    for entry in ENTRIES if turn % 2 == 0 else reversed(ENTRIES):
                        found[entry].append(await _turn(servers[entry], meter, streams, options))
        return readings


async def _turn(server: Server, meter: Meter, streams: int, options: argparse.Namespace) -> Reading:
    async with Streams(server, built_in()["chat"], max_tokens=options.max_tokens) as load:
        await load.resize(streams)
        await asyncio.sleep(SETTLE_S)
        before = cpu_by_role()
        window = await meter.over(options.seconds)
        after = cpu_by_role()
        if load.errors:
            raise RuntimeError(f"the load failed: {load.errors[0]}")
    return Reading(window.tokens, {role: after[role] - before.get(role, 0.0) for role in after})


def cpu_by_role() -> dict[str, float]:
    """CPU seconds so far of this process and of all that descend from it, by role."""
    found: defaultdict[str, float] = defaultdict(float)
    own = psutil.Process()
    found[CLIENT] = _cpu_s(own)
    for process in own.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found[role_of(process.cmdline())] += _cpu_s(process)
    return found


def role_of(command: list[str]) -> str:
    """The role of a process by its command line."""
    if command and "haproxy" in command[0]:
        return PROXY
    title = command[0] if command and command[0].startswith("ray::") else ""
    return next((role for part, role in TITLES.items() if part in title), REST)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextlib.contextmanager
def _both_entries(haproxy: bool) -> Iterator[tuple[dict[str, Server], Path]]:
    """A server without drafts that listens behind the proxy and directly: both by entry, and its metrics folder."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        folder, port = Path(name), free_port()
        (targets := folder / "targets").mkdir()
        values = yaml_config.load(yaml_config.DEFAULT_FILE)
        values["applications"][0]["args"] |= {"direct_port": port}
        (config := folder / "both.yaml").write_text(yaml.safe_dump(values))
        env = {FOLDER_ENV: str(targets)} | ({"RAY_SERVE_ENABLE_HA_PROXY": "1"} if haproxy else {})
        with paceline(["--config", str(config), "--draft", "none"], env=env) as server:
            yield {"proxy": server, "direct": replace(server, url=f"http://{LOOPBACK}:{port}/v1")}, targets
