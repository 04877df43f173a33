"""The files that Grafana and Prometheus read, from the boards and alerts in this package.

Owns the list of files and their exact content, so that a test can compare the committed files with it.
"""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from dashboards import fleet, serving, speculation
from dashboards.alerts import alerts, rules
from dashboards.grafana_json import SELECTOR, WINDOW, to_json
from dashboards.model import Board
from dashboards.promql import Scope

PACKAGE = Path(__file__).parent
HEADER = "# Rendered from dashboards/alerts.py by `paceline dashboards render`; change it there.\n"


def boards() -> tuple[Board, ...]:
    """The dashboards, with Grafana's template variables as their scope."""
    scope = Scope(SELECTOR, WINDOW)
    return speculation.board(scope), serving.board(scope), fleet.board(scope)


def rendered() -> dict[Path, str]:
    """Content of every file by its path below the package folder."""
    files = {
        Path("rendered", f"{board.name}.json"): json.dumps(to_json(board), indent=1, ensure_ascii=False) + "\n"
        for board in boards()
    }
    text = yaml.safe_dump(rules(alerts()), sort_keys=False, width=118, allow_unicode=True)
    return files | {Path("rules.yaml"): HEADER + text}


def stale(folder: Path = PACKAGE) -> list[Path]:
    """Paths in `folder` that are missing, outdated, or dashboards that no board renders."""
    files = rendered()
    differing = [path for path, text in files.items() if _read(folder / path) != text]
    extra = [path.relative_to(folder) for path in sorted(folder.glob("rendered/*.json"))]
    return differing + [path for path in extra if path not in files]


def write(folder: Path = PACKAGE) -> list[Path]:
    """Write every file below `folder`; returns their paths."""
    written = []
    for path, text in rendered().items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        written.append(target)
    return written


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None
