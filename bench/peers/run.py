"""`paceline bench peers`: Paceline and other servers, one at a time, in rounds of alternating order.

Owns the contenders and the order of measurement. A server is started for its turn and stopped after it, so that nothing
else runs while it is measured. Figures are medians over rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
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
from deployments.local.weights import model_bytes
from engine.checkpoint.store import EMBEDDED, resolve_model
from engine.config import EngineConfig
from engine.errors import ConfigError, EngineUnavailable

VLLM_NGRAM = '{"method":"ngram","num_speculative_tokens":5,"prompt_lookup_max":4,"prompt_lookup_min":2}'

LLAMA_NGRAM = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "2", "--spec-ngram-simple-size-m", "5")

WARM_UP_TOKENS = 16

QUESTION = "What is the capital of France?"

SAMPLE_TIMEOUT_S = 120.0

Send = Callable[[Sequence[str], int, dict[str, Any]], Run]
"""Sends prompts, with a number of streams and fields that are added to each request."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A contender that is ready."""

    send: Send
    """Runs a load."""
    version: str
    """Version for the report."""
    weight_bytes: int = 0
    """Bytes of its weights in memory; 0 where that is not known."""
    sample: str = ""
    """Response to a simple question, as evidence that the contender runs the same model."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One column of the report."""

    name: str
    """Heading of the column."""
    start: Callable[[int], contextlib.AbstractContextManager[Ready]]
    """Starts it for at most this number of streams."""
    is_peer: bool = True
    """Whether it is another server than Paceline."""
    drafts: bool = False
    """Whether it uses speculative decoding."""
    starts_by_level: bool = False
    """Whether it is started separately for each number of streams, because its best configuration depends on it."""


def peers(options: argparse.Namespace) -> int:
    """Measure and report; returns the exit status: 1 if any request failed."""
    signal.signal(signal.SIGTERM, _leave)  # so that a server under test is stopped, too
    if options.quick:
        options.rounds, options.per_stream = 2, 1
    known = contenders(options)
    unknown = [name for name in options.only or () if name not in [one.name for one in known]]
    if unknown:
        raise ConfigError(f"--only: {unknown[0]!r} given; allowed: {', '.join(one.name for one in known)}")
    chosen = [one for one in known if not options.only or one.name in options.only]
    bandwidths: list[float] = []
    workload = choose_workload(options)
    rows = measure_peers(chosen, workload, options, bandwidths.append, Console(stderr=True).print)
    report = Report(
        machine=describe_machine(servers.num_cores()),
        workload=workload.name,
        max_tokens=options.max_tokens,
        bandwidth=max(bandwidths),
        rows=rows,
    )
    Console().print(as_markdown(report), markup=False, soft_wrap=True)
    write(report, options.out)
    if options.plot is not None:
        plot(report, options.plot)
    return 1 if any(row.num_errors for row in rows) else 0


def _leave(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise SystemExit(1)


def measure_peers(
    chosen: Sequence[Contender],
    workload: Workload,
    options: argparse.Namespace,
    on_bandwidth: Callable[[float], None],
    say: Callable[[str], None],
) -> tuple[Row, ...]:
    """Measure all rounds of every contender that is installed and starts.

    Args:
        chosen: the contenders, in the order of the first round.
        workload: of every contender.
        options: `streams`, `rounds`, `per_stream`, `at_least`, `max_tokens`.
        on_bandwidth: called before each round with the bytes per second of reading memory.
        say: takes lines of progress.
    """
    runs: dict[tuple[str, int], list[Run]] = {}
    known: dict[str, Ready] = {}
    for turn in range(options.rounds):
        bandwidth = read_bandwidth()
        on_bandwidth(bandwidth)
        say(f"round {turn + 1}: memory reads at {bandwidth / 1e9:.1f} GB/s")
        for contender in chosen if turn % 2 == 0 else reversed(chosen):
            try:
                for count, run, ready in _turn(contender, workload, options, turn, say):
                    runs.setdefault((contender.name, count), []).append(run)
                    known[contender.name] = ready
                    failed = f", errors: {run.errors[0]}" if run.errors else ""
                    say(f"{contender.name}, {count} streams: {run.tokens_per_s:.1f} tok/s{failed}")
            except servers.NotInstalled as missing:
                say(f"skipped {contender.name}: {missing}")
            except (EngineUnavailable, httpx.HTTPError) as broken:
                say(f"{contender.name} does not serve: {broken}")
    return tuple(
        Row(
            name=one.name,
            version=known[one.name].version,
            is_peer=one.is_peer,
            drafts=one.drafts,
            streams=count,
            runs=tuple(runs[one.name, count]),
            weight_bytes=known[one.name].weight_bytes,
        )
        for count in options.streams
        for one in chosen
        if (one.name, count) in runs
    )


def contenders(options: argparse.Namespace) -> list[Contender]:
    """All contenders, installed or not, in the order of the report."""
    draft = ["--draft", options.draft] if options.draft else []
    vllm, llama = options.vllm_python, options.llama_server
    return [
        Contender("engine alone", lambda _: _bare("none"), is_peer=False),
        Contender("paceline plain", lambda _: _over_http(servers.paceline(["--draft", "none"])), is_peer=False),
        Contender(
            "paceline plain bf16",
            lambda _: _over_http(servers.paceline(["--draft", "none"], engine={"packed": "off"})),
            is_peer=False,
        ),
        Contender("paceline", lambda _: _over_http(servers.paceline(draft)), is_peer=False, drafts=True),
        Contender("vllm", lambda _: _over_http(servers.vllm(vllm, []))),
        Contender(
            "vllm ngram",
            lambda _: _over_http(servers.vllm(vllm, ["--speculative-config", VLLM_NGRAM])),
            drafts=True,
        ),
        _llama(llama, "llama.cpp", "bf16"),
        _llama(llama, "llama.cpp same file", "packaged"),
        _llama(llama, "llama.cpp Q8_0", "Q8_0"),
        _llama(llama, "llama.cpp Q4_K_M", "Q4_K_M"),
        Contender(
            "llama.cpp ngram",
            lambda streams: _over_http(servers.llama_cpp(llama, LLAMA_NGRAM, streams=streams)),
            drafts=True,
            starts_by_level=True,
        ),
        Contender("transformers", lambda _: _over_http(servers.transformers())),
    ]


def _llama(binary: Path, name: str, weights: servers.LlamaWeights) -> Contender:
    """llama.cpp's server with weights of one form."""
    return Contender(
        name,
        lambda streams: _over_http(servers.llama_cpp(binary, [], streams=streams, weights=weights)),
        starts_by_level=True,
    )


def _turn(
    contender: Contender, workload: Workload, options: argparse.Namespace, turn: int, say: Callable[[str], None]
) -> Iterator[tuple[int, Run, Ready]]:
    """All numbers of streams, on prompts that depend on the number and the round alone."""
    levels = [[count] for count in options.streams] if contender.starts_by_level else [list(options.streams)]
    body = {"max_tokens": options.max_tokens} | workload.body
    for counts in levels:
        with contender.start(max(counts)) as ready:
            if ready.sample:
                say(f"{contender.name} responds: {ready.sample}")
            for count in counts:
                prompts = pick(workload, max(count * options.per_stream, options.at_least), seed=1000 * count + turn)
                ready.send(prompts[:count], count, body | {"max_tokens": WARM_UP_TOKENS})
                yield count, ready.send(prompts, count, body), ready


@contextlib.contextmanager
def _over_http(starting: contextlib.AbstractContextManager[servers.Server]) -> Iterator[Ready]:
    with starting as server:
        yield Ready(partial(_send_to_server, server), server.version, server.weight_bytes, _sample(server))


def _sample(server: servers.Server) -> str:
    body: dict[str, Any] = {"model": server.model, "messages": [{"role": "user", "content": QUESTION}]}
    body |= {"max_tokens": WARM_UP_TOKENS, "temperature": 0}
    response = httpx.post(f"{server.url}/chat/completions", json=body, timeout=SAMPLE_TIMEOUT_S)
    if response.status_code != 200:
        raise EngineUnavailable(f"{response.status_code}: {response.text[:200]}")
    return str(response.json()["choices"][0]["message"]["content"])


def _send_to_server(server: servers.Server, prompts: Sequence[str], streams: int, body: dict[str, Any]) -> Run:
    return run_load(server.url, server.model, prompts, streams=streams, body=body)


@contextlib.contextmanager
def _bare(draft: str) -> Iterator[Ready]:
    with bare_engine(draft) as engine:
        yield Ready(
            lambda prompts, streams, body: engine.load(prompts, streams=streams, max_tokens=body["max_tokens"]),
            version="",
            weight_bytes=model_bytes(EngineConfig.parse({"model": EMBEDDED, "device": "cpu"}), resolve_model(EMBEDDED))[
                0
            ],
        )
