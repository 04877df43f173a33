"""The likeliest tokens of logits over a large vocabulary, without sorting or copying the vocabulary.

A row is laid out as a few lines of many columns. The `count` largest values lie in the `count` columns with the largest
maxima, so only those columns are searched. Exact; ties at the edge may fall either way, as in `torch.topk`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

COLUMNS = 2048
ROWS_AT_ONCE = 8
"""Rows whose exponentials are summed together: on CPU they stay in the cache."""


class Likeliest(NamedTuple):
    """Best first."""

    logprobs: Tensor
    """[N, count] float32 over the full vocabulary."""
    ids: Tensor
    """[N, count] int64."""


def likeliest(logits: Tensor, count: int) -> Likeliest:
    """The `count` likeliest tokens of each row of logits [N, V] float32, contiguous; `logits` is overwritten."""
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
    """As `torch.topk` over the last axis."""
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
