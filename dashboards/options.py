"""Options of `paceline dashboards ...`.

Owns the parser only. The actions are in `dashboards.commands`, which is imported when one runs, so that `--help` loads
no renderer.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_dashboards_parser(subparsers: Any) -> None:
    """Add `dashboards` and its actions to the subparsers of a command. Each action sets `run`."""
    parser = subparsers.add_parser("dashboards", help="Grafana dashboards and Prometheus alert rules")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    install = actions.add_parser("install", help="write the dashboards into a folder of a Grafana")
    install.add_argument("--grafana", required=True, metavar="URL", help="such as http://127.0.0.1:3000")
    install.add_argument(
        "--token",
        help="service account token that may write dashboards and folders (default: $GRAFANA_TOKEN); "
        "or give user:password in the URL",
    )
    install.add_argument("--timeout", type=float, default=10.0, metavar="S", help="seconds per call")
    install.set_defaults(run=_run("install"))
    render = actions.add_parser("render", help="write the dashboards' JSON and the alert rules")
    render.add_argument("--out", type=Path, metavar="DIR", help="folder to write to (default: the package)")
    render.add_argument("--check", action="store_true", help="write nothing; status 1 if the files are not current")
    render.set_defaults(run=_run("render"))


def _run(name: str) -> Any:
    def run(options: argparse.Namespace) -> int:
        from dashboards import commands

        status: int = getattr(commands, name)(options)
        return status

    return run
