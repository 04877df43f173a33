"""Log-probabilities of tokens under the model's distribution: log-softmax of the logits, before any sampling option.

Owns their computation on the device of the logits, for many rows together, and their form for a response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from engine.messages import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of N rows, on the device."""

    chosen: torch.Tensor
    """[N] float32 log-probability of the row's token."""
    top_values: torch.Tensor
    """[N, T] float32 largest log-probabilities, descending."""
    top_ids: torch.Tensor
    """[N, T] int64 their tokens."""

    def tensors(self) -> list[torch.Tensor]:
        """The arguments of `token_logprobs`, for `engine.sampling.staging.to_host`."""
        return [self.chosen, self.top_values, self.top_ids]


def score(logits: torch.Tensor, tokens: torch.Tensor, *, num_top: int) -> Scores:
    """Score one token per row, and find the most likely ones.

    Args:
        logits: [N, V] float32.
        tokens: [N] int64.
        num_top: most likely tokens per row; at most V are returned.
    """
    norm = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, tokens.unsqueeze(1)).sub_(norm).squeeze(1)
    values, ids = logits.topk(min(num_top, logits.shape[-1]), dim=-1)
    return Scores(chosen, values.sub_(norm), ids)


def token_logprobs(
    chosen: npt.NDArray[Any], top_values: npt.NDArray[Any], top_ids: npt.NDArray[Any], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """The scores in the form of a response.

    Args:
        chosen, top_values, top_ids: the arrays of `Scores`.
        num_top: most likely tokens to report of each row.
    """
    rows = zip(chosen.tolist(), top_values.tolist(), top_ids.tolist(), num_top, strict=True)
    return [
        TokenLogprobs(logprob=logprob, top=tuple(zip(ids[:num], values[:num], strict=True)))
        for logprob, values, ids, num in rows
    ]
