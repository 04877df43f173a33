"""A load that rises and falls under each policy: tokens per second at each level, and when drafting resumes.

Owns the levels and their order. Server and load are the same throughout. Each policy runs through all levels; rounds
alternate in order.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from bench.load.meter import Meter, Window
from bench.load.streams import Streams
from bench.load.workload import Workload
from bench.pace.grid import FIRST_S, PER_STREAM_S, STATIC, turned
from bench.pace.paced_server import PacedServer

POLL_S = 0.1
LONGEST_WAIT_S = 10.0
KEPT_OF_BEST = 0.95
"""Share of the best static policy below which a level of `goodput` is marked."""


@dataclass(frozen=True, slots=True)
class Climb:
    """One policy, once up and down."""

    policy: str
    """Name of the policy."""
    windows: tuple[Window, ...]
    """One window per level."""
    num_switches: float
    """Switches that the policy decided."""
    back_s: float | None
    """Seconds from the fall of the load to the first draft; None where it took longer than LONGEST_WAIT_S."""


async def climb(
    server: PacedServer,
    workload: Workload,
    policies: Sequence[str],
    *,
    levels: Sequence[int],
    rounds: int,
    seconds: float,
    max_tokens: int,
    report: Callable[[str], None],
    first_s: float = FIRST_S,
) -> list[Climb]:
    """Run every policy `rounds` times, with `seconds` per level after the time that new streams need to start."""
    climbs = []
    async with Meter(server.targets) as meter, Streams(server.server, workload, max_tokens=max_tokens) as load:
        for turn in range(rounds):
            for policy in turned(policies, turn):
                await server.follow(policy)
                climbs.append(await _climb(meter, load, policy, levels, seconds, first_s))
                rates = " ".join(f"{window.tokens_per_s:.0f}" for window in climbs[-1].windows)
                report(f"round {turn + 1}, {policy}: {rates} tok/s, {climbs[-1].num_switches:.0f} switches")
    return climbs


async def _climb(
    meter: Meter, load: Streams, policy: str, levels: Sequence[int], seconds: float, first_s: float
) -> Climb:
    windows = []
    begin = await meter.read()
    back_s: float | None = None
    before = 0
    for index, level in enumerate(levels):
        fallen_s = time.monotonic()
        await load.resize(level)
        if level < before and index == len(levels) - 1:
            back_s = await _drafting_again(meter, fallen_s)
        await load.restart(index)  # every policy gets the same prompts at this level
        await asyncio.sleep(first_s + PER_STREAM_S * max(0, level - before))
        windows.append(await meter.over(seconds))
        before = level
    return Climb(policy, tuple(windows), (await meter.read()).switches - begin.switches, back_s)


async def _drafting_again(meter: Meter, since_s: float) -> float | None:
    name = "paceline_drafted_tokens_total"
    first = (await meter.read()).values.get(name, 0.0)
    while time.monotonic() - since_s < LONGEST_WAIT_S:
        if (await meter.read()).values.get(name, 0.0) > first:
            return time.monotonic() - since_s
        await asyncio.sleep(POLL_S)
    return None


def show(climbs: Sequence[Climb], levels: Sequence[int], console: Console) -> None:
    """Print tokens per second by level, and of `goodput` also the ratio to the best static policy of the level."""
    names = list(dict.fromkeys(one.policy for one in climbs))
    rates = {
        name: [
            statistics.median(one.windows[i].tokens_per_s for one in climbs if one.policy == name) for i in _at(levels)
        ]
        for name in names
    }
    static = [name for name in names if name.startswith(STATIC)]
    table = Table(title="up and down: tok/s by level")
    for column in ("streams", *names):
        table.add_column(column, justify="right")
    for index, level in enumerate(levels):
        best = max((rates[name][index] for name in static), default=None)
        table.add_row(str(level), *(_text(name, rates[name][index], best) for name in names))
    console.print(table)
    for name in names:
        mine = [one for one in climbs if one.policy == name]
        waits = [f"{one.back_s:.1f}" if one.back_s is not None else f"over {LONGEST_WAIT_S:.0f}" for one in mine]
        switches = ", ".join(f"{one.num_switches:.0f}" for one in mine)
        console.print(f"{name}: switches {switches}; seconds until drafting after the load fell: {', '.join(waits)}")


def _at(levels: Sequence[int]) -> range:
    return range(len(levels))


def _text(name: str, rate: float, best: float | None) -> str:
    if name != "goodput" or not best:
        return f"{rate:.1f}"
    return f"{rate:.1f} = {rate / best:.2f} best" + ("" if rate >= KEPT_OF_BEST * best else " !")


def up_and_down(streams: Sequence[int]) -> list[int]:
    """The levels of a ramp: 1 2 4 becomes 1 2 4 2 1."""
    rising = sorted(set(streams))
    return [*rising, *rising[-2::-1]]
