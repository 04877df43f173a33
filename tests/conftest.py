"""Fixtures that several files use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, settings

settings.register_profile("untimed", deadline=None)  # A busy machine may take long over an example.
# A mutant needs one failure, not the smallest one, and must not replay the failures of another mutant.
settings.register_profile("mutants", deadline=None, database=None, phases=(Phase.explicit, Phase.generate))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "untimed"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tensors of a few numbers are slower on two threads than on one."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


torch.set_num_threads(1)  # Small tensors are slower on more, and threads that wait on a full machine spin.


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Divide the tests among worker processes: a file stays in one, and all tests that start Ray in one other.

    Those are the longest group, so they come first.
    """
    here = Path(__file__).parent
    for item in items:
        group = "ray" if item.get_closest_marker("ray") else str(item.path.relative_to(here))
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: item.get_closest_marker("ray") is None)
