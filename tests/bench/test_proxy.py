"""`bench proxy`: every process has one role, and figures are CPU time over tokens."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from bench.proxy.run import CLIENT, ENGINE, PROXY, REPLICA, REST, Reading, cpu_by_role, per_token_us, role_of, table


@pytest.mark.parametrize(
    ("command", "role"),
    [
        (["ray::ServeReplica:paceline:Replica"], REPLICA),
        (["ray::ProxyActor"], PROXY),
        (["/opt/haproxy/haproxy", "-W"], PROXY),
        (["ray::ShardActor.run"], ENGINE),
        (["ray::DraftActor.run"], ENGINE),
        (["ray::ServeController"], REST),
        (["raylet/raylet", "--node_name=ServeReplica"], REST),
        ([], REST),
    ],
)
def test_a_process_has_one_role(command: list[str], role: str) -> None:
    assert role_of(command) == role


def test_figures_are_medians_over_turns_and_ratios_to_the_direct_port() -> None:
    proxy = [Reading(1000.0, {REPLICA: s, PROXY: 0.3}) for s in (0.2, 0.1, 0.9)]
    direct = [Reading(500.0, {REPLICA: 0.05})]
    assert per_token_us(proxy, REPLICA) == pytest.approx(200)
    assert per_token_us(proxy, ENGINE) == 0
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table(8, {"proxy": proxy, "direct": direct}))
    shown = [line.split("│")[1:-1] for line in console.export_text().splitlines() if "│" in line]
    assert [cell.strip() for cell in shown[-1]] == ["over direct", "5.00", "1.00"]


def test_the_own_process_is_the_load_generator() -> None:
    assert cpu_by_role()[CLIENT] > 0
