"""One token per row by the Gumbel-max trick, with the counter-based noise of `engine.sampling.distribution.gumbel`.

Owns the noise inside the kernel: it never exists in memory. Each program searches one block of columns; a second, small
reduction picks the best block.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton reads the annotations of a kernel, so that its arguments cannot have types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.sampling.distribution import draw, gumbel_of_words

COLUMNS = 4096
"""Columns of one program."""


@triton.jit
def _mix(x):
    """The 32-bit finaliser of `engine.sampling.distribution`."""
    x ^= x >> 16
    x *= tl.full([1], 0x7FEB352D, tl.uint32)
    x ^= x >> 15
    x *= tl.full([1], 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def gumbel_draw_kernel(weights, words, best_value, best_column, size, num_blocks, BLOCK: tl.constexpr):
    """The best column of one row within one block of columns."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    low = tl.load(words + 2 * row).to(tl.uint32, bitcast=True)
    high = tl.load(words + 2 * row + 1).to(tl.uint32, bitcast=True)
    x = column.to(tl.uint32) * tl.full([1], 0x9E3779B9, tl.uint32)
    x = _mix(_mix(x ^ low) + high)
    uniform = ((x >> 9).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    weight = tl.load(weights + row * size + column, mask=inside, other=0.0)
    value = tl.where(inside & (weight > 0.0), tl.log(weight) - tl.log(-tl.log(uniform)), float("-inf"))
    best, index = tl.max(value, axis=0, return_indices=True)
    tl.store(best_value + row * num_blocks + block, best)
    tl.store(best_column + row * num_blocks + block, block * BLOCK + index)


@torch.library.custom_op("paceline::gumbel_draw", mutates_args=())
def gumbel_draw(weights: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Draw one column per row with probability proportional to its weight. One launch and a small reduction.

    Args:
        weights: [R, V] float32 contiguous, not negative.
        words: [R, 2] int32 seed words, see `engine.sampling.distribution.seed_words`.

    Returns:
        [R] int64.
    """
    rows, size = weights.shape
    num_blocks = triton.cdiv(size, COLUMNS)
    value = torch.empty(rows, num_blocks, dtype=torch.float32, device=weights.device)
    column = torch.empty(rows, num_blocks, dtype=torch.int32, device=weights.device)
    if rows > 0:
        gumbel_draw_kernel[(rows, num_blocks)](weights, words, value, column, size, num_blocks, BLOCK=COLUMNS)
    return column.gather(1, value.argmax(dim=1, keepdim=True)).squeeze(1).long()


@gumbel_draw.register_fake
def _(weights: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    del words
    return torch.empty(weights.shape[0], dtype=torch.int64, device=weights.device)


def gumbel_draw_reference(weights: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """The twin of `gumbel_draw`."""
    return draw(weights, gumbel_of_words(words, torch.arange(weights.shape[1], device=weights.device)))
