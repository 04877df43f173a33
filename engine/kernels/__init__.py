"""Triton kernels for GPUs, each with a twin of PyTorch operators that gives equal results within rounding.

Owns the kernels and their registration as PyTorch operators. Knows tensors only: no model, no request, no cache beyond
its layout. Nothing here is imported unless the `triton` kernels are chosen.
"""
