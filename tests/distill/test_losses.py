"""The fused loss equals the plain one, gradients included; the overlap is the probability of acceptance."""

from __future__ import annotations

import pytest
import torch

from distill.settings import Objective
from distill.training.losses import head_loss, overlap, soft_targets


def plain_loss(
    hidden: torch.Tensor, head: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    logprobs = (hidden @ head.T).log_softmax(-1)
    return -(scale[:, None] * weights * logprobs.gather(1, rows)).sum()


@pytest.mark.parametrize("chunk", [3, 7, 100])
def test_fused_loss_and_gradients_equal_the_plain_ones(chunk: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(20, 8, requires_grad=True)
    head = torch.randn(11, 8, requires_grad=True)
    rows = torch.stack([torch.randperm(11)[:4] for _ in range(20)])
    weights = torch.rand(20, 4) * (torch.rand(20, 4) > 0.3)
    scale = torch.rand(20)
    expected = plain_loss(hidden, head, rows, weights, scale)
    wanted = torch.autograd.grad(expected * 3, (hidden, head))
    loss, best, each = head_loss(hidden, head, rows, weights, scale, chunk=chunk)
    given = torch.autograd.grad(loss * 3, (hidden, head))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close((each * scale).sum(), expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(given, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert (best == (hidden @ head.T).argmax(-1)).all()


def test_soft_targets_drop_tokens_the_draft_lacks() -> None:
    to_draft = torch.full((10,), -1)
    to_draft[torch.tensor([3, 7])] = torch.tensor([0, 1])
    ids, logprobs = torch.tensor([[7, 5, 3]]), torch.tensor([[0.5, 0.3, 0.1]]).log()
    rows, weights = soft_targets(ids, logprobs, to_draft, Objective(kl_weight=1.0, ce_weight=0.25))
    assert rows[0, [0, 2]].tolist() == [1, 0]
    torch.testing.assert_close(weights, torch.tensor([[0.75, 0.0, 0.1]]))


def test_temperature_sharpens_but_keeps_the_mass() -> None:
    to_draft = torch.arange(4)
    ids, logprobs = torch.tensor([[0, 1]]), torch.tensor([[0.6, 0.3]]).log()
    _, cold = soft_targets(ids, logprobs, to_draft, Objective(1.0, 0.0, temperature=0.5))
    assert float(cold.sum()) == pytest.approx(0.9, abs=1e-6)
    assert float(cold[0, 0] / cold[0, 1]) == pytest.approx(4.0, rel=1e-5)


def test_overlap_is_the_probability_of_acceptance() -> None:
    """10^5 draws: three standard deviations are under 0.005, so a false alarm is rarer than 1 in 300; seed fixed."""
    torch.manual_seed(0)
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    drawn = torch.multinomial(q, 100_000, replacement=True)
    accepted = (torch.rand(100_000) < (p / q)[drawn]).float().mean()
    rows = torch.arange(3)[None]
    value = overlap(q.log()[None], rows, p.log()[None], torch.ones(1, 3, dtype=torch.bool), 1.0)
    assert float(value) == pytest.approx(float(accepted), abs=0.005)
