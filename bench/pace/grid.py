"""Policies compared in every cell of streams and workload, on one server under a continuous load.

Owns the order: in each round every policy has one window, in an order that changes from round to round, and gets the
same prompts. Figures are medians over rounds; ratios are within a cell. Does not start servers.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.load.meter import Meter, Window, add_errors, quantile
from bench.load.streams import Streams
from bench.load.workload import Workload
from bench.pace.paced_server import PacedServer
from engine.errors import EngineUnavailable

STATIC = ("off", "fixed")
"""Prefixes of the names of policies that do not depend on the load."""
FIRST_S, PER_STREAM_S = 2.0, 0.15
"""Seconds from the start of a load until its prompts are computed: fixed, and per stream."""
KEPT_OF_BEST, KEPT_OF_OFF = 0.97, 0.98
"""Shares of the best static policy and of `off` that `goodput` must reach in every cell."""


@dataclass(frozen=True, slots=True)
class GridCell:
    """One policy at one number of streams of one workload."""

    policy: str
    """Name of the policy."""
    workload: str
    """Name of the workload."""
    streams: int
    """Number of streams."""
    windows: tuple[Window, ...]
    """One window per round."""

    @property
    def tokens_per_s(self) -> float:
        """Median over rounds of the tokens per second."""
        return statistics.median(window.tokens_per_s for window in self.windows)

    @property
    def is_static(self) -> bool:
        """Whether the policy does not depend on the load."""
        return self.policy.startswith(STATIC)

    def as_json(self) -> dict[str, Any]:
        """The figures that `--out` writes, rounded."""
        errors = add_errors([window.errors for window in self.windows])
        return {
            "policy": self.policy,
            "workload": self.workload,
            "streams": self.streams,
            "tokens_per_s": round(self.tokens_per_s, 2),
            "rounds": [round(window.tokens_per_s, 2) for window in self.windows],
            "mean_k": round(statistics.mean(window.mean_k for window in self.windows), 3),
            "acceptance": _mean_acceptance(self.windows),
            "mean_batch": round(statistics.mean(window.mean_batch for window in self.windows), 2),
            "switches": sum(window.num_switches for window in self.windows),
            "cost_error_p50": round(quantile(errors, 0.5), 4),
            "cost_error_p95": round(quantile(errors, 0.95), 4),
        }


def _mean_acceptance(windows: Sequence[Window]) -> float | None:
    drafted = sum(window.num_drafted for window in windows)
    return round(sum(window.num_accepted for window in windows) / drafted, 3) if drafted else None


async def run_cells(
    server: PacedServer,
    workload: Workload,
    policies: Sequence[str],
    *,
    streams: Sequence[int],
    rounds: int,
    seconds: float,
    max_tokens: int,
    report: Callable[[str], None],
    warm_s: Callable[[int], float] = lambda count: FIRST_S + PER_STREAM_S * count,
) -> list[GridCell]:
    """Measure all cells of one workload, `seconds` per policy and round.

    Raises:
        EngineUnavailable: the server emits no token within a window.
    """
    cells = []
    async with Meter(server.targets) as meter, Streams(server.server, workload, max_tokens=max_tokens) as load:
        await load.resize(max(streams))  # until the prompts are in the prefix cache
        await asyncio.sleep(warm_s(max(streams)))
        for count in streams:
            windows: dict[str, list[Window]] = {policy: [] for policy in policies}
            await load.resize(count)
            for turn in range(rounds):
                await load.restart(turn)  # unmeasured, or the first policy alone would compute the round's prompts
                await asyncio.sleep(min(seconds, warm_s(count)))
                for policy in turned(policies, turn):
                    await load.restart(turn)
                    await server.follow(policy)
                    window = await meter.over(seconds)
                    if not window.tokens_per_s:
                        first = f", first: {load.errors[0]}" if load.errors else ""
                        raise EngineUnavailable(
                            f"{workload.name}, {count} streams, {policy}: no token was emitted in {seconds:g} s; "
                            f"{len(load.errors)} requests failed{first}"
                        )
                    windows[policy].append(window)
                    report(
                        f"{workload.name}, {count} streams, round {turn + 1}, {policy}: "
                        f"{window.tokens_per_s:.1f} tok/s, K {window.mean_k:.2f}, batch {window.mean_batch:.1f}"
                    )
            cells += [GridCell(name, workload.name, count, tuple(done)) for name, done in windows.items()]
        for error in load.errors[:5]:
            report(f"[red]{error}[/red]")
    return cells


def turned(policies: Sequence[str], turn: int) -> list[str]:
    """The policies in the order of a round. It is rotated and reversed, so that none always follows the same one."""
    shift = (turn // 2) % len(policies)
    order = [*policies[shift:], *policies[:shift]]
    return order if turn % 2 == 0 else order[::-1]


@dataclass(frozen=True, slots=True)
class CellResult:
    """One cell of a policy, compared with the static policies."""

    workload: str
    """Name of the workload."""
    streams: int
    """Number of streams."""
    of_best: float
    """Tokens per second over those of the best static policy."""
    best: str
    """Name of the best static policy."""
    of_off: float | None
    """Tokens per second over those of `off`; None where that was not measured."""

    @property
    def holds(self) -> bool:
        """Whether both ratios reach their bounds."""
        return self.of_best >= KEPT_OF_BEST and (self.of_off is None or self.of_off >= KEPT_OF_OFF)


def compare_with_static(cells: Sequence[GridCell], policy: str = "goodput") -> list[CellResult]:
    """One result per streams and workload in which the policy and a static one were measured."""
    results = []
    for cell_key in dict.fromkeys((cell.workload, cell.streams) for cell in cells):
        mine = {cell.policy: cell for cell in cells if (cell.workload, cell.streams) == cell_key}
        static = [cell for cell in mine.values() if cell.is_static]
        if policy not in mine or not static:
            continue
        reached = mine[policy].tokens_per_s
        best = max(static, key=lambda cell: cell.tokens_per_s)
        of_off = reached / mine["off"].tokens_per_s if "off" in mine else None
        results.append(CellResult(*cell_key, reached / best.tokens_per_s, best.policy, of_off))
    return results


def show(cells: Sequence[GridCell], console: Console) -> None:
    """Print a table per workload, the comparison with static policies, and the error of the cost model."""
    for workload in dict.fromkeys(cell.workload for cell in cells):
        console.print(_table(workload, [cell for cell in cells if cell.workload == workload]))
    results = compare_with_static(cells)
    if results:
        worst = min(results, key=lambda result: result.of_best)
        held = sum(result.holds for result in results)
        console.print(
            f"goodput: {held} of {len(results)} cells hold {KEPT_OF_BEST} x best static and {KEPT_OF_OFF} x off; "
            f"worst {worst.of_best:.3f} x {worst.best} ({worst.workload}, {worst.streams} streams)"
        )
    for name in dict.fromkeys(cell.policy for cell in cells):
        errors = add_errors([window.errors for cell in cells if cell.policy == name for window in cell.windows])
        console.print(
            f"cost model under {name}: error p50 {quantile(errors, 0.5):.1%}, p95 {quantile(errors, 0.95):.1%}, "
            f"{max(errors.values(), default=0):.0f} steps"
        )


def _table(workload: str, cells: Sequence[GridCell]) -> Table:
    names = list(dict.fromkeys(cell.policy for cell in cells))
    table = Table(title=f"{workload}: tok/s (x off) K, acceptance; goodput also x best static")
    for name in ("streams", *names):
        table.add_column(name, justify="right")
    results = {result.streams: result for result in compare_with_static(cells)}
    for count in dict.fromkeys(cell.streams for cell in cells):
        row = {cell.policy: cell for cell in cells if cell.streams == count}
        off = row["off"].tokens_per_s if "off" in row else None
        texts = [_text(row[name], off, results.get(count)) if name in row else "" for name in names]
        table.add_row(str(count), *texts)
    return table


def _text(cell: GridCell, off: float | None, result: CellResult | None) -> str:
    text = f"{cell.tokens_per_s:.1f}"
    if off:
        text += f" ({cell.tokens_per_s / off:.2f})"
    accepted = _mean_acceptance(cell.windows)
    if accepted is not None:
        text += f" {statistics.mean(window.mean_k for window in cell.windows):.1f}, {accepted:.2f}"
    if cell.policy == "goodput" and result is not None:
        text += f" = {result.of_best:.2f} best" + ("" if result.holds else " !")
    return text
