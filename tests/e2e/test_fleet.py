"""Several nodes are one service: one entry node loads the replicas of all nodes, and a session stays with one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deployments.local.ports import free_port

pytestmark = pytest.mark.ray

PROGRAM = Path(__file__).parents[1] / "support" / "fleet.py"


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What the program saw on its two nodes."""
    env = os.environ | {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(free_port())],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=env,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    seen: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return seen


def test_one_entry_uses_the_replicas_of_both_nodes(found: dict[str, Any]) -> None:
    """Serve's own router leaves the second node without a request; ours gives no replica over 1.3 times the mean."""
    assert len(found["load"]) == 2, found
    assert max(found["load"]) <= 1.3 * sum(found["load"]) / 2, found
    assert found["nodes_of_a_session"] == 1, found
    assert max(found["serve"]) > max(found["load"]), found


def test_device_auto_asks_the_whole_cluster(found: dict[str, Any]) -> None:
    """The first node, where the application is built, has no GPU; the second has two."""
    assert found["devices"] == {"1": "cuda", "2": "cuda", "4": "cpu", "4 on demand": "cuda"}


def test_the_targets_of_a_lost_node_are_no_longer_listed(found: dict[str, Any]) -> None:
    assert found["targets"] == ["first", "second"]
    assert found["targets_after_node_death"] == ["first"]
