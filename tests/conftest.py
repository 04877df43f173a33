"""Settings of all tests."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import Phase, settings

settings.register_profile("untimed", deadline=None)  # A busy machine may take long over an example.
# A mutant needs one failure, not the smallest one, and must not replay the failures of another mutant.
settings.register_profile("mutants", deadline=None, database=None, phases=(Phase.explicit, Phase.generate))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "untimed"))


@pytest.fixture(autouse=True)
def one_torch_thread() -> None:
    """Small tensors are slower on more threads, which spin on a full machine. An engine sets more when it starts."""
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)
