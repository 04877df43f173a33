"""Fixtures that several files use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # A busy machine may take long over an example.
settings.load_profile("untimed")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tensors of a few numbers are slower on two threads than on one."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
