"""What `paceline bench pace` and `paceline bench peers` do: which servers, which variants, in which order."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from rich.console import Console

from bench import servers
from bench.compare import Cell, Variant, measure, show, write
from bench.workload import Workload, built_in, read
from engine.errors import ConfigError

DEEPEST_K = 8
VLLM_NGRAM = '{"method":"ngram","num_speculative_tokens":5,"prompt_lookup_max":4,"prompt_lookup_min":2}'


def pace(options: argparse.Namespace) -> int:
    """The policies asked for, each on a server that is up all the time, so that rounds can alternate."""
    draft = ["--draft", options.draft, "--k", str(DEEPEST_K)]
    starts = {
        "none": ["--draft", "none"],
        "threshold": ["--draft", options.draft, "--k", "5", "--policy", "threshold"],
        "goodput": [*draft, "--policy", "goodput"],
        "fixed": [*draft, "--policy", "fixed"],  # serves every fixed K, and off, by what the requests say
    }
    up: dict[str, servers.Server] = {}
    with contextlib.ExitStack() as stack:
        variants = []
        for name in options.policies:
            kind, body = _policy(name)
            if kind not in up:
                up[kind] = stack.enter_context(servers.paceline(starts[kind]))
            variants.append(Variant(name, up[kind], body))
        return _compare(options, variants, baseline=options.policies[0])


def _policy(name: str) -> tuple[str, dict[str, Any]]:
    """The kind of server a policy needs, and what its requests say.

    Raises:
        ConfigError: there is no such policy.
    """
    if name in ("none", "threshold", "goodput"):
        return name, {}
    if name == "off":
        return "fixed", {"speculative": {"enabled": False}}
    prefix, _, k = name.partition("-")
    if prefix == "fixed" and k.isdigit() and 1 <= int(k) <= DEEPEST_K:
        return "fixed", {"speculative": {"max_k": int(k)}}
    raise ConfigError(
        f"--policies: {name!r} given; allowed: none, off, fixed-1 to fixed-{DEEPEST_K}, threshold, goodput"
    )


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
