"""The distillation objective: forward KL to the target's softened law plus cross-entropy to its best token.

Owns the output head's fused loss (logits never exist for more than a chunk of positions, and the gradient is formed in
the same pass). The target's law arrives as its likeliest tokens with log-probabilities. Knows nothing of drafts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distill.settings import Objective


def soft_targets(
    top_ids: Tensor, top_logprobs: Tensor, to_draft: Tensor, objective: Objective
) -> tuple[Tensor, Tensor]:
    """The law to imitate, in draft rows.

    Args:
        top_ids: [..., M] int64 tokens, best first; top_logprobs: [..., M] over the full vocabulary.
        to_draft: [V] token -> draft row, -1 where the draft has none.

    Returns:
        rows [..., M] int64 (0 where absent) and weights [..., M] float32 (0 where absent): KL and CE parts summed.
        Mass outside the draft's vocabulary is dropped, not spread: the draft cannot serve it.
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
    """sum_n scale_n * sum_m weights_nm * -log softmax(hidden_n W^T)[rows_nm], with argmax hits on the side.

    Forward KL differs from this by the target's entropy only, which has no gradient.
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
            # Few rows at a time in float32, so that they stay in the processor's cache.
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
        """The stored gradients times the incoming one."""
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * grad_loss, grad_head * grad_loss, None, None, None, None


def head_loss(
    hidden: Tensor, head: Tensor, rows: Tensor, weights: Tensor, scale: Tensor, *, chunk: int = 1024
) -> tuple[Tensor, Tensor, Tensor]:
    """Summed loss, the draft's best row per position and each position's unscaled loss; see `HeadLoss`."""
    loss, best, each = HeadLoss.apply(hidden, head, rows, weights, scale, chunk)  # type: ignore[no-untyped-call]
    return loss, best, each


def overlap(draft_logits: Tensor, rows: Tensor, top_logprobs: Tensor, present: Tensor, temperature: float) -> Tensor:
    """Chance that rejection sampling accepts: sum_x min(p(x), q(x)) (Leviathan et al. 2023).

    Args:
        draft_logits: [N, V_draft]; rows, top_logprobs, present: [N, M] the target's law, present = the draft has it.
        temperature: of both laws.

    Returns:
        [N] float32; a lower bound by at most the target's mass beyond its M likeliest tokens.
    """
    p = (top_logprobs.float() / temperature).softmax(-1)
    q = (draft_logits.float() / temperature).softmax(-1).gather(1, rows)
    return (torch.minimum(p, q) * present).sum(-1)
