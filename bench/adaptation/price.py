"""What adaptation costs the requests, on one server: neighbours in one run are compared, so that drift cancels.

Owns the two comparisons. With pauses, the trainer runs in the pause before one request and stands still in the pause
before the next. Without pauses, one request is learned from and the next one is not. K is fixed and lookup is off, so
that a step takes the same time whatever is accepted.
"""

from __future__ import annotations

import math
import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from bench.adaptation.workload import prompts
from bench.load.client import Response, run_load
from bench.load.servers import Server
from engine.errors import EngineUnavailable

SPECULATIVE = {"draft": "smollm2-eagle", "k": 4, "policy": "fixed", "lookup": False}
_BEFORE, _PAIRS = 48, 40
"""Requests before the measurement, and pairs of requests of each comparison."""
_PAUSE_S, _RESUMES_S = 0.7, 0.2
"""A pause, and the part of it after which the trainer has been let go on."""
_BODY = {"temperature": 0, "max_tokens": 48}


@dataclass(frozen=True, slots=True)
class Price:
    """One figure of the requests of a comparison, in milliseconds."""

    name: str
    with_ms: float
    """Median over requests."""
    without_ms: float
    change: float
    """Mean over pairs of the relative difference, after the tenth of the pairs at either end is left out."""
    error: float
    """Its standard error."""


def measure(server: Server, seed: int) -> list[Price]:
    """Both comparisons on a server whose draft learns.

    Raises:
        EngineUnavailable: there is no trainer.
    """
    asked = prompts(_BEFORE + 4 * _PAIRS, seed)
    run_load(server.url, server.model, asked[:_BEFORE], streams=1, body=_BODY)
    trainer = _trainer()
    middle = _BEFORE + 2 * _PAIRS

    def paused(prompt: str, *, is_with: bool) -> Response:
        time.sleep(_RESUMES_S)
        if not is_with:  # It is let go on once per pause, so it stands still until the request ends.
            trainer.send_signal(signal.SIGSTOP)
        time.sleep(_PAUSE_S - _RESUMES_S)
        return _one(server, prompt, {})

    def busy(prompt: str, *, is_with: bool) -> Response:
        return _one(server, prompt, {"speculative": {"learn": is_with}})

    first, second = (_pairs(part, ask) for part, ask in ((asked[_BEFORE:middle], paused), (asked[middle:], busy)))
    return [
        _price("trainer, time per step", first, step_ms),
        _price("trainer, first token", first, lambda response: 1000 * response.ttft_s),
        _price("collecting, time per step", second, step_ms),
        _price("collecting, first token", second, lambda response: 1000 * response.ttft_s),
    ]


def step_ms(response: Response) -> float:
    """Milliseconds per verify step after the first token."""
    steps = response.num_tokens - response.num_accepted - 1
    return 1000 * (response.total_s - response.ttft_s) / max(1, steps)


def trimmed(changes: Sequence[float]) -> tuple[float, float]:
    """Mean without the tenth at either end, and its standard error (Tukey and McLaughlin 1963)."""
    ordered = sorted(changes)
    cut = len(ordered) // 10
    kept = ordered[cut : len(ordered) - cut]
    winsorised = [kept[0]] * cut + kept + [kept[-1]] * cut
    error = statistics.stdev(winsorised) / ((1 - 2 * cut / len(ordered)) * math.sqrt(len(ordered)))
    return statistics.mean(kept), error


def _pairs(asked: Sequence[str], ask: Callable[..., Response]) -> list[tuple[Response, Response]]:
    """Responses with and without, of neighbours; which one comes first alternates."""
    made = []
    for index in range(0, len(asked) - 1, 2):
        order = (True, False) if index % 4 else (False, True)
        found = {is_with: ask(asked[index + place], is_with=is_with) for place, is_with in enumerate(order)}
        made.append((found[True], found[False]))
    return made


def _price(name: str, pairs: Sequence[tuple[Response, Response]], figure: Callable[[Response], float]) -> Price:
    values = [(figure(one), figure(other)) for one, other in pairs]
    change, error = trimmed([one / other - 1 for one, other in values])
    return Price(name, statistics.median(v for v, _ in values), statistics.median(v for _, v in values), change, error)


def _one(server: Server, prompt: str, more: dict[str, Any]) -> Response:
    run = run_load(server.url, server.model, [prompt], streams=1, body=_BODY | more)
    if not run.responses:
        raise EngineUnavailable(f"a request failed: {run.errors[0]}")
    return run.responses[0]


def _trainer() -> psutil.Process:
    """The trainer among the processes below this one."""
    for process in psutil.Process(os.getpid()).children(recursive=True):
        if "distill.online" in process.cmdline():
            return process
    for process in psutil.process_iter(["cmdline", "uids"]):  # Ray's processes leave the tree of those that start them.
        if "distill.online" in (process.info["cmdline"] or ()) and process.info["uids"].real == os.getuid():
            return process
    raise EngineUnavailable("no trainer runs")
