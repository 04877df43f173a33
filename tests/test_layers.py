"""The layers of the source tree: imports run one way, and folders and files stay small.

Owns the picture that `docs/architecture.md` draws. Reads the source as syntax trees, so imports inside functions and
under TYPE_CHECKING count as well.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

TOP = {
    "paceline": {"bench", "deployments", "autoscale", "engine", "distill", "dashboards"},
    "bench": {"deployments", "autoscale", "engine"},
    "deployments": {"autoscale", "engine"},
    "autoscale": {"engine"},
    "engine": set[str](),
    "distill": {"engine"},
    "dashboards": {"engine"},
}
"""Top-level packages, and the packages each of them may import."""

LAYERS = {
    "engine": (
        "workers",
        "draft_buffer medusa dflash adaptation",
        "draft",
        "proposals",
        "graphs lora lookup",
        "model metrics ipc",
        "core kernels",
        "sampling checkpoint threads",
        "quantization",
        "messages config gguf",
        "errors tree tree_paths",
    ),
    "autoscale": ("control", "replicas simulation", "profiling", "policy"),
    "deployments": (
        "app settings_page",
        "replica local fleet",
        "lora",
        "http",
        "responses_api",
        "openai cluster monitoring",
        "text",
        "settings engine_client errors",
    ),
    "distill": ("options", "cli convert online", "training", "models", "data", "settings"),
    "bench": ("options", "soak peers pace proxy gpu proposers adaptation", "engine_only", "load"),
    "dashboards": (
        "options",
        "commands",
        "render install",
        "fleet serving speculation alerts",
        "queries adaptation",
        "grafana_json",
    ),
}
"""Units of a package, highest layer first. A unit imports only from layers below its own."""

FREE = {"dashboards": {"model", "promql", "metrics_page"}}
"""Units outside the picture."""

MAX_FILES, MAX_LINES, MAX_DEPTH = 15, 320, 2


def sources() -> list[Path]:
    return [path for package in TOP for path in sorted((ROOT / package).rglob("*.py"))]


def module_of(path: Path) -> tuple[str, ...]:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports(text: str) -> Iterator[tuple[str, ...]]:
    """Modules of this project that a source text imports, as parts of their dotted names."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            parts = tuple(node.module.split("."))
            # `from package import module` names the module only after `import`.
            yield from ((*parts, alias.name) for alias in node.names) if len(parts) == 1 else [parts]
        elif isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)


def upward_imports(module: tuple[str, ...], text: str) -> list[str]:
    """Imports of a module that no layer allows."""
    package = module[0]
    wrong = []
    for other in imports(text):
        if other[0] not in TOP:
            continue
        if other[0] != package:
            allowed = other[0] in TOP[package]
        elif len(module) < 2 or len(other) < 2 or module[1] == other[1]:
            allowed = len(module) > 1
        else:
            allowed = layer(package, module[1]) < layer(package, other[1])
        if not allowed:
            wrong.append(".".join(other))
    return wrong


def layer(package: str, unit: str) -> float:
    """Index of a unit's layer, 0 highest. Units of packages without a picture are all equal and below."""
    for index, units in enumerate(LAYERS.get(package, ())):
        if unit in units.split():
            return index
    return float("inf")


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_one_way(path: Path) -> None:
    module = module_of(path)
    if layer(module[0], module[1] if len(module) > 1 else "") == float("inf"):
        return
    assert upward_imports(module, path.read_text()) == []


def test_dashboards_read_only_the_definitions_of_metrics() -> None:
    for path in sorted((ROOT / "dashboards").rglob("*.py")):
        for other in imports(path.read_text()):
            assert other[0] != "engine" or other[:2] in {("engine", "metrics"), ("engine", "errors")}, path


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (("engine", "core", "x"), "from engine.workers.leader import Leader"),
        (("engine", "sampling", "x"), "from engine.core.request import Request"),
        (("engine", "model", "x"), "def f() -> None:\n    from engine.ipc import wire"),
        (("autoscale", "policy", "x"), "from autoscale.control import controller"),
        (("deployments", "settings"), "from deployments.http import keys"),
        (("engine", "core", "x"), "import autoscale.policy.goodput"),
        (("deployments", "app"), "from paceline.cli import main"),
        (("dashboards", "alerts"), "from deployments.settings import AppSettings"),
    ],
)
def test_an_upward_import_is_noticed(module: tuple[str, ...], text: str) -> None:
    assert len(upward_imports(module, text)) == 1


def test_every_unit_of_a_layered_package_has_a_layer() -> None:
    for package, layers in LAYERS.items():
        known = {unit for units in layers for unit in units.split()} | FREE.get(package, set())
        found = {module[1] for path in sources() if (module := module_of(path))[0] == package and len(module) > 1}
        assert found == known, package


def test_folders_and_files_fit_in_the_head() -> None:
    for path in sources():
        assert len(path.read_text().splitlines()) <= MAX_LINES, path
        assert len(module_of(path)) <= MAX_DEPTH + 1 + (path.parent.name == "native"), path
    for folder in {path.parent for path in sources()}:
        assert len(list(folder.glob("*.py"))) <= MAX_FILES, folder
