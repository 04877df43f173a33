"""Acceptance rates: counted where a position was reached, per request, and from the priors of the app."""

from __future__ import annotations

import numpy as np
import pytest

from autoscale.policy.acceptance_rate import Acceptance, workload_index
from engine.core.pacing import Prior
from engine.core.stats import RowOutcome


def test_positions_behind_a_rejection_count_as_nothing() -> None:
    deep, shallow = Acceptance(4, prior=(0.5,)), Acceptance(4, prior=(0.5,))
    for _ in range(200):  # the second was rejected, of four and of two
        deep.observe([RowOutcome(1, 4, 1, 10)])
        shallow.observe([RowOutcome(1, 2, 1, 10)])
    assert deep.by_position()[0] > 0.9
    assert deep.by_position()[1] < 0.1
    assert np.array_equal(deep.by_position(), shallow.by_position())


def test_a_position_not_reached_for_long_follows_the_positions_before_it() -> None:
    """Otherwise a workload whose drafts were rejected for a while would never get deep drafts again."""
    acceptance = Acceptance(4, prior=(0.8,))
    for _ in range(300):
        acceptance.observe([RowOutcome(1, 4, 1, 10)])
    assert acceptance.by_position()[1] < 0.1
    for _ in range(6000):  # only the first position is drafted, and it is accepted
        acceptance.observe([RowOutcome(1, 1, 1, 10)])
    assert acceptance.by_position()[1] > 0.5


def test_the_acceptance_of_one_request_is_learned_beside_that_of_its_workload() -> None:
    acceptance = Acceptance(3, prior=(0.5,))
    for _ in range(40):
        acceptance.observe([RowOutcome(1, 3, 3, 10), RowOutcome(2, 3, 0, 10)])
    good, bad, unknown = acceptance.cumulative_acceptance([1, 2, 3])
    assert good[0] > unknown[0] > bad[0]
    acceptance.forget([1, 2])
    again = acceptance.cumulative_acceptance([1, 2])
    assert np.array_equal(again[0], again[1])


def test_counts_and_rates_by_hand() -> None:
    """The prior counts as four observations: (1 + 4 * 0.5) / (1 + 4); the next position is scaled by 0.6 / 0.5."""
    acceptance = Acceptance(3, prior=(0.5,))
    acceptance.observe([RowOutcome(1, 2, 1, 10)])
    assert acceptance.by_position() == pytest.approx([0.6, 0.48, 0.48])
    assert acceptance.by_position("hot") == pytest.approx([0.5, 0.5, 0.5])
    assert acceptance.rates()[workload_index("greedy")] == pytest.approx(acceptance.by_position())
    assert acceptance.deeper_rate(workload_index("greedy")) == pytest.approx(0.48)


def test_the_factor_of_a_request_by_hand() -> None:
    """Two acceptances where the first step expected 0.5 + 0.5: (4 + 2) / (4 + 1) times the workload's rates."""
    acceptance = Acceptance(2, prior=(0.5,))
    acceptance.observe([RowOutcome(1, 2, 2, 10)])
    rates = acceptance.by_position()
    known, unknown = acceptance.cumulative_acceptance([1, 2])
    assert unknown == pytest.approx(np.cumprod(rates))
    assert known == pytest.approx(np.cumprod(1.2 * rates))


def test_rates_stay_within_their_bounds() -> None:
    acceptance = Acceptance(2, prior=(1.0,))
    acceptance.observe([RowOutcome(1, 2, 2, 10)] * 50)
    assert acceptance.cumulative_acceptance([1])[0] == pytest.approx([0.99, 0.99**2])
    never = Acceptance(2, prior=(0.0,))
    assert never.cumulative_acceptance([1])[0] == pytest.approx([0.01, 0.01**2])


def test_the_mean_over_workloads_is_weighted_by_observations() -> None:
    acceptance = Acceptance(1, prior=(0.5,))
    acceptance.observe([RowOutcome(1, 1, 1, 10, "greedy")] * 30 + [RowOutcome(2, 1, 0, 10, "hot")] * 10)
    greedy, hot = acceptance.by_position("greedy")[0], acceptance.by_position("hot")[0]
    assert acceptance.mean_rates()[0] == pytest.approx((30 * greedy + 10 * hot) / 40, abs=1e-3)


def prior(*rates: float, weight: float = 500.0) -> Prior:
    return Prior(method="ngram", workload="cool", rates=rates, weights=(weight,) * len(rates))


def test_a_prior_longer_than_max_k_is_cut() -> None:
    acceptance = Acceptance(3, prior=(0.5,))
    acceptance.adopt([prior(0.9, 0.8, 0.7, 0.6, 0.2)])
    assert acceptance.by_position("cool") == pytest.approx([0.9, 0.8, 0.7])
    assert acceptance.by_position("greedy") == pytest.approx([0.5, 0.5, 0.5])
    acceptance.observe([RowOutcome(1, 3, 3, 10, "cool")])
    assert acceptance.by_position("cool") == pytest.approx([(1 + 4 * 0.9) / 5, *acceptance.by_position("cool")[1:]])


def test_a_prior_shorter_than_max_k_leaves_the_default_behind_it() -> None:
    """The default is scaled by the previous position's ratio of rate to prior, which is 1 here."""
    acceptance = Acceptance(4, prior=(0.5, 0.4))
    acceptance.adopt([prior(0.9, 0.8)])
    assert acceptance.by_position("cool") == pytest.approx([0.9, 0.8, 0.4, 0.4])


def test_the_first_prior_may_be_longer_than_max_k() -> None:
    assert Acceptance(2, prior=(0.9, 0.8, 0.7)).by_position() == pytest.approx([0.9, 0.8])


@pytest.mark.parametrize(("weight", "rate"), [(0.0, 0.5), (1.0, 0.6), (2.0, 0.7), (4.0, 0.9), (500.0, 0.9)])
def test_a_prior_of_few_observations_counts_less(weight: float, rate: float) -> None:
    """Its share in the mean is weight / PRIOR_STRENGTH, at most 1. The rest is the default."""
    acceptance = Acceptance(1, prior=(0.5,))
    acceptance.adopt([prior(0.9, weight=weight)])
    assert acceptance.by_position("cool")[0] == pytest.approx(rate)
