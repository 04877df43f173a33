"""`paceline bench adaptation`: acceptance over time of a draft that learns, and what it costs the requests.

Owns the two measurements and their tables. Servers use a cache folder with everything but adapted weights, so that each
begins with the draft that ships, and none are left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.adaptation.price import SPECULATIVE, Price, measure
from bench.adaptation.workload import prompts
from bench.load.client import Response, run_load
from bench.load.meter import Meter
from bench.load.servers import Server, paceline
from deployments.monitoring.discovery import FOLDER_ENV
from engine.checkpoint.store import cache_folder

_PREFIX = "paceline_draft_adaptation_"


@dataclass(frozen=True, slots=True)
class Row:
    """Consecutive requests."""

    first: int
    """Number of the first one."""
    minutes: float
    """Since the first request, at the end of the last one."""
    tokens_per_step: float
    acceptance: float
    """Accepted over drafted tokens."""
    tpot_ms: float
    """Median time per token after the first, milliseconds."""


def adaptation(options: argparse.Namespace) -> int:
    """Measure, print and write; returns the exit status."""
    console = Console()
    if options.price:
        with _server(SPECULATIVE | {"adaptation": {"enabled": True, "cpu_share": options.cpu_share}}) as served:
            prices = measure(served.server, options.seed)
            counted = served.counted()
        console.print(_price_table(prices))
        console.print(_line(counted))
        figures: Any = {"prices": [asdict(price) for price in prices], "counted": counted}
    else:
        asked = prompts(options.requests, options.seed)
        learning, plain, counted = list[Row](), list[Row](), dict[str, float]()
        if options.only != "off":
            with _server(_speculative(options, on=True)) as served:
                learning = _curve(served.server, asked, options, options.pause, console)
                counted = served.counted()
        if options.only != "on":
            with _server(_speculative(options, on=False)) as served:
                plain = _curve(served.server, asked, options, 0.0, console)
        if not options.only:
            console.print(_curve_table(learning, plain))
        console.print(_line(counted))
        figures = {"on": [asdict(row) for row in learning], "off": [asdict(row) for row in plain], "counted": counted}
    if options.out is not None:
        options.out.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def tokens_per_step(responses: Sequence[Response]) -> float:
    """Each step yields its accepted tokens and one more."""
    tokens = sum(response.num_tokens for response in responses)
    return tokens / max(1, tokens - sum(response.num_accepted for response in responses))


def _speculative(options: argparse.Namespace, *, on: bool) -> dict[str, Any]:
    share = {"enabled": True, "cpu_share": options.cpu_share} if on else {}
    pace = {"policy": options.policy, "k": options.k, "lookup": not options.no_lookup}
    return {"draft": "smollm2-eagle", **pace, "adaptation": share}


def _curve(
    server: Server, asked: Sequence[str], options: argparse.Namespace, pause_s: float, console: Console
) -> list[Row]:
    rows, begin, size = [], time.monotonic(), max(1, len(asked) // options.rows)
    body = {"temperature": 0, "max_tokens": options.max_tokens}
    for first in range(0, len(asked), size):
        run = run_load(server.url, server.model, asked[first : first + size], streams=1, body=body, pause_s=pause_s)
        if run.errors:
            console.print(f"{len(run.errors)} requests failed: {run.errors[0]}")
        if not run.responses:
            continue
        minutes = (time.monotonic() - begin) / 60
        row = Row(first + 1, minutes, tokens_per_step(run.responses), run.acceptance or 0.0, 1000 * run.tpot_p50_s)
        console.print(f"{row}")
        rows.append(row)
    return rows


def _line(counted: dict[str, float]) -> str:
    return ", ".join(f"{name.removesuffix('_total')} {value:g}" for name, value in sorted(counted.items()))


def _price_table(prices: Sequence[Price]) -> Table:
    shown = Table(title="with adaptation and without, medians in milliseconds")
    for column in ("", "with", "without", "change", "standard error"):
        shown.add_column(column, justify="right")
    for each in prices:
        cells = (f"{each.with_ms:.2f}", f"{each.without_ms:.2f}", f"{each.change:+.1%}", f"{each.error:.1%}")
        shown.add_row(each.name, *cells)
    return shown


def _curve_table(learning: Sequence[Row], plain: Sequence[Row]) -> Table:
    shown = Table(title="one stream, greedy")
    names = ("tokens per step", "acceptance", "ms per token")
    for column in ("requests", "minutes", *(name for each in names for name in (each, "without"))):
        shown.add_column(column, justify="right")
    for on, off in zip(learning, plain, strict=False):
        cells = (on.tokens_per_step, off.tokens_per_step, on.acceptance, off.acceptance, on.tpot_ms, off.tpot_ms)
        shown.add_row(f"from {on.first}", f"{on.minutes:.1f}", *(f"{cell:.2f}" for cell in cells))
    return shown


@dataclass(frozen=True, slots=True)
class _Served:
    """A server, and the folder with the address of its metrics."""

    server: Server
    targets: Path

    def counted(self) -> dict[str, float]:
        """The metrics of adaptation, summed over their labels, by the rest of their names."""
        values = asyncio.run(self._read())
        return {name.removeprefix(_PREFIX): value for name, value in values.items() if name.startswith(_PREFIX)}

    async def _read(self) -> dict[str, float]:
        async with Meter(self.targets) as meter:
            return (await meter.read()).values


@contextlib.contextmanager
def _server(speculative: dict[str, Any]) -> Iterator[_Served]:
    """A server whose cache folder has no adapted weights."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        cache, targets = Path(name) / "cache", Path(name) / "targets"
        cache.mkdir()
        targets.mkdir()
        for entry in cache_folder().iterdir():
            if entry.name not in ("adaptation", "metrics-targets"):
                (cache / entry.name).symlink_to(entry)
        env = {"PACELINE_CACHE": str(cache), FOLDER_ENV: str(targets)}
        with paceline([], engine={"speculative": speculative}, env=env) as server:
            yield _Served(server, targets)
