"""Fixtures that several files use."""

from __future__ import annotations

import os
from collections.abc import Iterator

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
