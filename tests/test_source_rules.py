"""Rules of security and reliability that the source itself must keep: read as syntax trees, not as text."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("paceline", "engine", "autoscale", "deployments", "dashboards", "bench", "distill")
FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
UNPICKLERS = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "os.system",
    "os.popen",
    "tempfile.mktemp",
}
WALL_CLOCK = {
    "autoscale/control/controller.py": "points of charts",
    "deployments/http/generate.py": "`created` of an answer",
    "deployments/http/responses_route.py": "`created_at` of a response",
    "deployments/monitoring/replica_observer.py": "start time, a metric",
    "deployments/lora/adapters.py": "`created` of an adapter",
    "deployments/replica.py": "`created` of the model",
    "deployments/monitoring/timelines.py": "when a request arrived, for traces",
}
"""Where the wall clock may be read, and for what; everything that waits or measures uses the monotonic one."""


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_unpickled_or_evaluated(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert UNPICKLERS.isdisjoint(name.split(".")[0] for name in names)
    for name, call in calls(path):
        assert name not in FORBIDDEN_CALLS, f"line {call.lineno}"
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert name != "torch.load" or options.get("weights_only") == "True", f"line {call.lineno}"
        assert options.get("allow_pickle", "False") == "False", f"line {call.lineno}"
        assert "shell" not in options, f"line {call.lineno}"
        assert options.get("trust_remote_code", "False") == "False", f"line {call.lineno}"
        if name.endswith("from_pretrained"):
            assert "trust_remote_code" in options, f"line {call.lineno}: code of a model folder is refused expressly"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_clocks_that_can_jump_decide_nothing(path: Path) -> None:
    """A jump of the wall clock (NTP, a suspended machine, an operator) may change time stamps only."""
    where = str(path.relative_to(ROOT))
    if where in WALL_CLOCK or path.is_relative_to(ROOT / "distill"):
        return
    for name, call in calls(path):
        assert name not in {"time.time", "datetime.now", "datetime.utcnow", "time.time_ns"}, f"{where}:{call.lineno}"


def test_every_exception_to_the_rule_is_still_needed() -> None:
    for where in WALL_CLOCK:
        assert any(name == "time.time" for name, _ in calls(ROOT / where)), where


def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", ROOT / ".ci" / "audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["audit"] = module
    spec.loader.exec_module(module)
    return module


def test_the_audit_finds_what_it_looks_for() -> None:
    module = audit()
    pins = module.read_pins("a==1.0\nB_b==2.0 # why\n")
    bad = module.read_advisories("# c\nb-b<2.1  CVE-0\na<1.0  CVE-1\n")
    assert module.problems({"a": "1.0", "b-b": "2.0"}, pins, bad) == ["b-b 2.0: CVE-0"]
    assert module.problems({"a": "1.1", "c": "3"}, pins, bad) == [
        "a 1.1 is installed, constraints.txt says 1.0",
        "c 3 is not pinned in constraints.txt",
    ]


def test_no_pinned_version_is_on_the_list_of_known_holes() -> None:
    module = audit()
    pins = module.read_pins((ROOT / "constraints.txt").read_text())
    advisories = module.read_advisories((ROOT / ".ci" / "advisories.txt").read_text())
    assert len(pins) > 100
    assert len(advisories) > 20
    assert module.problems(pins, pins, advisories) == []
