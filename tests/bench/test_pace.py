"""`bench pace`: windows count what the server counted, policies take turns, results follow from medians."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from loopback_http import listening
from rich.console import Console

from bench.load.meter import Window, add_errors, quantile
from bench.load.servers import Server
from bench.load.workload import built_in
from bench.pace import grid, ramp, resume
from bench.pace.choice_time import LOADS, WARM_UP_WINDOWS, WINDOW_STEPS, Load
from bench.pace.choice_time import measure as measure_choices
from bench.pace.grid import GridCell, compare_with_static, run_cells, turned
from bench.pace.paced_server import PacedServer, plan_of
from bench.pace.plot import plot
from engine.config import SpeculativeConfig
from engine.errors import ConfigError

SPEEDS = {"off": 100.0, "fixed": 200.0, "goodput": 150.0}
KEY = "k"


class PretendedServer:
    """Chat that takes a while, counters that grow at a speed that the policy decides, and the admin route."""

    def __init__(self) -> None:
        self.policy = "off"
        self.tokens = self.drafted = 0.0
        self.running = self.most = 0
        self.policies: list[str] = []
        self._at = time.monotonic()

    def count(self) -> None:
        now = time.monotonic()
        self.tokens += SPEEDS[self.policy] * (now - self._at)
        self.drafted += 50 * (now - self._at) * (self.policy != "off")
        self._at = now

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.count()
        self.running += 1
        response = web.StreamResponse()
        try:
            await response.prepare(request)
            await asyncio.sleep(0.1)
            await response.write(b"data: [DONE]\n\n")
        finally:
            self.count()
            self.running -= 1
        return response

    async def pace(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.Response(status=401)
        self.count()
        self.policy = (await request.json())["policy"]
        self.policies.append(self.policy)
        return web.json_response({})

    async def metrics(self, request: web.Request) -> web.Response:
        self.count()
        self.most = max(self.most, self.running)  # here and not above: streams that hung up are noticed a little later
        lines = [
            f"paceline_emitted_tokens_total {self.tokens}",
            f"paceline_verdicts_total {self.tokens / 2}",
            f"paceline_drafted_tokens_total {self.drafted}",
            f"paceline_accepted_tokens_total {self.drafted / 2}",
            f'paceline_switches_total{{cause="gain"}} {len(self.policies)}',
            'paceline_switches_total{cause="plan"} 99',
        ]
        return web.Response(text="\n".join(lines) + "\n")


@pytest.fixture
def pretended(tmp_path: Path) -> Iterator[tuple[PretendedServer, PacedServer]]:
    served = PretendedServer()
    routes = (
        web.post("/v1/chat/completions", served.chat),
        web.patch("/admin/pace", served.pace),
        web.get("/metrics", served.metrics),
    )
    with listening(*routes) as port:
        (tmp_path / "one.json").write_text(json.dumps([{"targets": [f"127.0.0.1:{port}"], "labels": {}}]))
        yield served, PacedServer(Server(f"http://127.0.0.1:{port}/v1", "m"), tmp_path, KEY)


def test_the_grid_measures_each_policy_in_turns(pretended: tuple[PretendedServer, PacedServer]) -> None:
    served, server = pretended
    cells = asyncio.run(
        run_cells(
            server,
            built_in()["chat"],
            ["off", "fixed-4", "goodput"],
            streams=[2],
            rounds=2,
            seconds=1.0,
            max_tokens=64,
            report=lambda _: None,
            warm_s=lambda _: 0.1,
        )
    )
    assert served.policies == ["off", "fixed", "goodput", "goodput", "fixed", "off"]
    assert served.most == 2
    rates = {cell.policy: cell.tokens_per_s for cell in cells}
    for name, rate in rates.items():
        assert rate == pytest.approx(SPEEDS[name.partition("-")[0]], rel=0.2)
    (result,) = compare_with_static(cells)
    assert (result.best, result.workload, result.streams) == ("fixed-4", "chat", 2)
    assert [cell.as_json()["acceptance"] for cell in cells] == [None, 0.5, 0.5]


def test_the_ramp_goes_up_and_down_and_sees_drafting_come_back(
    pretended: tuple[PretendedServer, PacedServer],
) -> None:
    _, server = pretended
    levels = ramp.up_and_down([2, 1])
    assert levels == [1, 2, 1]
    arguments: dict[str, Any] = {
        "levels": levels,
        "rounds": 1,
        "seconds": 0.3,
        "max_tokens": 64,
        "report": lambda _: None,
        "first_s": 0.1,
    }
    climbs = asyncio.run(ramp.climb(server, built_in()["chat"], ["off", "goodput"], **arguments))
    assert [len(one.windows) for one in climbs] == [3, 3]
    assert climbs[1].back_s is not None
    assert climbs[1].back_s < 2
    ramp.show(climbs[1:], levels, Console(quiet=True))


def test_a_pause_is_compared_with_no_pause(pretended: tuple[PretendedServer, PacedServer]) -> None:
    served, server = pretended
    arguments: dict[str, Any] = {
        "streams": 1,
        "rounds": 1,
        "pause_s": 1.0,
        "steady_s": 1.0,
        "max_tokens": 64,
        "num_drafted": 50,
        "first_s": 0.1,
    }
    pauses = asyncio.run(resume.pause(server, built_in()["chat"], report=lambda _: None, **arguments))
    assert served.policies == ["fixed", "off", "fixed"]
    assert pauses[0].after.num_drafted >= 50
    assert "within" in resume.summary(pauses, 1.0)


def window(rate: float) -> Window:
    return Window(
        seconds=1.0,
        tokens=rate,
        num_verdicts=rate,
        num_drafted=0,
        num_accepted=0,
        num_switches=0,
        mean_batch=1.0,
        errors={0.1: 10.0, math.inf: 12.0},
    )


def cell(policy: str, *rates: float, workload: str = "chat", streams: int = 1) -> GridCell:
    return GridCell(policy, workload, streams, tuple(window(rate) for rate in rates))


def test_a_cell_compares_medians_with_the_best_static_policy(tmp_path: Path) -> None:
    cells = [cell("off", 100, 90, 110), cell("fixed-4", 80, 80, 200), cell("threshold", 500), cell("goodput", 96, 99)]
    cells += [cell("off", 10, streams=8), cell("fixed-4", 20, streams=8), cell("goodput", 20, streams=8)]
    one, eight = compare_with_static(cells)
    assert (one.best, one.of_best, one.holds) == ("off", 0.975, False)
    assert (eight.best, eight.of_best, eight.of_off, eight.holds) == ("fixed-4", 1.0, 2.0, True)
    with (tmp_path / "out").open("w") as file:
        grid.show(cells, Console(width=200, file=file))
    text = (tmp_path / "out").read_text()
    assert "1 of 2 cells hold" in text
    assert "error p50" in text
    pytest.importorskip("matplotlib")
    plot(cells, tmp_path / "grid.png")
    assert (tmp_path / "grid.png").read_bytes().startswith(b"\x89PNG")


@given(st.integers(1, 6))
def test_turns_are_fair(number: int) -> None:
    names = [f"p{i}" for i in range(number)]
    orders = [turned(names, turn) for turn in range(4 * number)]
    assert all(sorted(order) == names for order in orders)
    for position in range(number):
        assert {order[position] for order in orders} == set(names)


def test_quantiles_of_a_cumulative_histogram() -> None:
    errors = {0.05: 50.0, 0.1: 90.0, 0.5: 100.0, math.inf: 100.0}
    assert quantile(errors, 0.25) == pytest.approx(0.025)
    assert quantile(errors, 0.7) == pytest.approx(0.075)
    assert quantile(add_errors([errors, errors]), 0.95) == pytest.approx(0.3)
    assert math.isnan(quantile({0.1: 0.0, math.inf: 0.0}, 0.5))


def test_policies_by_name() -> None:
    assert plan_of("fixed-3") == {"policy": "fixed", "max_k": 3}
    for wrong in ("fixed-0", "fixed-9", "fixed", "none"):
        with pytest.raises(ConfigError, match="--policies"):
            plan_of(wrong)
    assert SpeculativeConfig().wrong_drafts is False


@pytest.mark.parametrize("load", LOADS, ids=[load.name for load in LOADS])
def test_choices_are_timed_one_by_one_while_drafts_pay(load: Load) -> None:
    pacer = measure_choices(load, streams=4, max_k=8, hardware="h100-llama3-70b", simulated_s=8.0)
    num_windows = len(pacer.seconds) // WINDOW_STEPS - WARM_UP_WINDOWS
    assert len(pacer.window_us()) == num_windows > 0
    assert pacer.window_us()[0] == pytest.approx(1e6 * sum(pacer.seconds[128:192]) / 64)
    assert pacer.num_drafting > 0.8 * len(pacer.seconds)
