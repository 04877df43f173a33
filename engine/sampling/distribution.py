"""From logits to tokens: warping, and randomness that depends on nothing but the request and the position.

Owns the law a request asks for (temperature, top-k, min-p, top-p) and its random stream. Knows no batch, no cache and
no draft: target and draft call the same functions, so both are warped alike. What depends on earlier tokens (penalties,
grammar) has changed the logits before; see `engine.sampling.logits_processor`.

Every draw is a function of (stream key, position, purpose, attempt). Seeded requests always use attempt 0, so equal
seeds give equal draws whatever the batch, the step or the K.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from enum import IntEnum

import torch

from engine.sampling.row_sampling import RowSampling

_INT32 = 1 << 32
_HEAD = 256
"""Most likely tokens to look at before sorting a whole row; the nucleus is rarely larger."""


class Purpose(IntEnum):
    """What a draw is for; different purposes are independent."""

    TOKEN = 0  # the token at a position, drawn from the target's law (and, coupled, from the draft's)
    DRAFT = 1  # a draft token under the rejection rule
    ACCEPT = 2  # the uniform number that accepts or rejects a draft token
    RECOVER = 3  # the replacement after a rejection


def stream_seed(key: int, position: int, purpose: Purpose, attempt: int) -> int:
    """64 bits that name one draw of one request's stream."""
    packed = struct.pack("<QqqB", key & (2**64 - 1), position, attempt, purpose)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def uniform(seed: int) -> float:
    """A number in [0, 1) from the bits of `stream_seed`."""
    return (seed >> 11) * 2.0**-53


def gumbel(seeds: Sequence[int], token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise for each (seed, token id): a counter-based hash, equal on every device.

    argmax(log p + gumbel) is a draw from p (Gumbel 1954; Maddison et al. 2014).

    Args:
        seeds: R 64-bit seeds.
        token_ids: [V] int64, the target ids the columns stand for.

    Returns:
        [R, V] float32.
    """
    words = [(_signed(seed % _INT32), _signed(seed >> 32)) for seed in seeds]
    key = torch.tensor(words, dtype=torch.int32, device=token_ids.device)  # [R, 2]
    counter = token_ids.to(torch.int32).mul(_signed(0x9E3779B9))
    x = _mix(counter.unsqueeze(0) ^ key[:, :1])
    x = _mix(x.add_(key[:, 1:]))
    # 23 bits, centred in their cells: (n + 0.5) / 2^23 is exact in float32 and lies strictly between 0 and 1, so
    # neither logarithm ever sees 0 or 1.
    u = ((x >> 9) & 0x7FFFFF).to(torch.float32).add_(0.5).mul_(2.0**-23)
    return u.log_().neg_().log_().neg_()


def _signed(word: int) -> int:
    return word - _INT32 if word >= _INT32 // 2 else word


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A bijective 32-bit finaliser (two multiply-xorshift rounds), in place; int32 products wrap."""
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= _signed(0x846CA68B)
    x ^= (x >> 16) & 0xFFFF
    return x


def warp(logits: torch.Tensor, samplings: Sequence[RowSampling]) -> torch.Tensor:
    """The distributions that sampled rows are drawn from: temperature, then top-k, min-p and top-p, in this order.

    Each cut works on what the one before has left, renormalised, and keeps every token that is as likely as the last
    one it keeps: which of two equals comes first in a sort never matters.

    Args:
        logits: [R, V] float32, not all -inf in any row.
        laws: R laws with temperature > 0.

    Returns:
        [R, V] float32 probabilities; rows sum to 1 within rounding, excluded tokens are exactly 0.
    """
    temperature = torch.tensor(
        [sampling.temperature for sampling in samplings], dtype=torch.float32, device=logits.device
    )
    probs = torch.softmax(logits / temperature.unsqueeze(1), dim=-1)
    rows = [row for row, sampling in enumerate(samplings) if sampling.top_k > 0 or sampling.min_p > 0.0]
    if rows:
        probs[rows] = _truncate(probs[rows], [samplings[row] for row in rows])
    rows = [row for row, sampling in enumerate(samplings) if sampling.top_p < 1.0]
    if rows:
        top_p = torch.tensor([samplings[row].top_p for row in rows], dtype=torch.float32, device=logits.device)
        probs[rows] = _nucleus(probs[rows], top_p)
    return probs


def _truncate(probs: torch.Tensor, samplings: Sequence[RowSampling]) -> torch.Tensor:
    """Top-k, then min-p (Nguyen et al. 2024), renormalised."""
    num_tokens = probs.shape[-1]
    top_k = torch.tensor([min(sampling.top_k or num_tokens, num_tokens) for sampling in samplings], device=probs.device)
    width = max((sampling.top_k for sampling in samplings if sampling.top_k < num_tokens), default=1)
    head = probs.topk(max(width, 1), dim=-1).values  # descending
    kth = head.gather(1, (top_k - 1).clamp(max=head.shape[1] - 1).unsqueeze(1))
    min_p = torch.tensor([sampling.min_p for sampling in samplings], dtype=torch.float32, device=probs.device)
    threshold = torch.maximum(kth * (top_k < num_tokens).unsqueeze(1), head[:, :1] * min_p.unsqueeze(1))
    probs = probs.masked_fill(probs < threshold, 0.0)
    return probs.div_(probs.sum(dim=-1, keepdim=True))


def _nucleus(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The smallest set of most likely tokens whose mass reaches top_p, renormalised (Holtzman et al. 2020)."""
    threshold = torch.zeros_like(top_p)
    left = torch.arange(len(probs), device=probs.device)  # rows whose nucleus is wider than what was looked at
    width = _HEAD
    while len(left) > 0:
        own = probs[left]
        width = min(width, probs.shape[-1])
        head = own.topk(width, dim=-1).values if width < probs.shape[-1] else own.sort(dim=-1, descending=True).values
        mass = head.cumsum(dim=-1)
        last = ((mass - head) < top_p[left].unsqueeze(1)).sum(dim=-1, keepdim=True) - 1
        threshold[left] = head.gather(1, last.clamp(min=0)).squeeze(1)
        if width == probs.shape[-1]:
            break
        left = left[mass[:, -1] < top_p[left]]
        width *= 16
    probs = probs.masked_fill(probs < threshold.unsqueeze(1), 0.0)
    return probs.div_(probs.sum(dim=-1, keepdim=True))


def draw(weights: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """One token per row, with probability proportional to its weight.

    Args:
        weights: [R, V] float32, not negative, need not sum to 1.
        noise: [R, V] from `gumbel`.

    Returns:
        [R] int64 column indices.
    """
    return weights.log().add_(noise).argmax(dim=-1)


def most_likely(logits: torch.Tensor) -> torch.Tensor:
    """The best column of each row, the first of equals.

    NumPy's search over float32 rows is ten times as fast as PyTorch's on a CPU.

    Args:
        logits: [R, V] float32.

    Returns:
        [R] int64.
    """
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    return torch.from_numpy(logits.numpy().argmax(axis=-1))
