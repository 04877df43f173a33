"""The distillation objective: forward KL to the target's softened law plus cross-entropy to its best token.

Owns the output head's fused loss (logits never exist for more than a chunk of positions, and the gradient is formed in
the same pass). The target's law arrives as its likeliest tokens with log-probabilities. Knows nothing of drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Objective:
    """Weights of the parts of the loss."""

    kl_weight: float = 1.0
    ce_weight: float = 0.2
    """Cross-entropy to the target's likeliest token: what greedy acceptance asks for."""
    temperature: float = 1.0
    """Of the target's law in the KL part."""
    feature_weight: float = 0.0
    """Feature regression, for drafts that stand in for the target's features (Li et al. 2024, EAGLE)."""
    step_decay: float = 0.8
    """Loss weight of unrolled step s is step_decay ** s (Li et al. 2025, EAGLE-3)."""


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
    law = top_logprobs.float().exp()
    if objective.temperature != 1.0:
        kept = law.sum(-1, keepdim=True)
        law = (top_logprobs.float() / objective.temperature).softmax(-1) * kept
    law = law * objective.kl_weight
    law[..., 0] += objective.ce_weight
    rows = to_draft[top_ids]
    return rows.clamp(min=0), law * (rows >= 0)


class HeadLoss(torch.autograd.Function):
    """sum_n scale_n * sum_m weights_nm * -log softmax(hidden_n W^T)[rows_nm], with argmax hits on the side.

    Forward KL differs from this by the target's entropy only, which has no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, rows: Tensor, weights: Tensor, scale: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        """hidden [N, H], head [V, H], rows and weights [N, M], scale [N] -> loss [], best rows [N]."""
        total = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden, grad_head = (
            torch.empty_like(hidden),
            torch.zeros(head.shape, dtype=torch.float32, device=head.device),
        )
        best = torch.empty(hidden.shape[0], dtype=torch.int64, device=hidden.device)
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = (hidden[part] @ head.T).float()
            best[part] = logits.argmax(-1)
            scaled = weights[part] * scale[part, None]
            mass = scaled.sum(-1, keepdim=True)
            logprobs = logits.log_softmax(-1)
            total += -(scaled * logprobs.gather(1, rows[part])).sum()
            grad = logprobs.exp_().mul_(mass).scatter_add_(1, rows[part], -scaled).to(hidden.dtype)
            grad_hidden[part] = grad @ head
            grad_head += grad.T @ hidden[part]
        ctx.save_for_backward(grad_hidden, grad_head.to(head.dtype))
        ctx.mark_non_differentiable(best)
        return total, best

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """The stored gradients times the incoming one."""
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * grad_loss, grad_head * grad_loss, None, None, None, None


def head_loss(
    hidden: Tensor, head: Tensor, rows: Tensor, weights: Tensor, scale: Tensor, *, chunk: int = 1024
) -> tuple[Tensor, Tensor]:
    """Summed loss and the draft's best row per position; see `HeadLoss`."""
    loss, best = HeadLoss.apply(hidden, head, rows, weights, scale, chunk)  # type: ignore[no-untyped-call]
    return loss, best


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
