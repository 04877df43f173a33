"""Triton kernels for GPUs, each with a twin of PyTorch operators that gives equal results within rounding.

Owns the kernels and their registration as PyTorch operators. Knows tensors only: no model, no request, no cache beyond
its layout. No kernel is imported unless the settings need it.
"""

from __future__ import annotations

PARTIAL_BYTES = 64 << 20
"""Most bytes of the partial results of one call of paged attention."""
CUT_PACKED = 64
"""Most rows x query heads of one program where longer spans are cut. With more, trees over a cache in FP8 spill
registers on an A100."""
