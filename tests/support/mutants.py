"""Mutation testing of one folder: change its code a little, many times, and see whether the tests notice.

    python tests/support/mutants.py engine/core --num 50 --seed 1

Owns the run: a copy of the tree, a sample of mutants, the tests of each, the report. The working tree is only read.
The tests are those that mirror the folder (`tests/<folder>`) and those that EXTRA names. They run once, unchanged, to
record what each of them calls. A mutant gets the tests that call the changed function: first those of the changed
module (`test_<module>*.py`), then the others, the quick ones first, as long as they fit in `--budget` CPU seconds
together. The first failure ends the run. A fresh interpreter imports for longer than most tests run, so one process
imports everything outside the project once and forks for each mutant.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mutation import Mutant, mutants
from recorder import TIMER_SIGNALS, Bound, Recorder

ROOT = Path(__file__).parents[2]
PACKAGES = ("autoscale", "bench", "dashboards", "deployments", "distill", "engine", "paceline", "tests")
EXTRA = {
    "engine/core": ("tests/test_exactness.py", "tests/test_state_machine.py", "tests/engine/sampling/test_sampling.py"),
    "engine/sampling": ("tests/test_exactness.py", "tests/engine/core"),
    "engine/metrics": ("tests/deployments/monitoring", "tests/autoscale/control"),
    "engine/tree.py": ("tests/engine/proposals", "tests/engine/draft/test_tree_search.py"),
    "engine/tree_paths.py": ("tests/gpu_offline/test_tree_attention.py", "tests/engine/model/test_trees.py"),
    "engine/lookup": ("tests/engine/proposals", "tests/test_exactness.py"),
    "engine/graphs": ("tests/gpu_offline",),
    "engine/draft": ("tests/gpu_offline/test_draft_chain.py", "tests/gpu_offline/test_recorded_chain.py"),
    "engine/checkpoint": ("tests/engine/dflash",),
    "engine/model": ("tests/gpu_offline/test_varlen_contract.py", "tests/gpu_offline/test_tree_attention.py"),
    "engine/dflash": ("tests/engine/draft/test_public_parallel.py",),
    "engine/medusa": ("tests/gpu_offline/test_recorded_chain.py",),
    "engine/gguf": ("tests/engine/model/test_packed.py", "tests/engine/checkpoint"),
    "engine/quantization": ("tests/engine/model/test_packed.py", "tests/engine/model/test_int8_cache.py"),
    "engine/workers": (
        "tests/gpu_offline/test_bring_up.py",
        "tests/gpu_offline/test_memory_plan.py",
        "tests/gpu_offline/test_cuda_graphs.py",
    ),
    "deployments/openai": (
        "tests/deployments/http/test_api_options.py",
        "tests/deployments/http/test_openai_client.py",
    ),
}
"""Further tests of a folder, or of one file: promises that the tests of other folders hold."""
TIMEOUT = -1
MEMORY_BYTES = 12 << 30
"""Bound on the address space of one run: a mutant may allocate without end."""


@dataclass(frozen=True)
class Record:
    """What the tests do while nothing is changed."""

    seconds: dict[str, float]
    """CPU seconds of each test, by pytest's name of it."""
    calls: dict[str, list[str]]
    """Functions of the project that each test calls, as `file:line`."""
    modules: list[str]
    """Modules from outside the project that the tests import."""
    shared_seconds: dict[str, float] = field(default_factory=dict)
    """CPU seconds of the fixtures that the tests of a file share, as `Recorder` has them."""


@dataclass(frozen=True)
class Result:
    """What the tests said to one mutant."""

    mutant: Mutant
    verdict: str
    """`noticed`, `timeout` or `survived`."""
    num_tests: int
    """Tests that call the changed function."""
    failed: str
    """The test that failed; empty where none did or the tests could not be collected."""
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", help="folder or file whose code is changed, such as engine/core")
    parser.add_argument("--num", type=int, default=50, help="mutants to try (default: 50)")
    parser.add_argument("--seed", type=int, default=1, help="names the sample (default: 1)")
    parser.add_argument("--only", default="", help="numbers of the sample to try, such as 3,17 or 20-39 (default: all)")
    parser.add_argument("--tests", nargs="*", default=[], help="further test files or folders")
    parser.add_argument("--without", default="", help="tests to leave out, as an expression of pytest -k")
    parser.add_argument("--budget", type=float, default=60.0, help="CPU seconds of tests per mutant (default: 60)")
    parser.add_argument("--record", type=Path, help="file that keeps what the tests call; read if it exists")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # removes the copy and ends the tests that run
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = copy_tree(options.root, Path(folder))
        sample = choose(tree, options.folder, options.num, options.seed)
        tests = tests_of(tree, options.folder, options.tests)
        record = record_tests(tree, tests, options.without, options.record)
        print(f"{len(record.seconds)} tests, {sum(record.seconds.values()):.0f} s", flush=True)
        results = []
        for number in numbers_of(options.only, len(sample)):
            chosen = choose_tests(tree, sample[number], record, options.budget)
            result = try_mutant(tree, sample[number], chosen, record)
            results.append(result)
            place = f"{sample[number].path}:{sample[number].line}"
            print(
                f"#{number} {result.verdict} {result.num_tests} tests {result.seconds:.1f} s {place} {result.failed}",
                flush=True,
            )
            if result.verdict == "survived":
                print(sample[number].diff((tree / sample[number].path).read_text()), flush=True)
    num_survived = sum(result.verdict == "survived" for result in results)
    num_late = sum(result.verdict == "timeout" for result in results)
    share = 1 - num_survived / max(1, len(results))
    print(f"{options.folder}: {len(results)} mutants, {share:.0%} noticed, {num_late} of them by a timeout")
    return 0


def numbers_of(only: str, num: int) -> list[int]:
    """The numbers of `--only`; all of the sample where it is empty."""
    found: list[int] = []
    for part in filter(None, only.split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return [number for number in found if number < num] if only else list(range(num))


def copy_tree(root: Path, folder: Path) -> Path:
    """A copy of what git tracks and of new files, without history."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=True,
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)
    return folder


def choose(tree: Path, folder: str, num: int, seed: int) -> list[Mutant]:
    """The sample: every mutant is as likely as any other."""
    place = tree / folder
    files = [place] if place.is_file() else sorted(place.glob("*.py"))
    every = [mutant for file in files for mutant in mutants(str(file.relative_to(tree)), file.read_text())]
    if not every:
        raise SystemExit(f"mutants: {folder} holds no Python code to change")
    return random.Random(seed).sample(every, min(num, len(every)))


def tests_of(tree: Path, folder: str, further: Sequence[str]) -> list[str]:
    """Test files and folders that hold the promises of a folder, or of one file."""
    home = folder if not folder.endswith(".py") else str(Path(folder).parent)
    # Not those of the folders below.
    mirror = [str(path.relative_to(tree)) for path in sorted((tree / "tests" / home).glob("test_*.py"))]
    tests = [*mirror, *EXTRA.get(home, ()), *(EXTRA.get(folder, ()) if folder != home else ()), *further]
    if not tests:
        raise SystemExit(f"mutants: no tests mirror {folder}; name some with --tests")
    return tests


def record_tests(tree: Path, tests: Sequence[str], without: str, kept: Path | None) -> Record:
    """Run the tests once, unchanged, or read what an earlier run has kept.

    Also imports everything that they need from outside the project into this process.
    """
    if kept is not None and kept.is_file():
        record = Record(**json.loads(kept.read_text()))
    else:
        selection = ["-k", f"not ({without})"] if without else []
        status, report = run_tests(tree, [*selection, *tests], limit_s=3600)
        if status != 0:
            log = (tree / "mutants.log").read_text()[-4000:]
            raise SystemExit(f"mutants: the tests fail before any change:\n{log}")
        record = Record(**report)
        if kept is not None:
            kept.write_text(json.dumps(report))
    for name in record.modules:
        try:
            __import__(name)
        except ImportError:
            continue
    return record


def choose_tests(tree: Path, mutant: Mutant, record: Record, budget: float) -> list[str]:
    """The tests that call the changed function, in the order in which they run.

    For a change outside of functions: those of the module, and those that call any of its functions. Where there is
    none, as for a module of declarations, all that mirror the folder.
    """
    line = function_of((tree / mutant.path).read_text(), mutant.line)
    module = Path(mutant.path)
    own = f"tests/{module.parent}/test_{module.stem}"
    if line is not None:
        found = [test for test, calls in record.calls.items() if f"{mutant.path}:{line}" in calls]
    else:
        found = [
            test
            for test, calls in record.calls.items()
            if test.startswith(own) or any(call.startswith(f"{mutant.path}:") for call in calls)
        ]
    found = found or [test for test in record.calls if test.startswith(f"tests/{module.parent}/")]
    found.sort(key=lambda test: (not test.startswith(own), record.seconds[test]))
    seconds = 0.0
    for index, test in enumerate(found):
        seconds += record.seconds[test]
        if seconds > budget:
            return found[:index]
    return found


def function_of(source: str, line: int) -> int | None:
    """First line, with decorators, of the innermost function whose body has a line; None outside of functions."""
    found = None
    for node in ast.walk(ast.parse(source)):  # outer functions come first
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            if node.body[0].lineno <= line <= node.end_lineno:
                found = min([node.lineno, *[each.lineno for each in node.decorator_list]])
    return found


def try_mutant(tree: Path, mutant: Mutant, tests: Sequence[str], record: Record) -> Result:
    """Run the tests over one change, and take it back."""
    path = tree / mutant.path
    source = path.read_text()
    for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        stale.unlink()  # it is told from a fresh one by size and whole seconds only
    begin = time.monotonic()
    status = 0
    try:
        path.write_text(mutant.apply(source))
        module = Path(mutant.path)
        own = [test for test in tests if test.startswith(f"tests/{module.parent}/test_{module.stem}")]
        # Collecting the files of the others takes longer than most of the module's own tests.
        for group in (own, [test for test in tests if test not in own]):
            if group and status == 0:
                limit_s = 15 + 3 * sum(record.seconds[test] for test in group)
                status, _ = run_tests(tree, group, limit_s=limit_s, record=record)
    finally:
        path.write_text(source)
    verdict = {0: "survived", TIMEOUT: "timeout"}.get(status, "noticed")
    failed = re.search(r"^FAILED (\S+)", (tree / "mutants.log").read_text(), re.MULTILINE) if status == 1 else None
    return Result(mutant, verdict, len(tests), failed[1] if failed else "", time.monotonic() - begin)


def run_tests(
    tree: Path, tests: Sequence[str], *, limit_s: float, record: Record | None = None
) -> tuple[int, dict[str, Any]]:
    """Run pytest in a fork.

    Args:
        limit_s: bound on its CPU seconds; forty times as long on the clock, so that a busy machine is no deadlock.
        record: of the unchanged tests; None while it is made.

    Returns:
        Its exit status, TIMEOUT after a bound, and what was recorded.
    """
    child = os.fork()
    if child == 0:
        status = 70
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s), int(limit_s) + 1))
            status = _run_here(tree, tests, record)
        finally:
            os._exit(status)
    status, deadline = None, time.monotonic() + 40 * limit_s
    try:
        while status is None:
            done, code = os.waitpid(child, os.WNOHANG)
            if done:
                status = os.waitstatus_to_exitcode(code)
                ends = (signal.SIGXCPU, signal.SIGKILL, *TIMER_SIGNALS)
                status = TIMEOUT if -status in ends else status
            elif time.monotonic() > deadline:
                break
            else:
                time.sleep(0.02)
    finally:
        if status is None:  # too late, or this process is being ended
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
    status = TIMEOUT if status is None else status
    report = json.loads((tree / "mutants.json").read_text()) if record is None and status == 0 else {}
    return status, report


def _run_here(tree: Path, tests: Sequence[str], record: Record | None) -> int:
    """In the fork: the tests over the copy."""
    os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    os.environ["HYPOTHESIS_PROFILE"] = "mutants"
    log = os.open("mutants.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    here = str(Path(__file__).parent)
    sys.path[:] = [str(tree), *[entry for entry in sys.path if entry not in ("", here, str(ROOT))]]
    sys.dont_write_bytecode = record is not None
    import pytest

    recorder = Recorder(str(tree))
    plugin = recorder if record is None else Bound(record.seconds, record.shared_seconds)
    quiet = ["-p", "no:cacheprovider", "-x", "-q", "--no-header", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    status = pytest.main([*quiet, "-m", "not slow and not gpu and not ray", *tests], plugins=[plugin])
    if record is None:
        modules = [name for name in sys.modules if name.split(".")[0] not in (*PACKAGES, "__main__")]
        outside = [name for name in modules if _is_outside(name, tree)]
        report = {
            "seconds": recorder.seconds,
            "calls": recorder.calls(),
            "modules": outside,
            "shared_seconds": recorder.shared_seconds,
        }
        Path("mutants.json").write_text(json.dumps(report))
    return int(status)


def _is_outside(name: str, tree: Path) -> bool:
    """Whether a loaded module is no part of the project and no part of pytest, which must start anew."""
    file = getattr(sys.modules[name], "__file__", None)
    if file is None or Path(file).is_relative_to(tree) or Path(file).is_relative_to(ROOT):
        return False
    return not name.startswith(("_pytest", "pytest", "hypothesis.extra", "_"))


if __name__ == "__main__":
    sys.exit(main())
