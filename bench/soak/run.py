"""`paceline bench soak`: mixed load on a real server while its processes are killed and stopped.

Owns the schedule of faults, the samples of processes, and the checks: every request ends exactly once, the same greedy
prompt gives the same text, and no process grows. The load is in `bench.soak.load`.
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

import httpx
import psutil
from rich.console import Console

from bench.load import servers
from bench.soak.load import Outcome, drive
from engine.errors import ConfigError

ROLES = {"replica": "ServeReplica", "target": "ray::ShardActor", "draft": "ray::DraftActor", "controller": "ray::Contr"}
"""Part of the title of a process by its role."""
FAULTS = tuple(
    f"{kind}-{role}" for role in ROLES for kind in ("kill", "stop") if (kind, role) != ("stop", "controller")
)
SAMPLE_PERIOD_S = 5.0
RECOVERY_TIMEOUT_S = 180.0
MAX_GROWTH = 0.05
"""Largest relative growth of a process from the middle to the last third of its life."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Resources of one process at one point in time."""

    at_s: float
    """Seconds since the watch began."""
    role: str
    """Role of the process."""
    pid: int
    """Id of the process."""
    rss_bytes: int
    """Resident memory."""
    num_fds: int
    """Open file descriptors."""
    num_shared: int
    """Mapped shared-memory files of Paceline."""


@dataclass(frozen=True, slots=True)
class Fault:
    """An injected fault."""

    at_s: float
    """Seconds since the watch began."""
    name: str
    """Signal and role."""
    recovery_s: float
    """Seconds until the process was replaced and /health reported no problem."""


def soak(options: argparse.Namespace) -> int:
    """Run the test; returns the exit status: 1 where a check fails.

    Raises:
        ConfigError: an unknown fault is named.
    """
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
    problems = find_problems(outcomes, watch.samples, held)
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
    """Samples the processes of a server.

    Args:
        base: URL of the server.
        targets: folder into which its replica writes the address of its metrics.
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
        """Processes of the server by role."""
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
        """Sample every process once."""
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
                except (OSError, psutil.Error):  # it ended in the meantime
                    continue
                self.samples.append(sample)

    def held_blocks(self) -> float:
        """KV blocks of the target that requests hold. The draft frees its blocks only with the next draft request."""
        total = 0.0
        for file in self._targets.glob("*.json"):
            address = json.loads(file.read_text())[0]["targets"][0]
            for line in httpx.get(f"http://{address}/metrics", timeout=10.0).text.splitlines():
                if line.startswith("paceline_kv_used_blocks") and 'cache="target"' in line:
                    total += float(line.rsplit(" ", 1)[1])
        return total

    def is_healthy(self) -> bool:
        """Whether /health reports no problem."""
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
    """Inject one fault and wait until the process is replaced and the server healthy."""
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


def find_problems(outcomes: Sequence[Outcome], samples: Sequence[Sample], held_blocks: float) -> list[str]:
    """Messages of failed checks; empty where all hold."""
    problems = []
    ids = Counter(outcome.request_id for outcome in outcomes)
    if any(count > 1 for count in ids.values()):
        problems.append("a request has two ends")
    lost = [outcome for outcome in outcomes if outcome.end == "lost"]
    if lost:
        problems.append(f"{len(lost)} requests ended without a response or an error, such as {lost[0]}")
    wrong = [outcome for outcome in outcomes if outcome.end == "wrong"]
    if wrong:
        problems.append(f"{len(wrong)} responses differ from the first one to the same prompt, such as {wrong[0]}")
    failed = [outcome for outcome in outcomes if outcome.end == "failed"]
    if failed:
        problems.append(f"{len(failed)} requests failed, such as {failed[0]}")
    if held_blocks:
        problems.append(f"{held_blocks:g} KV blocks are held with nothing running")
    problems += [f"{role} grows: {text}" for role, text in growth(samples).items()]
    return problems


def growth(samples: Sequence[Sample]) -> dict[str, str]:
    """Roles of processes that hold more in the last third of their life than in the middle one, beyond noise."""
    found: dict[str, str] = {}
    for pid in {sample.pid for sample in samples}:
        mine = [sample for sample in samples if sample.pid == pid]
        if mine[-1].at_s - mine[0].at_s < 120.0:
            continue  # caches still fill
        third = len(mine) // 3
        for name, slack in (("rss_bytes", 64 << 20), ("num_fds", 8), ("num_shared", 2)):
            middle, late = (
                statistics.median(getattr(sample, name) for sample in part)
                for part in (mine[third : 2 * third], mine[2 * third :])
            )
            if late > middle * (1 + MAX_GROWTH) + slack:
                found[mine[0].role] = f"{name} {middle:.0f} to {late:.0f} in process {pid}"
    return found


def show(
    outcomes: Sequence[Outcome],
    faults: Sequence[Fault],
    samples: Sequence[Sample],
    held_blocks: float,
    problems: Sequence[str],
    console: Console,
) -> None:
    """Print ends, recoveries, resources and failed checks."""
    ends = Counter(outcome.end for outcome in outcomes)
    console.print(f"{len(outcomes)} requests: " + ", ".join(f"{count} {end}" for end, count in ends.most_common()))
    names = sorted({fault.name for fault in faults})
    for name in names:
        times = sorted(fault.recovery_s for fault in faults if fault.name == name)
        console.print(
            f"{name:18} {len(times)} times, recovery median {statistics.median(times):.1f} s, worst {times[-1]:.1f} s"
        )
    for role in ROLES:
        mine = [sample for sample in samples if sample.role == role]
        if mine:
            rss = [sample.rss_bytes / 2**20 for sample in mine]
            fds, shared = [sample.num_fds for sample in mine], [sample.num_shared for sample in mine]
            console.print(
                f"{role:10} memory {min(rss):.0f} to {max(rss):.0f} MiB, files {min(fds)} to {max(fds)}, "
                f"shared memory {min(shared)} to {max(shared)}"
            )
    console.print(f"KV blocks held at the end: {held_blocks:g}")
    for problem in problems:
        console.print(f"[red]{problem}[/red]")
