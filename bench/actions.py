"""What `paceline bench peers` does: which servers, which variants, in which order."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
from collections.abc import Callable, Sequence
from importlib.metadata import version

from rich.console import Console

from bench import servers
from bench.compare import Cell, Variant, measure, show, write
from bench.workload import Workload, built_in, read
from engine.errors import ConfigError

VLLM_NGRAM = '{"method":"ngram","num_speculative_tokens":5,"prompt_lookup_max":4,"prompt_lookup_min":2}'


def peers(options: argparse.Namespace) -> int:
    """Paceline without and with drafting, and whichever peers are installed."""
    console = Console(stderr=True)
    draft = ["--draft", options.draft] if options.draft else []
    with contextlib.ExitStack() as stack:
        variants = [
            Variant("paceline plain", stack.enter_context(servers.paceline(["--draft", "none"]))),
            Variant("paceline", stack.enter_context(servers.paceline(draft))),
        ]
        launchers: dict[str, Callable[[], contextlib.AbstractContextManager[servers.Server]]] = {
            "vllm": lambda: servers.vllm(options.vllm_python, []),
            "vllm ngram": lambda: servers.vllm(options.vllm_python, ["--speculative-config", VLLM_NGRAM]),
            "llama.cpp": lambda: servers.llama_cpp(options.llama_server, streams=max(options.streams)),
        }
        for name, launch in launchers.items():
            try:
                variants.append(Variant(name, stack.enter_context(launch())))
            except servers.NotInstalled as missing:
                console.print(f"[yellow]skipped {name}[/yellow]: {missing}")
        return _compare(options, variants, baseline="paceline plain")


def _compare(options: argparse.Namespace, variants: Sequence[Variant], *, baseline: str) -> int:
    console = Console()
    progress = Console(stderr=True)
    console.print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {version('torch')}, ray {version('ray')}, greedy unless the workload says otherwise"
    )
    cells: list[Cell] = []
    for workload in _workloads(options):
        cells += measure(
            variants,
            workload,
            streams=options.streams,
            rounds=options.rounds,
            per_stream=options.per_stream,
            max_tokens=options.max_tokens,
            report=progress.print,
        )
    show(cells, baseline=baseline, console=console)
    if options.out is not None:
        write(cells, options.out)
    return 1 if any(cell.num_errors for cell in cells) else 0


def _workloads(options: argparse.Namespace) -> list[Workload]:
    if options.prompts is not None:
        return [read(options.prompts, category=name) for name in options.categories or [None]]
    known = built_in()
    unknown = [name for name in options.workload if name not in known]
    if unknown:
        raise ConfigError(f"--workload: {unknown[0]!r} given; allowed: {', '.join(known)}")
    return [known[name] for name in options.workload]
