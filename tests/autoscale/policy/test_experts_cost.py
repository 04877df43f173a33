"""The cost model on a mixture of experts, where every further row wakes fewer new experts.

With k of E experts per row, each equally likely, r rows are expected to wake E (1 - (1 - k / E)^r). Promise: known at
the knots alone, every forward up to 128 rows is priced within 4 %, and the K chosen reaches 98 % of the best goodput.
From the costs of a dense model, the model learns those of the experts from steps.
"""

from __future__ import annotations

import numpy as np
import pytest
from step_stats import step_stats

from autoscale.policy.allocation import allocate
from autoscale.policy.cost_model import BATCH_KNOTS, ROW_KNOTS, CostModel, CostTable

SHAPES = [(8, 2, 0.0), (8, 2, 0.3), (16, 2, 0.1), (64, 8, 0.0), (128, 8, 0.0), (128, 8, 0.3)]
"""Experts, experts per row, and the share of a row's time that does not depend on experts."""
DEEPEST = 8


def forward_s(rows: float, shape: tuple[int, int, float]) -> float:
    """Seconds of a forward; one row takes 10 ms."""
    num, per_row, share = shape
    return float(0.01 * (share + (1 - share) * num / per_row * (1 - (1 - per_row / num) ** rows)))


def table_of(shape: tuple[int, int, float]) -> CostTable:
    verify_s = tuple(forward_s(rows, shape) for rows in ROW_KNOTS)
    return CostTable(verify_s, (0.001,) * len(BATCH_KNOTS))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forwards_between_the_knots_are_priced_within_four_percent(shape: tuple[int, int, float]) -> None:
    cost = CostModel(table_of(shape))
    for rows in range(1, 129):
        assert cost.verify_s(rows, 0) == pytest.approx(forward_s(rows, shape), rel=0.04)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_k_that_is_chosen_is_nearly_the_best(shape: tuple[int, int, float]) -> None:
    cost = CostModel(table_of(shape))
    chosen = set()
    for batch in (1, 2, 4, 8, 16):
        for rate in (0.5, 0.7, 0.85, 0.95):
            cumulative = np.tile(rate ** np.arange(1, DEEPEST + 1), (batch, 1))
            best = allocate(
                cumulative,
                base_s=cost.verify_s(batch, 0),
                fixed_s=0.0,
                pass_s=cost.pass_s(batch),
                added_s=cost.added_rows_s(batch, cumulative.size),
                depths=range(1, DEEPEST + 1),
            )
            tokens = batch + sum(float(row[:k].sum()) for row, k in zip(cumulative, best.ks, strict=True))
            reached = tokens / (forward_s(batch + best.ks.sum(), shape) + 0.001 * best.depth)
            uniform = [
                batch * (1 + float(cumulative[0, :k].sum())) / (forward_s(batch * (1 + k), shape) + 0.001 * k)
                for k in range(DEEPEST + 1)
            ]
            assert reached > 0.98 * max(uniform)
            chosen.add(best.depth)
    assert len(chosen) > 2, "the cost of rows decides nothing"


def test_the_cost_of_waking_experts_is_learned_from_steps() -> None:
    shape = (16, 2, 0.1)
    dense = CostTable(tuple(0.01 + 1e-5 * rows for rows in ROW_KNOTS), (0.001,) * len(BATCH_KNOTS))
    cost = CostModel(dense, measured=False)
    rng = np.random.default_rng(2)
    for _ in range(400):
        rows = int(rng.integers(1, 33))
        verify_s = forward_s(rows, shape) * float(rng.normal(1.0, 0.03))
        drafted = rows // 2
        cost.observe(
            step_stats(num_decodes=rows - drafted, num_rows=rows, num_drafted=drafted, context_len=0, verify_s=verify_s)
        )
    for rows in (1, 2, 3, 6, 12, 24, 32):
        assert cost.verify_s(rows, 0) == pytest.approx(forward_s(rows, shape), rel=0.1)
