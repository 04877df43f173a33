"""Acceptance after a pause: whether the draft catches up with the tokens committed while it was not used.

Owns the comparison: acceptance under a fixed K, a pause at K = 0 under the same load, then the first drafts after it.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.load.meter import Meter, Window
from bench.load.streams import Streams
from bench.load.workload import Workload
from bench.pace.grid import FIRST_S, PER_STREAM_S
from bench.pace.paced_server import SETTLE_S, PacedServer

POLICY = "fixed-4"
NUM_DRAFTED = 200
"""Draft tokens of the window after a pause, at least."""
POLL_S = 0.1
LONGEST_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Pause:
    """Acceptance without a pause, and right after one."""

    before: Window
    """Window without a pause."""
    after: Window
    """Window of the first drafts after a pause."""


async def pause(
    server: PacedServer,
    workload: Workload,
    *,
    streams: int,
    rounds: int,
    pause_s: float,
    steady_s: float,
    max_tokens: int,
    report: Callable[[str], None],
    num_drafted: int = NUM_DRAFTED,
    first_s: float = FIRST_S,
) -> list[Pause]:
    """In each round draft for `steady_s`, pause for `pause_s`, then measure the next `num_drafted` draft tokens."""
    pauses = []
    async with Meter(server.targets) as meter, Streams(server.server, workload, max_tokens=max_tokens) as load:
        await load.resize(streams)
        await asyncio.sleep(first_s + PER_STREAM_S * streams)
        for turn in range(rounds):
            await server.follow(POLICY)
            before = await meter.over(steady_s)
            await server.follow("off")
            await asyncio.sleep(max(0.0, pause_s - SETTLE_S))
            begin = await meter.read()
            await server.follow(POLICY)
            after = Window.between(begin, await meter.read())
            for _ in range(int(LONGEST_WAIT_S / POLL_S)):
                if after.num_drafted >= num_drafted:
                    break
                await asyncio.sleep(POLL_S)
                after = Window.between(begin, await meter.read())
            pauses.append(Pause(before, after))
            report(f"round {turn + 1}: {before.acceptance} before, {after.acceptance} after ({after.num_drafted:.0f})")
    return pauses


def summary(pauses: Sequence[Pause], pause_s: float) -> str:
    """One line with both rates, their difference and its noise (two standard errors)."""
    drafted = [sum(window.num_drafted for window in part) for part in _parts(pauses)]
    accepted = [sum(window.num_accepted for window in part) for part in _parts(pauses)]
    if not all(drafted):
        return "nothing was drafted; is there a draft?"
    before, after = (a / d for a, d in zip(accepted, drafted, strict=True))
    # Tokens of one draft are accepted or rejected together, so a binomial distribution understates the noise. The
    # scatter between rounds does not.
    differences = [(p.after.acceptance or 0.0) - (p.before.acceptance or 0.0) for p in pauses]
    noise = 2 * math.sqrt(before * (1 - before) * (1 / drafted[0] + 1 / drafted[1]))
    if len(differences) > 1:
        noise = max(noise, 2 * statistics.stdev(differences) / math.sqrt(len(differences)))
    word = "within" if abs(after - before) <= noise else "OUTSIDE"
    return (
        f"acceptance {before:.3f} without a pause, {after:.3f} over {drafted[1]:.0f} drafted tokens after "
        f"{pause_s:.0f} s of K = 0: difference {after - before:+.3f}, {word} noise of {noise:.3f}"
    )


def _parts(pauses: Sequence[Pause]) -> tuple[list[Window], list[Window]]:
    return [one.before for one in pauses], [one.after for one in pauses]
