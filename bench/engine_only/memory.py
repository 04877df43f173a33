"""The memory read bandwidth of this machine for one process on all cores: the upper bound of every decode step.

Owns the measurement. Knows no model.
"""

from __future__ import annotations

import os
import time

import torch

BUFFER_BYTES = 256 << 20
"""Far larger than any CPU cache, and about the size of the embedded model's weights."""
NUM_PASSES = 12


def read_bandwidth(num_threads: int | None = None) -> float:
    """Bytes per second of the fastest of NUM_PASSES passes over a large buffer.

    Args:
        num_threads: threads that read; None takes one per core.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads or os.cpu_count() or 1)
    try:
        # Row sums read every byte once and compute little.
        buffer = torch.ones(BUFFER_BYTES // 4, dtype=torch.float32)
        rows = buffer.view(1024, -1)
        best_s = float("inf")
        for _ in range(NUM_PASSES):
            begin = time.perf_counter()
            rows.sum(dim=1)
            best_s = min(best_s, time.perf_counter() - begin)
    finally:
        torch.set_num_threads(before)
    return BUFFER_BYTES / best_s
