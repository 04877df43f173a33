"""Variants compared in one run on one machine: rounds alternate in order, figures are medians.

Owns the order of measurement and the table. A variant is a server and the options of its requests. Variants that differ
only in options share a server, so that a comparison of two policies differs in nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.load.client import Rounds, Run, run_load
from bench.load.servers import Server
from bench.load.workload import Workload, pick


@dataclass(frozen=True, slots=True)
class Variant:
    """One column of the table."""

    name: str
    """Heading of the column."""
    server: Server
    """The server under load."""
    body: dict[str, Any] = field(default_factory=dict)
    """Fields that are added to every request."""


@dataclass(frozen=True, slots=True)
class Cell(Rounds):
    """All rounds of one variant at one number of streams."""

    variant: str
    workload: str
    streams: int
    runs: tuple[Run, ...]

    def as_json(self) -> dict[str, Any]:
        """The figures that `write` writes, rounded."""
        return {
            "variant": self.variant,
            "workload": self.workload,
            "streams": self.streams,
            "tokens_per_s": round(self.tokens_per_s, 1),
            "rounds": [round(run.tokens_per_s, 1) for run in self.runs],
            "ttft_p50_s": round(self.ttft_p50_s, 4),
            "tpot_p50_s": round(self.tpot_p50_s, 4),
            "acceptance": round(self.acceptance, 3) if self.acceptance is not None else None,
            "errors": self.num_errors,
        }


def measure(
    variants: Sequence[Variant],
    workload: Workload,
    *,
    streams: Sequence[int],
    rounds: int,
    per_stream: int,
    max_tokens: int,
    report: Callable[[str], None],
) -> list[Cell]:
    """Measure every variant at every number of streams. In a round the variants take turns on the same prompts."""
    cells = []
    for count in streams:
        runs: dict[str, list[Run]] = {variant.name: [] for variant in variants}
        for turn in range(rounds):
            number = max(count * per_stream, 4)
            prompts = pick(workload, number, seed=1000 * count + turn)
            order = variants if turn % 2 == 0 else list(reversed(variants))
            for variant in order:
                body = {"max_tokens": max_tokens} | workload.body | variant.body
                warm_up = prompts[: min(2, len(prompts))]
                if turn == 0:
                    run_load(variant.server.url, variant.server.model, warm_up, streams=1, body=body)
                run = run_load(variant.server.url, variant.server.model, prompts, streams=count, body=body)
                runs[variant.name].append(run)
                report(
                    f"{workload.name}, {count} streams, round {turn + 1}, {variant.name}: {run.tokens_per_s:.1f} tok/s"
                )
        cells += [Cell(name, workload.name, count, tuple(done)) for name, done in runs.items()]
    return cells


def show(cells: Sequence[Cell], *, baseline: str, console: Console) -> None:
    """One table per workload: tokens per second, ratio to the baseline, TTFT and TPOT medians, acceptance."""
    for workload in dict.fromkeys(cell.workload for cell in cells):
        mine = [cell for cell in cells if cell.workload == workload]
        table = Table(title=f"{workload}: tok/s (x {baseline}), TTFT / TPOT p50 ms")
        table.add_column("streams", justify="right")
        names = list(dict.fromkeys(cell.variant for cell in mine))
        for name in names:
            table.add_column(name, justify="right")
        for count in dict.fromkeys(cell.streams for cell in mine):
            row = {cell.variant: cell for cell in mine if cell.streams == count}
            base = row[baseline].tokens_per_s
            table.add_row(str(count), *(_cell_text(row[name], base) for name in names))
        console.print(table)


def _cell_text(cell: Cell, base: float) -> str:
    ttft_ms = 1e3 * cell.ttft_p50_s
    tpot_ms = 1e3 * cell.tpot_p50_s
    errors = f" {cell.num_errors} errors!" if cell.num_errors else ""
    accepted = f" acc {cell.acceptance:.2f}" if cell.acceptance is not None else ""
    return f"{cell.tokens_per_s:.1f} ({cell.tokens_per_s / base:.2f}) {ttft_ms:.0f} / {tpot_ms:.1f}{accepted}{errors}"


def write(cells: Sequence[Cell], path: Path) -> None:
    """Write JSON lines, one per cell."""
    path.write_text("".join(json.dumps(cell.as_json()) + "\n" for cell in cells))
