"""Paceline's Triton kernels without a GPU: equal to their twins under the interpreter, and compiled for real GPUs.

Promise: every kernel gives the results of PyTorch's operators; for A100, H100 and B200 `ptxas` takes it, no thread
spills registers, and two programs share the memory of a multiprocessor.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED_KIB = {80: 164, 90: 228, 100: 228}
"""Shared memory of one multiprocessor, by architecture; each program also takes 1 KiB of it for the system."""
PROGRAMS = 2
"""Programs that must fit on one multiprocessor at once."""

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def run(script: str, argument: str, cache: Path) -> str:
    """Run a script of tests/support in a process of its own; its output."""
    support = ROOT / "tests" / "support"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    env |= {"TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, str(support / script), argument], env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


CHECKS = ("elementwise", "rope_cache", "paged_attention", "fused_decoder", "choose")
FP8_CHECKS = ("e4m3", "fp8_rope_cache", "fp8_attention")

INVARIANT_CHECKS = ("linear", "invariant", "invariant_attention")


@pytest.mark.parametrize("name", [*CHECKS, *FP8_CHECKS, *INVARIANT_CHECKS])
def test_a_kernel_equals_its_twin(name: str, tmp_path: Path) -> None:
    run("kernel_checks.py", name, tmp_path)


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_kernels_compile_without_spills(arch: int, tmp_path: Path) -> None:
    report = json.loads(run("kernel_compile.py", str(arch), tmp_path))
    assert len(report) == 28
    for name, used in report.items():
        assert used["LOCAL"] == 0, (name, used)
        assert used["STACK"] == 0, (name, used)
        assert used["REG"] <= 255, (name, used)
        assert PROGRAMS * (used["shared"] + 1024) <= SHARED_KIB[arch] << 10, (name, used)
