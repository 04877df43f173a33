"""From logits to tokens: temperature, truncation, and random draws that depend only on the request and the position.

Owns the distribution of one row (temperature, top-k, min-p, top-p) and its random stream. Knows no batch, no cache and
no draft: target and draft call the same functions, so both get the same distribution from the same logits. Penalties
and grammars depend on earlier tokens and are applied to the logits before; see `engine.sampling.logits_processor`.

Each draw is a function of (stream key, position, purpose, attempt). Seeded requests always use attempt 0. Therefore
equal seeds give equal draws for any batch, any step and any K.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import numpy as np
import torch

from engine.sampling.row_sampling import RowSampling
from engine.sampling.staging import to_device

_INT32 = 1 << 32
_HEAD = 256
"""Number of most likely tokens to try before a whole row is sorted. A nucleus is rarely larger."""

NucleusKind = Literal["auto", "head", "sort"]
"""How top-p finds the nucleus. `head`: search the most likely tokens first; reads back which rows need more. `sort`:
sort all rows; the host reads nothing back. `auto`: `head` on a CPU, `sort` on CUDA."""


class Purpose(IntEnum):
    """The purpose of a draw. Draws of different purposes are independent."""

    TOKEN = 0  # the token at a position, from the target's distribution (coupled: also from the draft's)
    DRAFT = 1  # a draft token under rejection sampling
    ACCEPT = 2  # the uniform number that accepts or rejects a draft token
    RECOVER = 3  # the replacement of a rejected draft token


def stream_seed(key: int, position: int, purpose: Purpose, attempt: int) -> int:
    """64 bits that identify one draw of one request's stream."""
    packed = struct.pack("<QqqB", key & (2**64 - 1), position, attempt, purpose)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def uniform(seed: int) -> float:
    """A number in [0, 1) from the bits of `stream_seed`."""
    return (seed >> 11) * 2.0**-53


def gumbel(seeds: Sequence[int], token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise for each (seed, token id): a counter-based hash that gives equal bits on every device.

    argmax(log p + gumbel) is a draw from p (Gumbel 1954; Maddison et al. 2014).

    Args:
        seeds: R 64-bit seeds.
        token_ids: [V] int64, the target token id of each column.

    Returns:
        [R, V] float32.
    """
    (words,) = to_device([seed_words(seeds)], token_ids.device)
    return gumbel_of_words(words, token_ids)


def seed_words(seeds: Sequence[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    """The seeds as [R, 2] int32: low word, high word."""
    return np.array(seeds, dtype="<u8").view("<i4").reshape(-1, 2).astype(np.int32, copy=False)


def gumbel_of_words(words: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """`gumbel` for seeds that are on the device: words [R, 2] int32 from `seed_words`."""
    counter = token_ids.to(torch.int32).mul(_signed(0x9E3779B9))
    x = _mix(counter.unsqueeze(0) ^ words[:, :1])
    x = _mix(x.add_(words[:, 1:]))
    # 23 bits, centred in their intervals: (n + 0.5) / 2^23 is exact in float32 and strictly between 0 and 1, so
    # neither logarithm gets 0 or 1.
    u = ((x >> 9) & 0x7FFFFF).to(torch.float32).add_(0.5).mul_(2.0**-23)
    return u.log_().neg_().log_().neg_()


def _signed(word: int) -> int:
    """An unsigned 32-bit word as a signed one."""
    return word - _INT32 if word >= _INT32 // 2 else word


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A bijective 32-bit finaliser (two multiply-xorshift rounds), in place. int32 products wrap around."""
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= _signed(0x846CA68B)
    x ^= (x >> 16) & 0xFFFF
    return x


def warp(logits: torch.Tensor, samplings: Sequence[RowSampling], *, nucleus: NucleusKind = "auto") -> torch.Tensor:
    """The distributions of sampled rows: temperature, then top-k, min-p and top-p, in this order.

    Each truncation works on the renormalised result of the one before. It keeps every token that is as likely as the
    last one it keeps, so the order of equal tokens in a sort does not matter.

    Args:
        logits: [R, V] float32, not all -inf in any row.
        samplings: R sampling parameters with temperature > 0.
        nucleus: how top-p finds the nucleus; the results are equal.

    Returns:
        [R, V] float32 probabilities. Rows sum to 1 within rounding; excluded tokens are exactly 0.
    """
    num_tokens = logits.shape[-1]
    if nucleus == "auto":
        nucleus = "head" if logits.device.type == "cpu" else "sort"
    top = [row for row, sampling in enumerate(samplings) if sampling.top_k > 0 or sampling.min_p > 0.0]
    nuclei = [row for row, sampling in enumerate(samplings) if sampling.top_p < 1.0]
    top_k = [min(samplings[row].top_k or num_tokens, num_tokens) for row in top]
    temperature, top_rows, ks, min_p, nucleus_rows, top_p = to_device(
        [
            np.array([[sampling.temperature] for sampling in samplings], dtype=np.float32),
            np.array(top, dtype=np.int64),
            np.array(top_k, dtype=np.int64),
            np.array([samplings[row].min_p for row in top], dtype=np.float32),
            np.array(nuclei, dtype=np.int64),
            np.array([samplings[row].top_p for row in nuclei], dtype=np.float32),
        ],
        logits.device,
    )
    probs = torch.softmax(logits / temperature, dim=-1)
    if top:
        width = max((k for k in top_k if k < num_tokens), default=1)
        probs[top_rows] = _truncate(probs[top_rows], ks, min_p, width)
    if nuclei:
        find = _threshold_by_head if nucleus == "head" else _threshold_by_sort
        subset = probs[nucleus_rows]
        probs[nucleus_rows] = _keep(subset, find(subset, top_p))
    return probs


@dataclass(frozen=True, slots=True)
class WarpOptions:
    """Sampling parameters of R rows on the device of the logits."""

    temperature: torch.Tensor
    """[R, 1] float32, above 0."""
    cuts: torch.Tensor
    """[R, 1] bool whether there is a top-k or a min-p."""
    top_k: torch.Tensor
    """[R, 1] int64 tokens to keep; V keeps all."""
    min_p: torch.Tensor
    """[R, 1] float32."""
    top_p: torch.Tensor
    """[R, 1] float32; 1 keeps all."""


def warp_together(logits: torch.Tensor, options: WarpOptions, *, truncates: bool) -> torch.Tensor:
    """`warp` without a choice that the host makes by row, so that it can be recorded. The results are equal.

    Args:
        logits: [R, V] float32, not all -inf in any row.
        options: of the rows.
        truncates: whether any row has a top-k, min-p or top-p. If not, these are not read.
    """
    probs = torch.softmax(logits / options.temperature, dim=-1)
    if not truncates:
        return probs
    ordered, num_tokens = probs.sort(dim=-1, descending=True).values, logits.shape[-1]
    kth = ordered.gather(1, options.top_k - 1) * (options.top_k < num_tokens)
    threshold = torch.maximum(kth, ordered[:, :1] * options.min_p)
    kept = probs.masked_fill(probs < threshold, 0.0)
    mass = kept.sum(dim=-1, keepdim=True)
    probs = torch.where(options.cuts, kept / mass, probs)
    ordered = torch.where(options.cuts, ordered.masked_fill(ordered < threshold, 0.0) / mass, ordered)
    nucleus = _keep(probs, _last_of_nucleus(ordered, options.top_p.squeeze(1))[0])
    return torch.where(options.top_p < 1.0, nucleus, probs)


def _truncate(probs: torch.Tensor, top_k: torch.Tensor, min_p: torch.Tensor, width: int) -> torch.Tensor:
    """Top-k, then min-p (Nguyen et al. 2024), renormalised.

    Args:
        probs: [R, V].
        top_k: [R] int64 tokens to keep; V keeps all.
        min_p: [R].
        width: the largest top_k below V, or 1.
    """
    num_tokens = probs.shape[-1]
    head = probs.topk(width, dim=-1).values  # descending
    kth = head.gather(1, (top_k - 1).clamp(max=width - 1).unsqueeze(1))
    return _keep(probs, torch.maximum(kth * (top_k < num_tokens).unsqueeze(1), head[:, :1] * min_p.unsqueeze(1)))


def _keep(probs: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """The tokens of at least `threshold` [R, 1], renormalised."""
    probs = probs.masked_fill(probs < threshold, 0.0)
    return probs.div_(probs.sum(dim=-1, keepdim=True))


def _threshold_by_sort(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """[R, 1] probability of the last token of the nucleus: the smallest set of most likely tokens whose mass reaches
    top_p (Holtzman et al. 2020)."""
    return _last_of_nucleus(probs.sort(dim=-1, descending=True).values, top_p)[0]


def _threshold_by_head(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The result of `_threshold_by_sort`, from the most likely tokens of each row where those are enough."""
    threshold = torch.zeros_like(top_p).unsqueeze(1)
    rows = torch.arange(len(probs), device=probs.device)  # Rows whose nucleus is not found yet.
    width = _HEAD
    while width < probs.shape[-1] and len(rows) > 0:
        head = probs[rows].topk(width, dim=-1).values
        threshold[rows], mass = _last_of_nucleus(head, top_p[rows])
        rows = rows[mass < top_p[rows]]
        width *= 16
    if len(rows) > 0:
        threshold[rows] = _threshold_by_sort(probs[rows], top_p[rows])
    return threshold


def _last_of_nucleus(head: torch.Tensor, top_p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Probability of the last token of the nucleus [R, 1], and the mass of `head` [R].

    Args:
        head: [R, W] the largest probabilities, descending.
        top_p: [R].
    """
    mass = head.cumsum(dim=-1)
    last = ((mass - head) < top_p.unsqueeze(1)).sum(dim=-1, keepdim=True) - 1
    return head.gather(1, last.clamp(min=0)), mass[:, -1]


def draw(weights: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Draw one token per row, with probability proportional to its weight.

    Args:
        weights: [R, V] float32, not negative; they need not sum to 1.
        noise: [R, V] from `gumbel`.

    Returns:
        [R] int64 column indices.
    """
    return weights.log().add_(noise).argmax(dim=-1)


def most_likely(logits: torch.Tensor) -> torch.Tensor:
    """The column of the largest logit of each row, the first one of equals.

    On a CPU it uses NumPy, whose search over float32 rows is ten times as fast as PyTorch's.

    Args:
        logits: [R, V] float32.

    Returns:
        [R] int64.
    """
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    return torch.from_numpy(logits.numpy().argmax(axis=-1))
