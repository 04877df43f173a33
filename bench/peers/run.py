"""`paceline bench peers`: this engine and other servers, one at a time, in rounds of alternating order.

Owns who takes part and the order of measurement: a server is started for its turn and stopped after it, so that
nothing else runs while one is measured. Medians over the rounds count.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import httpx
from rich.console import Console

from bench.engine_only.bare import bare_engine
from bench.engine_only.memory import read_bandwidth
from bench.load import servers
from bench.load.client import Run, run_load
from bench.load.workload import Workload, choose_workload, pick
from bench.peers.report import Report, Row, as_markdown, describe_machine, plot, write
from engine.checkpoint.store import EMBEDDED, resolve_model
from engine.errors import ConfigError, EngineUnavailable

VLLM_NGRAM = '{"method":"ngram","num_speculative_tokens":5,"prompt_lookup_max":4,"prompt_lookup_min":2}'

LLAMA_NGRAM = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "2", "--spec-ngram-simple-size-m", "5")

WARM_UP_TOKENS = 16

QUESTION = "What is the capital of France?"

SAMPLE_TIMEOUT_S = 120.0

Ask = Callable[[Sequence[str], int, dict[str, Any]], Run]
"""Send these prompts, so many at a time, with this merged into each body."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Somebody who can be asked now."""

    ask: Ask
    version: str
    sample: str = ""
    """What it answers to a simple question: a server that computes something else is easily fast."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One column of the report."""

    name: str
    start: Callable[[int], contextlib.AbstractContextManager[Ready]]
    """For at most so many streams."""
    is_peer: bool = True
    drafts: bool = False
    starts_by_level: bool = False
    """Its best configuration depends on the number of streams."""


def peers(options: argparse.Namespace) -> int:
    """Measure and report; exit status 1 if any request failed."""
    signal.signal(signal.SIGTERM, _endpoint)  # so that a server under test is stopped, too
    if options.quick:
        options.rounds, options.per_stream = 2, 1
    everybody = contenders(options)
    unknown = [name for name in options.only or () if name not in [one.name for one in everybody]]
    if unknown:
        raise ConfigError(f"--only: {unknown[0]!r} given; allowed: {', '.join(one.name for one in everybody)}")
    chosen = [one for one in everybody if not options.only or one.name in options.only]
    bandwidths: list[float] = []
    workload = choose_workload(options)
    rows = measure_peers(chosen, workload, options, bandwidths.append, Console(stderr=True).print)
    report = Report(
        machine=describe_machine(servers.num_cores()),
        workload=workload.name,
        max_tokens=options.max_tokens,
        bandwidth=max(bandwidths),
        weight_bytes=(resolve_model(EMBEDDED) / "model.safetensors").stat().st_size,
        rows=rows,
    )
    Console().print(as_markdown(report), markup=False, soft_wrap=True)
    write(report, options.out)
    if options.plot is not None:
        plot(report, options.plot)
    return 1 if any(row.num_errors for row in rows) else 0


def _endpoint(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise SystemExit(1)


def measure_peers(
    chosen: Sequence[Contender],
    workload: Workload,
    options: argparse.Namespace,
    on_bandwidth: Callable[[float], None],
    say: Callable[[str], None],
) -> tuple[Row, ...]:
    """All rounds of everybody who is installed and starts.

    Args:
        options: `streams`, `rounds`, `per_stream`, `at_least`, `max_tokens`.
        on_bandwidth: told before each round how fast memory reads.
        say: for people.
    """
    runs: dict[tuple[str, int], list[Run]] = {}
    versions: dict[str, str] = {}
    for turn in range(options.rounds):
        bandwidth = read_bandwidth()
        on_bandwidth(bandwidth)
        say(f"round {turn + 1}: memory reads at {bandwidth / 1e9:.1f} GB/s")
        for contender in chosen if turn % 2 == 0 else reversed(chosen):
            try:
                for count, run, version in _turn(contender, workload, options, turn, say):
                    runs.setdefault((contender.name, count), []).append(run)
                    versions[contender.name] = version
                    failed = f", errors: {run.errors[0]}" if run.errors else ""
                    say(f"{contender.name}, {count} streams: {run.tokens_per_s:.1f} tok/s{failed}")
            except servers.NotInstalled as missing:
                say(f"skipped {contender.name}: {missing}")
            except (EngineUnavailable, httpx.HTTPError) as broken:
                say(f"{contender.name} does not serve: {broken}")
    return tuple(
        Row(one.name, versions[one.name], one.is_peer, one.drafts, count, tuple(runs[one.name, count]))
        for count in options.streams
        for one in chosen
        if (one.name, count) in runs
    )


def contenders(options: argparse.Namespace) -> list[Contender]:
    """Everybody who may take part, installed or not; the order of the report."""
    draft = ["--draft", options.draft] if options.draft else []
    vllm, llama = options.vllm_python, options.llama_server
    return [
        Contender("engine alone", lambda _: _bare("none"), is_peer=False),
        Contender("paceline plain", lambda _: _over_http(servers.paceline(["--draft", "none"])), is_peer=False),
        Contender("paceline", lambda _: _over_http(servers.paceline(draft)), is_peer=False, drafts=True),
        Contender("vllm", lambda _: _over_http(servers.vllm(vllm, []))),
        Contender(
            "vllm ngram",
            lambda _: _over_http(servers.vllm(vllm, ["--speculative-config", VLLM_NGRAM])),
            drafts=True,
        ),
        Contender(
            "llama.cpp",
            lambda streams: _over_http(servers.llama_cpp(llama, [], streams=streams)),
            starts_by_level=True,
        ),
        Contender(
            "llama.cpp ngram",
            lambda streams: _over_http(servers.llama_cpp(llama, LLAMA_NGRAM, streams=streams)),
            drafts=True,
            starts_by_level=True,
        ),
        Contender("transformers", lambda _: _over_http(servers.transformers())),
    ]


def _turn(
    contender: Contender, workload: Workload, options: argparse.Namespace, turn: int, say: Callable[[str], None]
) -> Iterator[tuple[int, Run, str]]:
    """All numbers of streams, on prompts that depend on the number and the round alone."""
    levels = [[count] for count in options.streams] if contender.starts_by_level else [list(options.streams)]
    body = {"max_tokens": options.max_tokens} | workload.body
    for counts in levels:
        with contender.start(max(counts)) as ready:
            if ready.sample:
                say(f"{contender.name} says: {ready.sample}")
            for count in counts:
                prompts = pick(workload, max(count * options.per_stream, options.at_least), seed=1000 * count + turn)
                ready.ask(prompts[:count], count, body | {"max_tokens": WARM_UP_TOKENS})
                yield count, ready.ask(prompts, count, body), ready.version


@contextlib.contextmanager
def _over_http(starting: contextlib.AbstractContextManager[servers.Server]) -> Iterator[Ready]:
    with starting as server:
        yield Ready(partial(_ask_server, server), server.version, _sample(server))


def _sample(server: servers.Server) -> str:
    body: dict[str, Any] = {"model": server.model, "messages": [{"role": "user", "content": QUESTION}]}
    body |= {"max_tokens": WARM_UP_TOKENS, "temperature": 0}
    answer = httpx.post(f"{server.url}/chat/completions", json=body, timeout=SAMPLE_TIMEOUT_S)
    if answer.status_code != 200:
        raise EngineUnavailable(f"{answer.status_code}: {answer.text[:200]}")
    return str(answer.json()["choices"][0]["message"]["content"])


def _ask_server(server: servers.Server, prompts: Sequence[str], streams: int, body: dict[str, Any]) -> Run:
    return run_load(server.url, server.model, prompts, streams=streams, body=body)


@contextlib.contextmanager
def _bare(draft: str) -> Iterator[Ready]:
    with bare_engine(draft) as engine:
        yield Ready(
            lambda prompts, streams, body: engine.load(prompts, streams=streams, max_tokens=body["max_tokens"]), ""
        )
