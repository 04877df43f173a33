"""The most likely tokens of logits over a large vocabulary, without sorting or copying the vocabulary.

A row is viewed as a few lines of many columns. The `count` largest values lie in the `count` columns with the largest
maxima, so only those columns are searched. Exact; the order of ties is not defined, as in `torch.topk`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

COLUMNS = 2048
ROWS_AT_ONCE = 8
"""Number of rows whose exponentials are summed together, so that on CPU they stay in the cache."""


class Likeliest(NamedTuple):
    """The most likely tokens, best first."""

    logprobs: Tensor
    """[N, count] float32 log-probabilities over the full vocabulary."""
    ids: Tensor
    """[N, count] int64 token ids."""


def likeliest(logits: Tensor, count: int) -> Likeliest:
    """The `count` most likely tokens of each row of contiguous logits [N, V] float32; `logits` is overwritten."""
    values, ids = _largest(logits, min(count, logits.shape[1]))
    # log sum exp(x) = max + log sum exp(x - max), in place.
    sums = torch.cat(
        [
            rows.sub_(best).exp_().sum(1, keepdim=True)
            for rows, best in zip(
                torch.split(logits, ROWS_AT_ONCE), torch.split(values[:, :1], ROWS_AT_ONCE), strict=True
            )
        ]
    )
    return Likeliest(values - values[:, :1] - sums.log(), ids)


def _largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Same result as `torch.topk` over the last axis."""
    vocab = logits.shape[1]
    lines = vocab // COLUMNS
    if lines < 2 or count >= COLUMNS:
        found = logits.topk(count)
        return found.values, found.indices
    whole = lines * COLUMNS
    grid = torch.unflatten(logits[:, :whole], 1, (lines, COLUMNS))
    columns = grid.amax(1).topk(count, sorted=False).indices  # [N, count]
    ids = columns[:, None] + torch.arange(0, whole, COLUMNS, device=logits.device)[:, None]  # [N, lines, count]
    rest = torch.arange(whole, vocab, device=logits.device).expand(len(logits), -1)
    ids = torch.cat((ids.flatten(1), rest), dim=1)
    found = logits.gather(1, ids).topk(count)
    return found.values, ids.gather(1, found.indices)
