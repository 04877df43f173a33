"""The allocation is the best of all possible ones."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from call_count import counted_calls
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscale.policy.allocation import Allocation, allocate

MAX_K = 8


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**32), st.booleans())
def test_the_allocation_is_the_best_of_all(batch: int, width: int, seed: int, kinked: bool) -> None:
    rng = np.random.default_rng(seed)
    cumulative_acceptance = np.cumprod(rng.uniform(0.05, 0.99, (batch, width)), axis=1)
    base_s, fixed_s, pass_s = rng.uniform(5, 40), rng.uniform(0, 2), rng.uniform(0, 5)
    steps = rng.uniform(0, 3, batch * width + 1) * (rng.random(batch * width + 1) > 0.5 if kinked else 1)
    added_s = np.concatenate([[0.0], np.cumsum(steps)])[: batch * width + 1]
    found = allocate(
        cumulative_acceptance,
        base_s=base_s,
        fixed_s=fixed_s,
        pass_s=pass_s,
        added_s=added_s,
        depths=range(1, width + 1),
    )

    def goodput(ks: tuple[int, ...]) -> float:
        tokens = batch + sum(cumulative_acceptance[i, :k].sum() for i, k in enumerate(ks))
        drafting = fixed_s + pass_s * max(ks) + added_s[sum(ks)] if max(ks) else 0.0
        return float(tokens / (base_s + drafting))

    best = max(goodput(ks) for ks in itertools.product(range(width + 1), repeat=batch))
    assert goodput(tuple(found.ks.tolist())) == pytest.approx(best, rel=1e-9)
    assert found.goodput == pytest.approx(best, rel=1e-9)


def allocated(cumulative_acceptance: list[list[float]], **changes: object) -> Allocation:
    """The allocation at 10 ms per step, 1 ms per drafted row and 2 ms per pass."""
    table = np.array(cumulative_acceptance)
    costs = {"base_s": 0.010, "fixed_s": 0.0, "pass_s": 0.002, "added_s": np.arange(table.size + 1) * 1e-3}
    depths = range(1, table.shape[1] + 1)
    return allocate(table, **{**costs, "depths": depths, **changes})  # type: ignore[arg-type]


def test_an_example_by_hand() -> None:
    """One token per request in 10 ms, against 0.9 and 0.8 more tokens for one pass of 2 ms and two rows of 1 ms."""
    found = allocated([[0.9, 0.1], [0.8, 0.1]])
    assert found.ks.tolist() == [1, 1]
    assert found.depth == 1
    assert (found.tokens, found.seconds) == pytest.approx((3.7, 0.014))
    assert found.goodput == pytest.approx(3.7 / 0.014)


def test_without_a_gain_nothing_is_drafted() -> None:
    found = allocated([[0.2, 0.1], [0.1, 0.0]])
    assert found.ks.tolist() == [0, 0]
    assert found.depth == 0
    assert (found.tokens, found.seconds) == (2.0, 0.010)


def test_the_fixed_cost_is_paid_once() -> None:
    free, paid = allocated([[0.9], [0.8]]), allocated([[0.9], [0.8]], fixed_s=0.003)
    assert paid.ks.tolist() == free.ks.tolist() == [1, 1]
    assert paid.seconds - free.seconds == pytest.approx(0.003)


def test_only_the_given_depths_are_considered() -> None:
    deep = [[0.95, 0.93, 0.9]]
    assert allocated(deep).ks.tolist() == [3]
    assert allocated(deep, depths=(1, 2)).ks.tolist() == [2]


def test_equal_positions_of_a_request_are_taken_from_the_first_on() -> None:
    """The sort may put the second one first, which depth 1 leaves out."""
    found = allocated([[0.9, 0.9]], added_s=np.array([0.0, 0.001, 0.009]))
    assert found.ks.tolist() == [1]
    assert (found.tokens, found.seconds) == pytest.approx((1.9, 0.013))


def test_positions_that_are_never_accepted_are_not_drafted_even_if_they_cost_nothing() -> None:
    found = allocated([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]], pass_s=0.0, added_s=np.zeros(7))
    assert found.ks.tolist() == [0, 0]
    assert (found.tokens, found.seconds) == (2.0, 0.010)


def test_a_parallel_draft_pays_for_a_pass_per_so_many_positions() -> None:
    """Positions 1 and 2 cost one pass of 2 ms, and position 3 a second one. Each row costs 1 ms."""
    rows = [[0.95, 0.9, 0.8]]
    one, two = allocated(rows, positions_per_pass=2, depths=(2,)), allocated(rows, positions_per_pass=2, depths=(3,))
    assert (one.ks.tolist(), one.tokens, one.seconds) == ([2], pytest.approx(2.85), pytest.approx(0.014))
    assert (two.ks.tolist(), two.tokens, two.seconds) == ([3], pytest.approx(3.65), pytest.approx(0.017))


def test_an_allocation_is_a_few_array_operations_at_any_batch() -> None:
    """Counted in function calls. A loop over requests would show."""

    def num_calls(batch: int) -> int:
        cumulative_acceptance = np.cumprod(np.random.default_rng(0).uniform(0.3, 0.95, (batch, MAX_K)), axis=1)
        added_s = np.arange(cumulative_acceptance.size + 1) * 5e-4
        with counted_calls() as calls:
            allocate(cumulative_acceptance, base_s=0.03, fixed_s=5e-4, pass_s=1e-3, added_s=added_s, depths=(2, 3, 4))
        return calls.num

    assert num_calls(4) == num_calls(256) < 40
