"""`paceline doctor`: prints what this machine gives to a server.

Knows how findings are printed; `deployments.local.doctor` makes them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

_MARKS = {"ok": "[green]ok[/green]", "note": "[yellow]note[/yellow]", "fail": "[red]fail[/red]"}


def add_doctor_parser(commands: Any) -> None:
    """Add `doctor` to the command's subparsers."""
    doctor = commands.add_parser(
        "doctor",
        help="check whether this machine can serve, and how fast",
        description="One screen of what this machine gives: interpreter, torch build, GPUs, kernel, memory, ports, "
        "cache. Exits with status 1, and the remedy, where serving cannot work.",
    )
    doctor.add_argument("--config", type=Path, help="deployment file to check against (default: the shipped one)")
    doctor.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from deployments.local import yaml_config
    from deployments.local.doctor import examine

    values = yaml_config.load(options.config or yaml_config.DEFAULT_FILE)
    console = Console()
    with Console(stderr=True).status("Examining this machine"):
        findings = examine(values)
    table = Table(box=None, pad_edge=False)
    for name in ("", "what", "found"):
        table.add_column(name, overflow="fold")
    for finding in findings:
        remedy = f"\n→ {escape(finding.remedy)}" if finding.remedy else ""
        table.add_row(_MARKS[finding.status], finding.name, escape(finding.value) + remedy)
    console.print(table)
    failed = [finding.name for finding in findings if finding.status == "fail"]
    console.print(f"Serving cannot work here: {', '.join(failed)}" if failed else "This machine can serve.")
    return 1 if failed else 0
