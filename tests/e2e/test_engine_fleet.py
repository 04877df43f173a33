"""Engines on several nodes are one service: replicas follow the load, and upgrades and dead nodes are survived.

What is seen comes from a program (`tests/support/engine_fleet.py`), because its nodes must not find Paceline outside of
the zip that it deploys.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_models import write_model
from tiny_tokenizer import byte_level

pytestmark = pytest.mark.ray

PROGRAM = Path(__file__).parents[1] / "support" / "engine_fleet.py"


def course(what: str, models: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), what, str(models)],
        capture_output=True,
        text=True,
        timeout=480,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr[-6000:]
    seen: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return seen


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two random models with one tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("first", "second")):
        write_model(folder / name, "llama", seed=seed, vocab_size=400, max_position_embeddings=4096)
        byte_level().save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def life(models: Path) -> dict[str, Any]:
    return course("life", models)


def test_replicas_follow_the_load_and_no_request_fails(life: dict[str, Any]) -> None:
    """From one to three, because fifteen streams fill three batches, and back to one without load.

    The program waits for each number and ends with an error if it does not come.
    """
    assert life["failures_while_scaling"] == []
    assert {"up_s", "desired_s", "down_s", "files_gone_s"} <= life.keys()


def test_the_load_is_shared_evenly(life: dict[str, Any]) -> None:
    """Requests in flight, of one reading in each of several moments."""
    assert len(life["in_flight"]) == 3
    assert max(life["in_flight"]) <= 1.3 * sum(life["in_flight"]) / 3, life


def test_nothing_is_refused_while_another_replica_has_room(life: dict[str, Any]) -> None:
    """Two replicas have places for all requests of a burst, three replicas are there. Sessions spill as well."""
    assert life["burst"] == life["burst_of_a_session"] == {"200": 32}


@pytest.mark.slow  # Hashing and timing may take it past its bound in one run of about twenty.
def test_chats_find_their_prefix_cache_on_several_replicas(life: dict[str, Any]) -> None:
    assert life["cached_share_of_one"] > 0.5
    assert life["cached_share_of_three"] >= 0.95 * life["cached_share_of_one"]


def test_a_new_model_replaces_the_old_one_under_load_and_no_request_fails(life: dict[str, Any]) -> None:
    assert life["failures_in_upgrade"] == []
    assert life["texts_in_upgrade"] == 2
    assert life["texts_after_upgrade"] == 1


@pytest.mark.slow  # Hashing and timing may take it past its bound in one run of about twenty.
def test_a_killed_node_costs_only_the_requests_that_it_was_computing(models: Path) -> None:
    """The node that Paceline's controller is on. Of the fifteen streams in flight about a third is there.

    A stream whose request fails tries again, and until the router knows of the death, within a second, again there.
    """
    seen = course("death", models)
    assert len(seen["lost_requests"]) <= 5 + 3, seen
    assert seen["lost_later"] == []
    assert seen["answers_after_death"] > 15


@pytest.mark.slow
def test_a_node_that_stops_to_respond_is_left_out(models: Path) -> None:
    """Its processes are suspended, so that connections stay open and nothing answers."""
    seen = course("cut", models)
    assert seen["failures_later"] == [], seen
    assert seen["answers"] > 6, seen
