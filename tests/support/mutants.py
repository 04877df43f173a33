"""Mutation testing of one folder: change its code a little, many times, and see whether the tests notice.

    python tests/support/mutants.py engine/core --num 50 --seed 1

Owns the run: a copy of the tree, a sample of mutants, the tests of each, the report. The working tree is only read.
The tests are those that mirror the folder (`tests/<folder>`) and those that EXTRA names, the quick ones first, as long
as they fit in `--budget` CPU seconds together. Those of the changed module (`test_<module>*.py`) run before the others.
The first failure ends the run. A fresh interpreter imports for longer than most tests run, so one process imports
everything outside the project once and forks for each mutant.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mutation import Mutant, mutants

ROOT = Path(__file__).parents[2]
PACKAGES = ("autoscale", "bench", "dashboards", "deployments", "distill", "engine", "paceline", "tests")
EXTRA = {
    "engine/core": ("tests/test_exactness.py", "tests/test_state_machine.py", "tests/engine/sampling/test_sampling.py"),
    "engine/sampling": ("tests/test_exactness.py", "tests/engine/core"),
    "engine/metrics": ("tests/deployments/monitoring", "tests/autoscale/control"),
    "deployments/openai": (
        "tests/deployments/http/test_api_options.py",
        "tests/deployments/http/test_openai_client.py",
    ),
}
"""Further tests of a folder: promises that the tests of other folders hold."""
TIMEOUT = -1
MEMORY_BYTES = 12 << 30
"""Bound on the address space of one run: a mutant may allocate without end."""


@dataclass(frozen=True)
class Result:
    """What the tests said to one mutant."""

    mutant: Mutant
    verdict: str
    """`noticed`, `timeout` or `survived`."""
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", help="folder or file whose code is changed, such as engine/core")
    parser.add_argument("--num", type=int, default=50, help="mutants to try (default: 50)")
    parser.add_argument("--seed", type=int, default=1, help="names the sample (default: 1)")
    parser.add_argument("--only", default="", help="numbers of the sample to try, such as 3,17 (default: all)")
    parser.add_argument("--tests", nargs="*", default=[], help="further test files or folders")
    parser.add_argument("--without", default="", help="tests to leave out, as an expression of pytest -k")
    parser.add_argument("--budget", type=float, default=60.0, help="CPU seconds of tests per mutant (default: 60)")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = copy_tree(options.root, Path(folder))
        sample = choose(tree, options.folder, options.num, options.seed)
        numbers = [int(number) for number in options.only.split(",") if number] or range(len(sample))
        tests = tests_of(tree, options.folder, options.tests)
        chosen, left_out = choose_tests(tree, tests, options.budget, options.without)
        seconds = sum(chosen.values())
        print(f"{len(chosen)} tests, {seconds:.0f} s; {len(left_out)} left out of the budget", flush=True)
        results = []
        for number in numbers:
            result = try_mutant(tree, sample[number], chosen)
            results.append(result)
            print(
                f"#{number} {result.verdict} {result.seconds:.1f} s {sample[number].path}:{sample[number].line}",
                flush=True,
            )
            if result.verdict == "survived":
                print(sample[number].diff((tree / sample[number].path).read_text()), flush=True)
    num_survived = sum(result.verdict == "survived" for result in results)
    num_late = sum(result.verdict == "timeout" for result in results)
    share = 1 - num_survived / max(1, len(results))
    print(f"{options.folder}: {len(results)} mutants, {share:.0%} noticed, {num_late} of them by a timeout")
    return 0


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
    mirror = [f"tests/{home}"] if (tree / "tests" / home).is_dir() else []
    tests = [*mirror, *EXTRA.get(home, ()), *further]
    if not tests:
        raise SystemExit(f"mutants: no tests mirror {folder}; name some with --tests")
    return tests


def choose_tests(tree: Path, tests: Sequence[str], budget: float, without: str) -> tuple[dict[str, float], list[str]]:
    """Run the tests once, unchanged.

    Also imports everything that they need from outside the project into this process.

    Returns:
        The tests that fit the budget with their CPU seconds, the quick ones first, and the others.
    """
    selection = ["-k", f"not ({without})"] if without else []
    status, report = run_tests(tree, [*selection, *tests], limit_s=3600, record=True)
    if status != 0:
        raise SystemExit(f"mutants: the tests fail before any change:\n{(tree / 'mutants.log').read_text()[-4000:]}")
    for name in report["modules"]:
        try:
            __import__(name)
        except ImportError:
            continue
    chosen: dict[str, float] = {}
    ordered = sorted(report["seconds"].items(), key=lambda item: item[1])
    while ordered and sum(chosen.values()) + ordered[0][1] <= budget:
        test, took = ordered.pop(0)
        chosen[test] = took
    return chosen, [test for test, _ in ordered]


def groups(module: str, tests: Iterable[str]) -> list[list[str]]:
    """The tests of the changed module, then the others, each in the given order."""
    own, others = [], []
    for test in tests:
        file = Path(test.partition("::")[0])
        is_own = file.stem.startswith(f"test_{Path(module).stem}") and str(file.parent).endswith(
            str(Path(module).parent)
        )
        (own if is_own else others).append(test)
    return [group for group in (own, others) if group]


def try_mutant(tree: Path, mutant: Mutant, tests: Mapping[str, float]) -> Result:
    """Run the tests over one change, and take it back."""
    path = tree / mutant.path
    source = path.read_text()
    for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        stale.unlink()  # it is told from a fresh one by size and whole seconds only
    begin = time.monotonic()
    status = 0
    try:
        path.write_text(mutant.apply(source))
        for group in groups(mutant.path, tests):
            if status == 0:
                limit_s = 15 + 3 * sum(tests[test] for test in group)
                status, _ = run_tests(tree, group, limit_s=limit_s, record=False)
    finally:
        path.write_text(source)
    verdict = {0: "survived", TIMEOUT: "timeout"}.get(status, "noticed")
    return Result(mutant, verdict, time.monotonic() - begin)


class _Recorder:
    """A pytest plugin: CPU seconds of each test, which other processes on the machine do not change."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.process_time()

    def pytest_runtest_logreport(self, report: object) -> None:
        test, now = report.nodeid, time.process_time()  # type: ignore[attr-defined]
        self.seconds[test] = self.seconds.get(test, 0.0) + now - self._last
        self._last = now


def run_tests(tree: Path, tests: Sequence[str], *, limit_s: float, record: bool) -> tuple[int, dict]:  # type: ignore[type-arg]
    """Run pytest in a fork.

    Args:
        limit_s: bound on its CPU seconds; four times as long on the clock.

    Returns:
        Its exit status, TIMEOUT after the limit, and what was recorded.
    """
    child = os.fork()
    if child == 0:
        status = 70
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s), int(limit_s) + 1))
            status = _run_here(tree, tests, record=record)
        finally:
            os._exit(status)
    status, deadline = None, time.monotonic() + 4 * limit_s
    while status is None:
        done, code = os.waitpid(child, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(code)
            status = TIMEOUT if status in (-signal.SIGXCPU, -signal.SIGKILL) else status
        elif time.monotonic() > deadline:
            status = TIMEOUT
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
        else:
            time.sleep(0.02)
    report = json.loads((tree / "mutants.json").read_text()) if record and status == 0 else {}
    return status, report


def _run_here(tree: Path, tests: Sequence[str], *, record: bool) -> int:
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
    sys.dont_write_bytecode = not record
    import pytest

    recorder = _Recorder()
    quiet = ["-p", "no:cacheprovider", "-x", "-q", "--no-header", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    status = pytest.main([*quiet, "-m", "not slow and not gpu and not ray", *tests], plugins=[recorder])
    if record:
        modules = [name for name in sys.modules if name.split(".")[0] not in (*PACKAGES, "__main__")]
        outside = [name for name in modules if _is_outside(name, tree)]
        Path("mutants.json").write_text(json.dumps({"seconds": recorder.seconds, "modules": outside}))
    return int(status)


def _is_outside(name: str, tree: Path) -> bool:
    """Whether a loaded module is no part of the project and no part of pytest, which must start anew."""
    file = getattr(sys.modules[name], "__file__", None)
    if file is None or Path(file).is_relative_to(tree) or Path(file).is_relative_to(ROOT):
        return False
    return not name.startswith(("_pytest", "pytest", "hypothesis.extra", "_"))


if __name__ == "__main__":
    sys.exit(main())
