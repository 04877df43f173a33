"""Settings of all tests."""

from __future__ import annotations

import os

import torch
from hypothesis import Phase, settings

settings.register_profile("untimed", deadline=None)  # A busy machine may take long over an example.
# A mutant needs one failure, not the smallest one, and must not replay the failures of another mutant.
settings.register_profile("mutants", deadline=None, database=None, phases=(Phase.explicit, Phase.generate))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "untimed"))

torch.set_num_threads(1)  # Small tensors are slower on more, and threads that wait on a full machine spin.
