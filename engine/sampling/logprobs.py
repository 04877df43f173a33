"""Log-probabilities of tokens under the model's own law: log-softmax of the logits, before any option.

Owns which rows of a step score the prompt, and the reporting of emitted tokens. Computed for the rows that ask, all at
once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.messages import TokenLogprobs


def score(
    logits: torch.Tensor, rows: Sequence[int], tokens: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """Log-probability of one token per row, and of the most likely ones.

    Args:
        logits: [R, V] float32.
        rows: N rows of it.
        tokens: N tokens that stand there.
        num_top: N counts of most likely tokens to report.
    """
    if not rows:
        return []
    every = len(rows) == len(logits) and list(rows) == list(range(len(logits)))
    own = logits if every else logits[list(rows)]
    norm = own.logsumexp(dim=-1, keepdim=True)
    chosen = own.gather(1, torch.tensor(tokens, device=own.device).unsqueeze(1)).sub_(norm).flatten().tolist()
    most = min(max(num_top), own.shape[-1])
    values, ids = own.topk(most, dim=-1)
    top_values, top_ids = values.sub_(norm).tolist(), ids.tolist()
    return [
        TokenLogprobs(logprob=logprob, top=tuple(zip(top_ids[n][:num], top_values[n][:num], strict=True)))
        for n, (logprob, num) in enumerate(zip(chosen, num_top, strict=True))
    ]
