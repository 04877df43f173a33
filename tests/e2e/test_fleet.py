"""Several nodes are one service: one entry node loads the replicas of all nodes, and a session stays with one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deployments.local.ports import free_port

pytestmark = pytest.mark.ray

PROGRAM = Path(__file__).parents[1] / "support" / "fleet.py"


def test_one_entry_uses_the_replicas_of_both_nodes() -> None:
    """Serve's own router leaves the second node without a request; ours gives no replica over 1.3 times the mean."""
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
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(found["load"]) == 2, found
    assert max(found["load"]) <= 1.3 * sum(found["load"]) / 2, found
    assert found["nodes_of_a_session"] == 1, found
    assert max(found["serve"]) > max(found["load"]), found
