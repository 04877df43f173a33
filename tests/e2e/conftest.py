"""One server for all end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import Server, serving

ADMIN_KEY = "end-to-end"


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the server's target files."""
    return tmp_path_factory.mktemp("targets")


@pytest.fixture(scope="session")
def admin() -> dict[str, str]:
    """Headers with the admin key."""
    return {"Authorization": f"Bearer {ADMIN_KEY}"}


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, targets: Path) -> Iterator[Server]:
    """SmolLM2 in fp32 with the shipped draft."""
    folder = tmp_path_factory.mktemp("server")
    env = {"PACELINE_METRICS_DIR": str(targets), "PACELINE_ADMIN_KEY": ADMIN_KEY}
    with serving(folder / "log", "--dtype", "float32", "--k", "3", "--policy", "fixed", env=env) as running:
        yield running
    assert list(targets.iterdir()) == [], "targets of replicas that have stopped"
