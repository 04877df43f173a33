"""How long the policy `goodput` takes to choose K for a batch, in three loads on a simulated machine.

    python -m bench.pace.choice_time --streams 32

Owns the loads and the timing. Only the choice is timed; the simulated step between two choices is not. The share of
steps with drafts is printed too: while drafting is off, one choice serves every batch and costs next to nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from autoscale.policy.goodput import make_goodput
from autoscale.simulation.hardware import HARDWARE
from autoscale.simulation.simulator import Simulation, Workload
from engine.core.pacing import KChoice, Pacer, Prediction, SpeculationPlan
from engine.core.request import Request
from engine.core.stats import StepStats

WINDOW_STEPS = 64
"""Steps over which the time is averaged: eight choices that hold for eight steps each."""
WARM_UP_WINDOWS = 2
CERTAINTY = 0.15
"""Spread of the confidences that the draft reports, where it reports any."""
ENDLESS = 10**9
"""Mean length of a response where no request may end."""


@dataclass(frozen=True, slots=True)
class Load:
    """One load."""

    name: str
    """Name in the table."""
    certainty: float
    """See `Workload`; 0 where the draft reports no confidences."""
    changes: bool
    """Whether every step has another batch than the step before."""


LOADS = (
    Load("steady batch", 0.0, changes=False),
    Load("early exit", CERTAINTY, changes=False),
    Load("another batch in every step", 0.0, changes=True),
    Load("another batch in every step, early exit", CERTAINTY, changes=True),
)


class TimedPacer:
    """A pacer that takes the time of each choice of another one."""

    def __init__(self, pacer: Pacer) -> None:
        self._pacer = pacer
        self.seconds: list[float] = []
        """Seconds of each choice."""
        self.num_drafting = 0
        """Choices with at least one K above 0."""

    def choose(self, plan: SpeculationPlan, decodes: Sequence[Request], num_prefill_rows: int) -> Sequence[KChoice]:
        """See `engine.core.pacing.Pacer`."""
        begin = time.perf_counter()
        choices = self._pacer.choose(plan, decodes, num_prefill_rows)
        self.seconds.append(time.perf_counter() - begin)
        self.num_drafting += any(choice.k for choice in choices)
        return choices

    def observe(self, stats: StepStats) -> Prediction:
        """See `engine.core.pacing.Pacer`."""
        return self._pacer.observe(stats)

    def window_us(self) -> list[float]:
        """Mean microseconds of a choice in each full window after the warm-up."""
        begins = range(WARM_UP_WINDOWS * WINDOW_STEPS, len(self.seconds) - WINDOW_STEPS + 1, WINDOW_STEPS)
        return [1e6 * statistics.fmean(self.seconds[begin : begin + WINDOW_STEPS]) for begin in begins]


def measure(load: Load, *, streams: int, max_k: int, hardware: str, simulated_s: float) -> TimedPacer:
    """Serve a load for some simulated seconds; returns the pacer with its times."""
    table = HARDWARE[hardware]()
    pacer = TimedPacer(make_goodput("draft_model", max_k, table))
    workload = Workload(load.name, 0.8, spread=0.1, certainty=load.certainty, mean_tokens=ENDLESS)
    Simulation(table, workload, _streams(streams, changes=load.changes)).run(
        pacer, SpeculationPlan(max_k=max_k), simulated_s
    )
    return pacer


def _streams(streams: int, *, changes: bool) -> Callable[[float], int]:
    """The number of streams by time. The simulator asks once a step: a request leaves in one step and another comes
    in the next."""
    num_steps = 0

    def count(now_s: float) -> int:
        nonlocal num_steps
        del now_s
        num_steps += 1
        return streams - (num_steps % 2) if changes else streams

    return count


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one row per load."""
    parser = argparse.ArgumentParser(prog="choice_time", description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--max-k", type=int, default=8)
    parser.add_argument("--hardware", choices=sorted(HARDWARE), default="h100-llama3-70b")
    parser.add_argument("--seconds", type=float, default=20.0, help="simulated seconds of each load (default: 20)")
    options = parser.parse_args(arguments)
    shown = Table("load", "best us", "median us", "worst us", "steps with drafts", title=f"{options.streams} streams")
    for load in LOADS:
        pacer = measure(
            load,
            streams=options.streams,
            max_k=options.max_k,
            hardware=options.hardware,
            simulated_s=options.seconds,
        )
        windows = pacer.window_us()
        if not windows:
            parser.error(f"--seconds: {options.seconds:g} given, which is shorter than the warm-up and one window")
        figures = [f"{figure:.1f}" for figure in (min(windows), statistics.median(windows), max(windows))]
        shown.add_row(load.name, *figures, f"{pacer.num_drafting / len(pacer.seconds):.0%}")
    Console().print(shown)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
