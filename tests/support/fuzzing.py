"""How many cases a fuzz test tries: a fixed sample by default, more by the environment.

PACELINE_FUZZ=50 pytest tests/test_fuzz.py tests/test_fuzz_files.py tests/test_state_machine.py
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings


def sample(cases: int, **options: Any) -> settings:
    """Hypothesis settings for `cases` cases, or that many times $PACELINE_FUZZ; without it always the same ones."""
    factor = int(os.environ.get("PACELINE_FUZZ", "0"))
    return settings(
        max_examples=cases * max(1, factor),
        derandomize=factor == 0,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        **options,
    )
