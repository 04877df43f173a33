"""The distillation objective: forward KL to the target's softened distribution plus cross-entropy to its best token.

Owns the fused loss of the output head: logits exist only for one chunk of positions at a time, and the gradient is
computed in the same pass. The target's distribution is given as its most likely tokens with their log-probabilities.
Knows nothing of drafts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distill.settings import Objective


def soft_targets(
    top_ids: Tensor, top_logprobs: Tensor, to_draft: Tensor, objective: Objective
) -> tuple[Tensor, Tensor]:
    """The distribution to imitate, in rows of the draft's vocabulary.

    Args:
        top_ids: [..., M] int64 tokens, best first; top_logprobs: [..., M] over the full vocabulary.
        to_draft: [V] token -> draft row, -1 where the draft has none.

    Returns:
        rows [..., M] int64 and weights [..., M] float32, both 0 where the draft lacks the token. Weights are the sum of
        the KL and the CE part. Mass outside the draft's vocabulary is dropped, because the draft cannot draft it.
    """
    distribution = top_logprobs.float().exp()
    if objective.temperature != 1.0:
        kept = distribution.sum(-1, keepdim=True)
        distribution = (top_logprobs.float() / objective.temperature).softmax(-1) * kept
    distribution = distribution * objective.kl_weight
    distribution[..., 0] += objective.ce_weight
    rows = to_draft[top_ids]
    return rows.clamp(min=0), distribution * (rows >= 0)


class HeadLoss(torch.autograd.Function):
    """sum_n scale_n * sum_m weights_nm * -log softmax(hidden_n W^T)[rows_nm], and the argmax of each position.

    Forward KL differs from this only by the target's entropy, which has no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, rows: Tensor, weights: Tensor, scale: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [N, H], head [V, H], rows and weights [N, M], scale [N] -> loss [], best rows [N], unscaled [N]."""
        each = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        grad_hidden, grad_head = (
            torch.empty_like(hidden),
            torch.zeros(head.shape, dtype=torch.float32, device=head.device),
        )
        best = torch.empty(hidden.shape[0], dtype=torch.int64, device=hidden.device)
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            grad = hidden[part] @ head.T
            # Few rows at a time in float32, so that they stay in the CPU cache.
            for first in range(start, min(start + chunk, hidden.shape[0]), 64):
                at = slice(first, min(first + 64, start + chunk))
                logits = grad[first - start : first - start + 64].float()
                best[at] = logits.argmax(-1)
                logprobs = logits.log_softmax(-1)
                each[at] = -(weights[at] * logprobs.gather(1, rows[at])).sum(-1)
                scaled = weights[at] * scale[at, None]
                mass = scaled.sum(-1, keepdim=True)
                logprobs.exp_().mul_(mass).scatter_add_(1, rows[at], -scaled)
                grad[first - start : first - start + 64] = logprobs
            grad_hidden[part] = grad @ head
            grad_head += grad.T @ hidden[part]
        ctx.save_for_backward(grad_hidden, grad_head.to(head.dtype))
        ctx.mark_non_differentiable(best, each)
        return (each * scale).sum(), best, each

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """The stored gradients times the incoming gradient."""
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * grad_loss, grad_head * grad_loss, None, None, None, None


def head_loss(
    hidden: Tensor, head: Tensor, rows: Tensor, weights: Tensor, scale: Tensor, *, chunk: int = 1024
) -> tuple[Tensor, Tensor, Tensor]:
    """Summed loss, best draft row of each position, and unscaled loss of each position; see `HeadLoss`."""
    loss, best, each = HeadLoss.apply(hidden, head, rows, weights, scale, chunk)  # type: ignore[no-untyped-call]
    return loss, best, each


def overlap(draft_logits: Tensor, rows: Tensor, top_logprobs: Tensor, present: Tensor, temperature: float) -> Tensor:
    """Probability that rejection sampling accepts: sum_x min(p(x), q(x)) (Leviathan et al. 2023).

    Args:
        draft_logits: [N, V_draft].
        rows, top_logprobs: [N, M] the target's distribution, in rows of the draft's vocabulary.
        present: [N, M] whether the draft has the token.
        temperature: of both distributions.

    Returns:
        [N] float32; too low by at most the target's mass outside its M most likely tokens.
    """
    p = (top_logprobs.float() / temperature).softmax(-1)
    q = (draft_logits.float() / temperature).softmax(-1).gather(1, rows)
    return (torch.minimum(p, q) * present).sum(-1)
