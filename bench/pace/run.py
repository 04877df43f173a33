"""`paceline bench pace`: the grid, the cost of an unused draft, the ramp, the pause.

Owns which servers are started for which measurement, and what is printed and written.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable

import uvloop
from rich.console import Console

from bench.load import servers
from bench.load.workload import Workload, built_in, read
from bench.pace import grid, ramp, resume
from bench.pace.compare import Variant, measure
from bench.pace.compare import show as show_variants
from bench.pace.paced_server import PacedServer, paced, plan_of
from bench.pace.plot import plot
from engine.errors import ConfigError

ADVERSARIAL = "adversarial"
"""Name of the workload `chat` with a draft that is always rejected."""


def pace(options: argparse.Namespace) -> int:
    """Run one measurement; returns the exit status: 1 when a request failed."""
    console, progress = Console(), Console(stderr=True)
    for policy in options.policies:
        plan_of(policy)
    for action in ("tax", "ramp", "resume"):
        if getattr(options, action):
            return _ACTIONS[action](options, console, progress.print)
    return _grid(options, console, progress.print)


def _grid(options: argparse.Namespace, console: Console, report: Callable[[str], None]) -> int:
    names = options.categories or options.workload
    by_draft = {False: [name for name in names if name != ADVERSARIAL], True: [n for n in names if n == ADVERSARIAL]}
    cells: list[grid.GridCell] = []
    for wrong, mine in by_draft.items():
        if not mine:
            continue
        with paced(options.draft, wrong=wrong) as server:
            for name in mine:
                cells += uvloop.run(_cells(server, workload_of(name, options), options, report))
                _keep(cells, options)
    grid.show(cells, console)
    return 0


def _keep(cells: list[grid.GridCell], options: argparse.Namespace) -> None:
    """Write after every workload, so that an interrupted run leaves its figures."""
    if options.out is not None:
        options.out.write_text("".join(json.dumps(cell.as_json()) + "\n" for cell in cells))
    if options.plot is not None:
        plot(cells, options.plot)


async def _cells(
    server: PacedServer, workload: Workload, options: argparse.Namespace, report: Callable[[str], None]
) -> list[grid.GridCell]:
    return await grid.run_cells(
        server,
        workload,
        options.policies,
        streams=options.streams,
        rounds=options.rounds,
        seconds=options.seconds,
        max_tokens=options.max_tokens,
        report=report,
    )


def _tax(options: argparse.Namespace, console: Console, report: Callable[[str], None]) -> int:
    """The same prompts without a draft, with a draft under `off`, and with a draft that `goodput` keeps at K = 0."""
    workload = workload_of(options.workload[0], options)
    with contextlib.ExitStack() as stack:
        none = stack.enter_context(servers.paceline(["--draft", "none"]))
        off = stack.enter_context(paced(options.draft))
        held = stack.enter_context(paced(options.draft, wrong=True))
        uvloop.run(off.follow("off"))
        uvloop.run(held.follow("goodput"))
        variants = [Variant("none", none), Variant("off", off.server), Variant("goodput at K = 0", held.server)]
        cells = measure(
            variants,
            workload,
            streams=options.streams,
            rounds=options.rounds,
            per_stream=options.per_stream,
            max_tokens=options.max_tokens,
            report=report,
        )
    show_variants(cells, baseline="none", console=console)
    if options.out is not None:
        options.out.write_text("".join(json.dumps(cell.as_json()) + "\n" for cell in cells))
    return 1 if any(cell.num_errors for cell in cells) else 0


def _ramp(options: argparse.Namespace, console: Console, report: Callable[[str], None]) -> int:
    levels = ramp.up_and_down(options.streams)
    with paced(options.draft) as server:
        climbs = uvloop.run(
            ramp.climb(
                server,
                workload_of(options.workload[0], options),
                options.policies,
                levels=levels,
                rounds=options.rounds,
                seconds=options.seconds,
                max_tokens=options.max_tokens,
                report=report,
            )
        )
    ramp.show(climbs, levels, console)
    return 0


def _resume(options: argparse.Namespace, console: Console, report: Callable[[str], None]) -> int:
    with paced(options.draft) as server:
        pauses = uvloop.run(
            resume.pause(
                server,
                workload_of(options.workload[0], options),
                streams=max(options.streams),
                rounds=options.rounds,
                pause_s=options.resume,
                steady_s=options.seconds,
                max_tokens=options.max_tokens,
                report=report,
            )
        )
    console.print(resume.summary(pauses, options.resume))
    return 0


_ACTIONS: dict[str, Callable[[argparse.Namespace, Console, Callable[[str], None]], int]] = {
    "tax": _tax,
    "ramp": _ramp,
    "resume": _resume,
}


def workload_of(name: str, options: argparse.Namespace) -> Workload:
    """A built-in workload, or a category of the prompt file.

    Raises:
        ConfigError: the name is neither.
    """
    known = built_in()
    if name == ADVERSARIAL:
        return Workload(ADVERSARIAL, known["chat"].prompts, known["chat"].body)
    if name in known:
        return known[name]
    if options.prompts is None:
        raise ConfigError(
            f"--workload: {name!r} given; allowed: {', '.join(known)}, {ADVERSARIAL}, or with --prompts a category"
        )
    return read(options.prompts, category=None if name == "all" else name)
