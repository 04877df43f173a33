"""The choice of a draft's token in one launch: arg max, confidence, and a draw with Gumbel noise.

Owns one program per row. It reads the logits once for a greedy row, twice where the distribution is kept as well. The
noise is that of `engine.sampling.distribution.gumbel`, from the same counters.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton reads the annotations of a kernel, so that its arguments cannot have types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.sampling.distribution import draw, gumbel_of_words

COLUMNS = 4096
"""Columns of one step of a program."""


@triton.jit
def _mix(x):
    """`engine.sampling.distribution._mix` of unsigned words."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _gumbel(ids, low, high):
    """Noise of token ids for the seed of two words.

    The hardware's logarithm is inaccurate near 1, where the largest noise comes from. A series takes its place there.
    """
    x = _mix((ids.to(tl.uint32) * 0x9E3779B9) ^ low)
    x = _mix(x + high)
    u = ((x >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    t = 1.0 - u
    series = t * (1.0 + t * (0.5 + t * (1.0 / 3 + t * (0.25 + t * (0.2 + t * (1.0 / 6 + t * (1.0 / 7 + t / 8)))))))
    return -tl.log(tl.where(t < 0.1, series, -tl.log(u)))


@triton.jit
def choose_kernel(
    logits,
    temperature,
    greedy,
    words,
    ids,
    depth,
    probs,
    columns,
    confidences,
    size,
    max_k,
    BLOCK: tl.constexpr,
    DRAWS: tl.constexpr,
):
    """One row: its column and confidence; where it draws, also its distribution."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    logits += row * size
    top = float("-inf")
    likely = tl.full([], 0, tl.int32)
    mass = 0.0
    warm_top = float("-inf")
    warm_mass = 0.0
    best = float("-inf")
    drawn = tl.full([], 0, tl.int32)
    scale = 1.0
    low = tl.full([], 0, tl.uint32)
    high = tl.full([], 0, tl.uint32)
    if DRAWS:
        scale = tl.load(temperature + row)
        low = tl.load(words + 2 * row).to(tl.uint32, bitcast=True)
        high = tl.load(words + 2 * row + 1).to(tl.uint32, bitcast=True)
    for start in range(0, size, BLOCK):
        column = start + block
        x = tl.load(logits + column, mask=column < size, other=float("-inf"))
        value = tl.max(x, axis=0)
        likely = tl.where(value > top, start + tl.argmax(x, axis=0), likely)
        higher = tl.maximum(top, value)
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        mass = mass * tl.exp(top - finite) + tl.sum(tl.exp(x - finite), axis=0)
        top = higher
        if DRAWS:
            y = x / scale
            higher = tl.maximum(warm_top, tl.max(y, axis=0))
            finite = tl.where(higher == float("-inf"), 0.0, higher)
            warm_mass = warm_mass * tl.exp(warm_top - finite) + tl.sum(tl.exp(y - finite), axis=0)
            warm_top = higher
            token = tl.load(ids + column, mask=column < size, other=0)
            score = tl.where(column < size, y + _gumbel(token, low, high), float("-inf"))
            value = tl.max(score, axis=0)
            drawn = tl.where(value > best, start + tl.argmax(score, axis=0), drawn)
            best = tl.maximum(best, value)
    if DRAWS:
        probs += (row * max_k + tl.load(depth)) * size
        for start in range(0, size, BLOCK):
            column = start + block
            x = tl.load(logits + column, mask=column < size, other=float("-inf"))
            tl.store(probs + column, tl.exp(x / scale - warm_top) / warm_mass, mask=column < size)
        likely = tl.where(tl.load(greedy + row) != 0, likely, drawn)
    tl.store(columns + row, likely.to(tl.int64))
    tl.store(confidences + row, 1.0 / mass)


@torch.library.custom_op("paceline::choose", mutates_args=("probs",))
def choose(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    greedy: torch.Tensor,
    words: torch.Tensor,
    ids: torch.Tensor,
    depth: torch.Tensor,
    probs: torch.Tensor,
    draws: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row, without top-k, min-p and top-p. One launch.

    Args:
        logits: [R, V] float32 contiguous.
        temperature: [R, 1] float32, above 0.
        greedy: [R, 1] bool whether the row takes its most likely token.
        words: [R, 2] int32 seeds, from `seed_words`.
        ids: [V] int64 token id of each column.
        depth: [1] int64.
        probs: [R, K, V] float32 contiguous; gets the distributions at [:, depth].
        draws: whether any row draws. If not, only `logits` are read, and `probs` stays.

    Returns:
        [R] int64 column of each row, and [R] float32 its largest probability at temperature 1.
    """
    rows, size = logits.shape
    columns = torch.empty(rows, dtype=torch.int64, device=logits.device)
    confidences = torch.empty(rows, device=logits.device)
    choose_kernel[(rows,)](
        *(logits, temperature, greedy.view(torch.uint8), words, ids, depth, probs, columns, confidences),
        *(size, probs.shape[1]),
        BLOCK=min(COLUMNS, triton.next_power_of_2(size)),
        DRAWS=draws,
        num_warps=8,
    )
    return columns, confidences


def choose_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    greedy: torch.Tensor,
    words: torch.Tensor,
    ids: torch.Tensor,
    depth: torch.Tensor,
    probs: torch.Tensor,
    draws: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin of `choose`."""
    columns, confidences = logits.argmax(dim=-1), logits.softmax(dim=-1).amax(dim=-1)
    if draws:
        of_rows = torch.softmax(logits / temperature, dim=-1)
        probs.index_copy_(1, depth, of_rows.unsqueeze(1))
        columns = torch.where(greedy.squeeze(1), columns, draw(of_rows, gumbel_of_words(words, ids)))
    return columns, confidences


@choose.register_fake
def _(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    greedy: torch.Tensor,
    words: torch.Tensor,
    ids: torch.Tensor,
    depth: torch.Tensor,
    probs: torch.Tensor,
    draws: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    del temperature, greedy, words, ids, depth, probs, draws
    return logits.new_empty(len(logits), dtype=torch.int64), logits.new_empty(len(logits))
