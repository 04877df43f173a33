"""`paceline simulate`, `paceline metrics` and `paceline settings`: what can be said without a server.

Knows the options and how the results are printed.
"""

from __future__ import annotations

import argparse
from typing import Any

HARDWARE_NAMES = ("cpu-smollm2", "h100-llama3-70b")
"""Keys of `autoscale.simulation.hardware.HARDWARE`, whose import takes longer than `--help` should."""
WORKLOAD_NAMES = ("adversarial", "chat", "code", "high temperature", "summarization")
"""Keys of `autoscale.simulation.simulator.WORKLOADS`."""


def add_report_parsers(commands: Any) -> None:
    """Add `simulate`, `metrics` and `settings` to the command's subparsers."""
    simulate = commands.add_parser(
        "simulate",
        help="compare policies on simulated hardware and load",
        description="Replay a closed-loop load through every policy. Prints goodput, its share of the oracle's, and "
        "how often drafting was switched on or off.",
    )
    simulate.add_argument("--hardware", choices=HARDWARE_NAMES, default="cpu-smollm2")
    simulate.add_argument("--workload", choices=WORKLOAD_NAMES, default="chat")
    simulate.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16, 32, 64], metavar="N")
    simulate.add_argument("--max-k", type=int, default=8, metavar="K")
    simulate.add_argument("--seconds", type=float, default=20.0, metavar="S", help="simulated time per cell")
    simulate.add_argument("--seed", type=int, default=0)
    simulate.set_defaults(run=_simulate)
    metrics = commands.add_parser("metrics", help="list every metric: name, type, labels, meaning")
    metrics.add_argument("--markdown", action="store_true", help="as the page in docs, with a query for each")
    metrics.set_defaults(run=_metrics)
    settings = commands.add_parser("settings", help="list every setting: name, default, allowed values, meaning")
    settings.add_argument("--markdown", action="store_true", help="as the page in docs")
    settings.set_defaults(run=_settings)


def _settings(options: argparse.Namespace) -> int:
    from deployments.settings_page import settings_lines, settings_markdown

    print(
        settings_markdown() if options.markdown else "\n".join(settings_lines()), end="" if options.markdown else "\n"
    )
    return 0


def _metrics(options: argparse.Namespace) -> int:
    from dashboards.metrics_page import metrics_lines, metrics_markdown

    print(metrics_markdown() if options.markdown else "\n".join(metrics_lines()), end="" if options.markdown else "\n")
    return 0


def _simulate(options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from autoscale.simulation.compare import FIXED_COLUMNS, compare
    from autoscale.simulation.hardware import HARDWARE
    from autoscale.simulation.simulator import WORKLOADS

    table = Table(title=f"{options.workload} on {options.hardware}: tokens/s (share of the oracle, switches)")
    columns = [*FIXED_COLUMNS, "threshold", "goodput"]
    for name in ["streams", "oracle", *columns]:
        table.add_column(name, justify="right")
    for streams in options.streams:
        outcomes = compare(
            HARDWARE[options.hardware](),
            WORKLOADS[options.workload],
            streams=streams,
            max_k=options.max_k,
            duration_s=options.seconds,
            seed=options.seed,
        )
        best = outcomes["oracle"].goodput
        cells = [f"{o.goodput:.0f} ({o.goodput / best:.2f}, {o.switches})" for o in (outcomes[c] for c in columns)]
        table.add_row(str(streams), f"{best:.0f}", *cells)
    Console().print(table)
    return 0
