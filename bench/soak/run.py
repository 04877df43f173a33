"""`paceline bench soak`: mixed load on a real server for minutes while its processes are killed and stopped.

Owns the schedule of faults, the watch over processes, and the verdict: every request accounted for by id, the same text
for the same greedy prompt, and nothing that grows. What clients send is in `bench.soak.load`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console

from bench.load import servers
from bench.soak.load import Outcome, drive
from engine.errors import ConfigError

ROLES = {"replica": "ServeReplica", "target": "ray::ShardActor", "draft": "ray::DraftActor", "controller": "ray::Contr"}
"""What a process's title holds, by the name of a fault."""
FAULTS = tuple(
    f"{kind}-{role}" for role in ROLES for kind in ("kill", "stop") if (kind, role) != ("stop", "controller")
)
SAMPLE_PERIOD_S = 5.0
RECOVERY_TIMEOUT_S = 180.0
MAX_GROWTH = 0.05


@dataclass(frozen=True, slots=True)
class Sample:
    """What one process held at one time."""

    at_s: float
    role: str
    pid: int
    rss_bytes: int
    num_fds: int
    num_shared: int
    """Mapped shared-memory files of ours."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One that was injected."""

    at_s: float
    name: str
    recovery_s: float
    """Until /health was 200 with every process of the role alive and new."""


def soak(options: argparse.Namespace) -> int:
    """Run it; 0 when the verdict is good."""
    unknown = [name for name in options.faults if name not in FAULTS]
    if unknown:
        raise ConfigError(f"--faults: {unknown[0]!r} given; allowed: {', '.join(FAULTS)}")
    console = Console()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        env = {"PACELINE_METRICS_DIR": folder}
        draft = ["--draft", options.draft] if options.draft else []
        with servers.paceline([*draft, "--dtype", "float32", "--tp", str(options.tp)], env=env) as server:
            watch = Watch(server.url.removesuffix("/v1"), Path(folder))
            outcomes, faults = asyncio.run(_run(server, watch, options, rng, console))
            held = watch.held_blocks()
    problems = accept_or_reject(outcomes, watch.samples, held)
    show(outcomes, faults, watch.samples, held, problems, console)
    if options.out is not None:
        record = {
            "outcomes": [asdict(outcome) for outcome in outcomes],
            "faults": [asdict(fault) for fault in faults],
            "samples": [asdict(sample) for sample in watch.samples],
            "held_blocks": held,
            "problems": problems,
        }
        options.out.write_text(json.dumps(record))
    return 1 if problems else 0


class Watch:
    """Looks at the server's processes.

    Args:
        base: the server's URL.
        targets: folder in which its replica announces its metrics.
    """

    def __init__(self, base: str, targets: Path) -> None:
        self.base = base
        self._targets = targets
        self._begin_s = time.monotonic()
        self.samples: list[Sample] = []

    @property
    def now_s(self) -> float:
        """Seconds since the watch began."""
        return time.monotonic() - self._begin_s

    def processes(self) -> dict[str, list[psutil.Process]]:
        """By role."""
        found: dict[str, list[psutil.Process]] = {role: [] for role in ROLES}
        for process in psutil.Process().children(recursive=True):
            try:
                title = " ".join(process.cmdline()[:1])
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
            for role, name in ROLES.items():
                if name in title:
                    found[role].append(process)
        return found

    def sample(self) -> None:
        """Look at every process once."""
        for role, processes in self.processes().items():
            for process in processes:
                try:
                    maps = Path(f"/proc/{process.pid}/maps").read_text()
                    sample = Sample(
                        self.now_s,
                        role,
                        process.pid,
                        process.memory_info().rss,
                        process.num_fds(),
                        maps.count("/memfd:paceline"),
                    )
                except (OSError, psutil.Error):  # it died between two looks
                    continue
                self.samples.append(sample)

    def held_blocks(self) -> float:
        """KV blocks of the target that requests hold. The draft hears of ended requests with its next order only."""
        total = 0.0
        for file in self._targets.glob("*.json"):
            address = json.loads(file.read_text())[0]["targets"][0]
            for line in httpx.get(f"http://{address}/metrics", timeout=10.0).text.splitlines():
                if line.startswith("paceline_kv_used_blocks") and 'cache="target"' in line:
                    total += float(line.rsplit(" ", 1)[1])
        return total

    def is_healthy(self) -> bool:
        """Whether /health says that all is well."""
        try:
            return bool(httpx.get(f"{self.base}/health", timeout=5.0).json()["status"] == "ok")
        except (httpx.HTTPError, ValueError, KeyError):
            return False


async def _run(
    server: servers.Server, watch: Watch, options: argparse.Namespace, rng: random.Random, console: Console
) -> tuple[list[Outcome], list[Fault]]:
    end_s = time.monotonic() + 60.0 * options.minutes
    stop = asyncio.Event()
    load = asyncio.create_task(drive(server.url, server.model, streams=options.streams, seed=options.seed, stop=stop))
    sampling = asyncio.create_task(_sample(watch, stop))
    faults: list[Fault] = []
    await asyncio.sleep(min(15.0, 12.0 * options.minutes))
    while time.monotonic() < end_s:
        if options.faults:
            faults.append(await _inject(rng.choice(options.faults), watch, rng))
            console.print(f"{faults[-1].at_s:7.1f} s  {faults[-1].name:16} recovered in {faults[-1].recovery_s:.1f} s")
        await asyncio.sleep(min(rng.uniform(0.5, 1.5) * options.pause, max(0.0, end_s - time.monotonic())))
    stop.set()
    outcomes = await load
    await sampling
    await asyncio.sleep(2.0)
    return outcomes, faults


async def _sample(watch: Watch, stop: asyncio.Event) -> None:
    while not stop.is_set():
        await asyncio.to_thread(watch.sample)
        await asyncio.sleep(SAMPLE_PERIOD_S)


async def _inject(name: str, watch: Watch, rng: random.Random) -> Fault:
    """One fault, and the time until the server is well again, without that process."""
    kind, role = name.split("-")
    victims = watch.processes()[role]
    begin_s = watch.now_s
    if not victims:
        return Fault(begin_s, f"{name}: none", 0.0)
    victim = rng.choice(victims)
    os.kill(victim.pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    while watch.now_s - begin_s < RECOVERY_TIMEOUT_S:
        await asyncio.sleep(0.2)
        now = await asyncio.to_thread(watch.processes)
        replaced = len(now[role]) >= len(victims) and victim.pid not in {process.pid for process in now[role]}
        if replaced and await asyncio.to_thread(watch.is_healthy):
            break
    return Fault(begin_s, name, watch.now_s - begin_s)


def accept_or_reject(outcomes: Sequence[Outcome], samples: Sequence[Sample], held_blocks: float) -> list[str]:
    """What is wrong, in words; empty when all is well."""
    problems = []
    ids = Counter(outcome.request_id for outcome in outcomes)
    if any(count > 1 for count in ids.values()):
        problems.append("a request has two ends")
    lost = [outcome for outcome in outcomes if outcome.end == "lost"]
    if lost:
        problems.append(f"{len(lost)} requests ended without an answer or an error, such as {lost[0]}")
    wrong = [outcome for outcome in outcomes if outcome.end == "wrong"]
    if wrong:
        problems.append(f"{len(wrong)} answers differ from the first of the same prompt, such as {wrong[0]}")
    failed = [outcome for outcome in outcomes if outcome.end == "failed"]
    if failed:
        problems.append(f"{len(failed)} requests failed, such as {failed[0]}")
    if held_blocks:
        problems.append(f"{held_blocks:g} KV blocks are held with nothing running")
    problems += [f"{role} grows: {text}" for role, text in growth(samples).items()]
    return problems


def growth(samples: Sequence[Sample]) -> dict[str, str]:
    """Roles whose processes hold more late in their life than in the middle of it, beyond what noise explains."""
    found: dict[str, str] = {}
    for pid in {sample.pid for sample in samples}:
        own = [sample for sample in samples if sample.pid == pid]
        if own[-1].at_s - own[0].at_s < 120.0:
            continue  # caches still fill
        third = len(own) // 3
        for name, slack in (("rss_bytes", 64 << 20), ("num_fds", 8), ("num_shared", 2)):
            middle, late = (
                statistics.median(getattr(sample, name) for sample in part)
                for part in (own[third : 2 * third], own[2 * third :])
            )
            if late > middle * (1 + MAX_GROWTH) + slack:
                found[own[0].role] = f"{name} {middle:.0f} to {late:.0f} in process {pid}"
    return found


def show(
    outcomes: Sequence[Outcome],
    faults: Sequence[Fault],
    samples: Sequence[Sample],
    held_blocks: float,
    problems: Sequence[str],
    console: Console,
) -> None:
    """Print the account."""
    ends = Counter(outcome.end for outcome in outcomes)
    console.print(f"{len(outcomes)} requests: " + ", ".join(f"{count} {end}" for end, count in ends.most_common()))
    names = sorted({fault.name for fault in faults})
    for name in names:
        times = sorted(fault.recovery_s for fault in faults if fault.name == name)
        console.print(
            f"{name:18} {len(times)} times, recovery median {statistics.median(times):.1f} s, worst {times[-1]:.1f} s"
        )
    for role in ROLES:
        own: list[Any] = [sample for sample in samples if sample.role == role]
        if own:
            rss = [sample.rss_bytes / 2**20 for sample in own]
            fds, shared = [s.num_fds for s in own], [s.num_shared for s in own]
            console.print(
                f"{role:10} memory {min(rss):.0f} to {max(rss):.0f} MiB, files {min(fds)} to {max(fds)}, "
                f"shared memory {min(shared)} to {max(shared)}"
            )
    console.print(f"KV blocks held at the end: {held_blocks:g}")
    for problem in problems:
        console.print(f"[red]{problem}[/red]")
