"""How the C allocator of this process treats freed memory.

A forward on a CPU allocates and frees a few megabytes per layer. glibc hands such memory back to the kernel at once and
takes it again, page fault by page fault: tens of thousands of them per step, which can triple its time. Owns the one
switch against that; knows nothing of tensors.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 1 << 30
_LARGEST_FROM_HEAP = 32 << 20
"""The most that glibc takes for the mmap threshold."""


def keep_freed_memory() -> bool:
    """Let the allocator keep up to 1 GiB of freed memory for the next step, in the whole process. Repeatable.

    Returns:
        Whether the C library took it; others than glibc do not know it.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    trimmed = mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    mapped = mallopt(_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP)
    return bool(trimmed and mapped)
