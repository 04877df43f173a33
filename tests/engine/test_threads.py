"""The CPUs of a process: its CPU set, or fewer where a control group gives less time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.threads import threads_per_shard, usable_cpus

NO_GROUP = Path("/nowhere")


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="only Linux has CPU sets")
def test_a_cpu_set_is_kept() -> None:
    one = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, [{one}]); from engine.threads import usable_cpus; print(usable_cpus())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


def make_group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("cpu_", "cpu.", 1)).write_text(text)


def cpus(tmp_path: Path, lines: str, count: int = 64) -> int:
    """The usable CPUs of a machine with many CPUs, whose control groups are below `tmp_path`."""
    own = tmp_path / "own"
    own.write_text(lines)
    code = (
        f"import os; os.sched_getaffinity = lambda _: range({count}); from pathlib import Path; "
        f"from engine.threads import usable_cpus; print(usable_cpus(Path({str(tmp_path)!r}), Path({str(own)!r})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 64), ("200000 100000", 2), ("350000 100000", 3), ("50000 100000", 1), ("nonsense", 64)],
)
def test_a_quota_limits_the_cpus(tmp_path: Path, quota: str, expected: int) -> None:
    make_group(tmp_path, cpu_max=quota)
    assert cpus(tmp_path, "0::/\n") == expected


def test_the_smallest_quota_of_the_groups_above_counts(tmp_path: Path) -> None:
    make_group(tmp_path / "a", cpu_max="400000 100000")
    make_group(tmp_path / "a" / "b", cpu_max="800000 100000")
    assert cpus(tmp_path, "0::/a/b\n") == 4


def test_a_path_of_the_host_that_is_not_mounted_leaves_the_quota_of_the_root(tmp_path: Path) -> None:
    make_group(tmp_path, cpu_max="300000 100000")
    assert cpus(tmp_path, "0::/../../kubepods/pod1\n") == 3


@pytest.mark.parametrize(("time_us", "expected"), [("-1", 64), ("250000", 2)])
def test_quotas_of_version_1(tmp_path: Path, time_us: str, expected: int) -> None:
    make_group(tmp_path / "cpu" / "docker" / "x", cpu_cfs_quota_us=time_us, cpu_cfs_period_us="100000")
    assert cpus(tmp_path, "5:memory:/other\n4:cpu,cpuacct:/docker/x\n") == expected


def test_without_control_groups_all_cpus_of_the_set_count() -> None:
    assert usable_cpus(NO_GROUP, NO_GROUP) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("size", [1, 2, 64])
def test_shards_share_the_cpus(size: int) -> None:
    config = EngineConfig.parse({"model": "m", "device": "cpu", "tensor_parallel_size": size})
    assert threads_per_shard(config) == max(1, usable_cpus() // size)
    assert threads_per_shard(config.model_copy(update={"num_threads": 3})) == 3
