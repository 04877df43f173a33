"""Report of `paceline bench peers`: tables for the docs, raw figures, a plot.

Owns the definition of each figure. Ratios are to the best peer that takes part.
"""

from __future__ import annotations

import datetime
import json
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.load.client import Rounds, Run
from engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Row(Rounds):
    """All rounds of one contender at one number of streams."""

    name: str
    """Name of the contender."""
    version: str
    """Version of the contender; empty where it reports none."""
    is_peer: bool
    """Whether it is another server than Paceline."""
    drafts: bool
    """Whether it uses speculative decoding."""
    streams: int
    """Number of streams."""
    runs: tuple[Run, ...]
    """One run per round."""
    weight_bytes: int = 0
    """Bytes of its weights in memory, which a step without drafts reads once; 0 where that is not known."""


@dataclass(frozen=True, slots=True)
class Report:
    """One run of the benchmark."""

    machine: dict[str, Any]
    """See `describe_machine`."""
    workload: str
    """Name of the workload."""
    max_tokens: int
    """Upper bound of the length of a response."""
    bandwidth: float
    """Measured bytes per second of reading memory."""
    rows: tuple[Row, ...]
    """Figures by contender and number of streams."""

    def roofline(self, row: Row) -> float:
        """Bytes of weights read per second by one stream at one token per step, over the bandwidth.

        Without drafts it cannot exceed 1. With drafts it can, because one read of the weights yields several tokens.
        """
        return row.weight_bytes / row.tpot_p50_s / self.bandwidth

    def of(self, name: str, streams: int) -> Row | None:
        """The row of a contender and number of streams; None where it was not measured."""
        return next((row for row in self.rows if (row.name, row.streams) == (name, streams)), None)

    @property
    def names(self) -> list[str]:
        """Contenders, in the order of the rows."""
        return list(dict.fromkeys(row.name for row in self.rows))

    @property
    def streams(self) -> list[int]:
        """Numbers of streams, in the order of the rows."""
        return list(dict.fromkeys(row.streams for row in self.rows))


def describe_machine(num_cores: int) -> dict[str, Any]:
    """Processor, cores, system and time of the measurement."""
    model = platform.processor() or platform.machine()
    for line in _lines(Path("/proc/cpuinfo")):
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    now = datetime.datetime.now(datetime.UTC)
    return {"cpu": model, "cores": num_cores, "system": platform.platform(), "date": now.strftime("%Y-%m-%d %H:%M UTC")}


def as_markdown(report: Report) -> str:
    """Two tables: the figures of every contender, and ratios between contenders."""
    machine = report.machine
    versions = {row.name: row.version for row in report.rows if row.version}
    sizes = {row.name: row.weight_bytes / 1e6 for row in report.rows if row.weight_bytes}
    rounds = max((len(row.runs) for row in report.rows), default=0)
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, every server with {machine['cores']} threads, "
        f"memory reads at {report.bandwidth / 1e9:.1f} GB/s; {machine['date']}. Workload {report.workload}, "
        f"greedy, at most {report.max_tokens} tokens, median of {rounds} rounds."
        + "".join(f" {name}: {version}." for name, version in versions.items())
        + (" Weights in MB: " + ", ".join(f"{name} {size:.0f}" for name, size in sizes.items()) + "." if sizes else ""),
        "",
        "Tokens per second (TTFT p50 ms, TPOT p50 ms, share of the roofline):",
        "",
        *_table(["streams", *report.names], _figures(report)),
        "",
        "Ratios:",
        "",
        *_table(["streams", *_RATIOS], _ratios(report)),
    ]
    return "\n".join(lines) + "\n"


def write(report: Report, path: Path | None) -> None:
    """Write raw figures as JSON, and the tables as Markdown with the same file name; nothing where the path is None."""
    if path is None:
        return
    rows = [
        {
            "name": row.name,
            "version": row.version,
            "streams": row.streams,
            "tokens_per_s": round(row.tokens_per_s, 1),
            "rounds": [round(run.tokens_per_s, 1) for run in row.runs],
            "ttft_p50_s": round(row.ttft_p50_s, 4),
            "tpot_p50_s": round(row.tpot_p50_s, 5),
            "weight_bytes": row.weight_bytes,
            "roofline": round(report.roofline(row), 3),
            "tokens_per_response": round(
                statistics.mean(response.num_tokens for run in row.runs for response in run.responses), 1
            )
            if any(run.responses for run in row.runs)
            else None,
            "acceptance": round(row.acceptance, 3) if row.acceptance is not None else None,
            "errors": row.num_errors,
        }
        for row in report.rows
    ]
    about = {
        "machine": report.machine,
        "workload": report.workload,
        "max_tokens": report.max_tokens,
        "read_bytes_per_s": round(report.bandwidth),
    }
    path.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    path.with_suffix(".md").write_text(as_markdown(report))


def plot(report: Report, path: Path) -> None:
    """Write a PNG file: tokens per second and TTFT over the number of streams.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ConfigError("--plot: matplotlib is not installed; pip install matplotlib") from None
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for index, name in enumerate(report.names):
        rows = [row for row in report.rows if row.name == name]
        counts = [row.streams for row in rows]
        style = {"color": f"C{index}", "linestyle": "-" if rows[0].is_peer is False else "--", "marker": "o"}
        left.plot(counts, [row.tokens_per_s for row in rows], label=name, **style)
        right.plot(counts, [1e3 * row.ttft_p50_s for row in rows], **style)
    for panel, title in ((left, "tokens per second"), (right, "TTFT p50, ms")):
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=2)
        panel.set_xticks(report.streams, [str(count) for count in report.streams])
        panel.yaxis.set_major_formatter("{x:g}")
        panel.set_xlabel("streams")
        panel.set_title(title)
        panel.grid(visible=True, alpha=0.3)
    figure.legend(loc="outside lower center", ncols=max(1, len(report.names)), frameon=False)
    figure.savefig(path, dpi=130)


SAME_FILE = "llama.cpp same file"
"""Contender with the blocks that Paceline serves by default."""
_RATIOS = (
    "plain / best peer without drafts",
    "plain / llama.cpp, same file",
    "plain / plain bf16",
    "paceline / best peer",
    "TTFT / best TTFT of a peer",
    "paceline / plain",
    "plain / engine alone",
)


def _figures(report: Report) -> Iterable[list[str]]:
    for count in report.streams:
        cells = [str(count)]
        for name in report.names:
            row = report.of(name, count)
            cells.append("-" if row is None else _cell(report, row))
        yield cells


def _cell(report: Report, row: Row) -> str:
    errors = f", {row.num_errors} errors" if row.num_errors else ""
    share = f", {report.roofline(row):.0%}" if row.weight_bytes else ""
    figures = f"{1e3 * row.ttft_p50_s:.0f}, {1e3 * row.tpot_p50_s:.1f}{share}"
    return f"{row.tokens_per_s:.0f} ({figures}{errors})"


def _ratios(report: Report) -> Iterable[list[str]]:
    for count in report.streams:
        peers = [row for row in report.rows if row.is_peer and row.streams == count]
        plain_peers = [row for row in peers if not row.drafts]
        plain, paced = report.of("paceline plain", count), report.of("paceline", count)
        bare = report.of("engine alone", count)
        ttft = min((row.ttft_p50_s for row in peers), default=None)
        yield [
            str(count),
            _over(plain, _best(plain_peers)),
            _over(plain, report.of(SAME_FILE, count)),
            _over(plain, report.of("paceline plain bf16", count)),
            _over(paced, _best(peers)),
            "-" if plain is None or not ttft else f"{plain.ttft_p50_s / ttft:.2f}",
            _over(paced, plain),
            _over(plain, bare),
        ]


def _best(rows: Sequence[Row]) -> Row | None:
    return max(rows, key=lambda row: row.tokens_per_s, default=None)


def _over(one: Row | None, other: Row | None) -> str:
    return "-" if one is None or other is None else f"{one.tokens_per_s / other.tokens_per_s:.2f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
