"""CPUs that this process may use, and the threads of one target shard that follow from them.

Owns the two limits of a container that the number of CPUs of the machine does not show: the CPU set and the CPU quota.
Imports no torch, because the replica and the command ask too.
"""

from __future__ import annotations

import os
from pathlib import Path

from engine.config import EngineConfig

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
"""Lines `number:controllers:path`. The line of version 2 has number 0 and no controllers."""


def threads_per_shard(config: EngineConfig) -> int:
    """Number of CPU threads of one shard: `num_threads`, or an equal part of the usable CPUs."""
    return config.num_threads or max(1, usable_cpus() // config.tensor_parallel_size)


def usable_cpus(root: Path = CGROUP_ROOT, own: Path = OWN_CGROUPS) -> int:
    """CPUs in this process's CPU set, or fewer if the quota of a control group gives less time. At least 1.

    Args:
        root: where the control groups are mounted.
        own: names the control groups of this process.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for folder in _groups(root, own) if (quota := _quota(folder)) is not None]
    return max(1, min(count, *(int(quota) for quota in quotas))) if quotas else count


def _groups(root: Path, own: Path) -> list[Path]:
    """Folders of the control groups that limit this process: its own ones and those above them."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            top = root
        elif "cpu" in controllers.split(","):
            top = root / "cpu"
        else:
            continue
        # In a container the path may be that of the host, while only the part below it is mounted.
        group = top / path.strip("/")
        folders += [group, *(parent for parent in group.parents if parent.is_relative_to(top))]
    return folders


def _quota(folder: Path) -> float | None:
    """CPUs' worth of time that a control group may use; None without a limit."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):  # version 2, version 1
        try:
            time_us, period_us = " ".join((folder / name).read_text() for name in names).split()
        except (OSError, ValueError):
            continue
        if time_us.isdigit() and period_us.isdigit() and int(period_us) > 0:  # no limit: `max` or -1
            return int(time_us) / int(period_us)
    return None
