"""What this machine has, read without importing torch or Ray: memory, CPU, GPUs, the installed torch build.

Owns where each fact is read. What follows from the facts is in `preflight` and `doctor`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from engine.threads import usable_cpus

SHARED_MEMORY = Path("/dev/shm")
INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "bf16", "i8mm", "sve")
"""CPU flags that matter to a forward, as the kernel names them on x86_64 and arm64."""
_CGROUP = Path("/sys/fs/cgroup")
_BANDWIDTH_BYTES = 128 << 20
_QUERY = ("name", "driver_version", "memory.total", "memory.free")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One NVIDIA GPU."""

    name: str
    driver: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """The installed torch."""

    version: str
    cuda: str | None
    """Version of CUDA that it was built with; None for a CPU build."""


def gpus() -> list[Gpu]:
    """The NVIDIA GPUs that the driver shows; empty without a driver."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = [command, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_gpus(done.stdout)


def parse_gpus(text: str) -> list[Gpu]:
    """Rows of `nvidia-smi --query-gpu`, memory in MiB."""
    rows = [[part.strip() for part in line.split(",")] for line in text.splitlines()]
    return [
        Gpu(name, driver, int(total) << 20, int(free) << 20)
        for name, driver, total, free in (row for row in rows if len(row) == len(_QUERY))
        if total.isdigit() and free.isdigit()
    ]


def torch_build() -> TorchBuild | None:
    """The installed torch, read from its files; None where it is not installed."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).with_name("version.py")
    values = file.read_text() if file.is_file() else ""

    def value(name: str) -> str | None:
        found = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", values, re.MULTILINE)
        return found.group(1) if found else None

    return TorchBuild(value("__version__") or importlib.metadata.version("torch"), value("cuda"))


def instruction_sets() -> list[str]:
    """Those of `INSTRUCTION_SETS` that the CPU has."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    flags = set(re.findall(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)[:1])
    return [name for name in INSTRUCTION_SETS if flags and name in next(iter(flags)).split()]


def free_memory(cgroup: Path = _CGROUP) -> int:
    """Bytes that new processes can take: of the machine, or of the container's limit where that is less."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        cached = re.search(r"^inactive_file (\d+)$", (cgroup / "memory.stat").read_text(), re.MULTILINE)
    except (OSError, ValueError):
        return available
    if not limit.isdigit():
        return available
    return max(0, min(available, int(limit) - used + (int(cached.group(1)) if cached else 0)))


def memory_bandwidth() -> float:
    """Bytes per second that all CPUs together read and write, by copying. Takes a tenth of a second."""
    import numpy as np

    num_threads = min(8, usable_cpus())
    pairs = [(np.ones(_BANDWIDTH_BYTES // 8 // num_threads), np.ones(_BANDWIDTH_BYTES // 8 // num_threads))]
    pairs += [(pairs[0][0].copy(), pairs[0][0].copy()) for _ in range(num_threads - 1)]
    best_s = float("inf")
    for _ in range(3):
        threads = [threading.Thread(target=np.copyto, args=pair) for pair in pairs]
        started_s = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        best_s = min(best_s, time.perf_counter() - started_s)
    return 2 * _BANDWIDTH_BYTES / best_s


def listener(port: int) -> str | None:
    """The process that listens on a TCP port, as `name (pid)`; None where that cannot be seen."""
    try:
        connections = psutil.net_connections("tcp")
        open_here = [c for c in connections if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port]
        pids = [c.pid for c in open_here if c.pid]
        return f"{psutil.Process(pids[0]).name()} (pid {pids[0]})" if pids else None
    except (psutil.Error, OSError):
        return None


def ray_processes() -> list[int]:
    """Ids of the Ray head and worker daemons that run on this machine."""
    names = {"raylet", "gcs_server"}
    return [process.pid for process in psutil.process_iter(["name"]) if process.info["name"] in names]
