"""Acceptance rates: counted where a position was reached, per request, and from the priors of the app."""

from __future__ import annotations

import math

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


def test_counts_decay_with_each_observation_by_hand() -> None:
    """Each observation leaves 0.999 of the counts before it; two in one step leave 0.999 squared."""
    acceptance = Acceptance(1, prior=(0.5,))
    acceptance.observe([RowOutcome(1, 1, 1, 10)])
    acceptance.observe([RowOutcome(1, 1, 0, 10)])
    assert acceptance.by_position()[0] == pytest.approx((0.999 + 2) / (1.999 + 4), rel=1e-12)
    acceptance.observe([RowOutcome(1, 1, 1, 10), RowOutcome(2, 1, 1, 10)])
    keep = 0.999**2
    assert acceptance.by_position()[0] == pytest.approx((0.999 * keep + 2 + 2) / (1.999 * keep + 2 + 4), rel=1e-12)


def test_the_sums_of_a_request_decay_by_hand() -> None:
    acceptance = Acceptance(2, prior=(0.5,))
    acceptance.observe([RowOutcome(1, 2, 2, 10)])
    expected = acceptance.by_position()[0]
    acceptance.observe([RowOutcome(1, 2, 0, 10)])
    factor = (4 + 0.97 * 2) / (4 + 0.97 * 1 + expected)
    known, unknown = acceptance.cumulative_acceptance([1, 2])
    assert known[0] / unknown[0] == pytest.approx(factor)


def test_a_row_without_a_draft_is_no_observation() -> None:
    acceptance = Acceptance(2, prior=(0.5,))
    acceptance.observe([RowOutcome(1, 0, 0, 10)])
    assert acceptance.num_tracked == 0
    assert acceptance.by_position().tolist() == [0.5, 0.5]
    acceptance.observe([RowOutcome(1, 1, 0, 10)])
    assert acceptance.num_tracked == 1


def test_confidence_is_calibrated_by_hand() -> None:
    """Two reached positions with confidence 0.9 and 0.5, the first accepted: 0.9 - 1 + 0.5 too confident."""
    acceptance = Acceptance(3, prior=(0.5,))
    assert not acceptance.has_confidences
    assert acceptance.confidence_at(0.25, 0) == 0.25
    acceptance.observe([RowOutcome(1, 3, 1, 10, "greedy", 0, (0.9, 0.5, 0.1))])
    assert acceptance.has_confidences
    exponent = math.exp(0.01 * 0.4)
    assert acceptance.confidence_at(0.25, workload_index("greedy")) == pytest.approx(0.25 ** (1 / exponent))
    assert acceptance.confidence_at(0.25, workload_index("hot")) == 0.25
    acceptance.observe([RowOutcome(1, 1, 1, 10, "greedy", 0, (0.5,))])
    exponent *= math.exp(0.01 * (0.5**exponent - 1))
    assert acceptance.confidence_at(0.25, workload_index("greedy")) == pytest.approx(0.25 ** (1 / exponent))
    assert (acceptance.confidence_at(1.5, 0), acceptance.confidence_at(-1.0, 0)) == (1.0, 0.0)


@pytest.mark.parametrize(("confidence", "num_accepted", "exponent"), [(1.0, 0, 10.0), (1e-9, 1, 0.1)])
def test_the_exponent_of_confidence_stays_within_a_tenth_and_ten(
    confidence: float, num_accepted: int, exponent: float
) -> None:
    acceptance = Acceptance(1, prior=(0.5,))
    for _ in range(1000):
        acceptance.observe([RowOutcome(1, 1, num_accepted, 10, "greedy", 0, (confidence,))])
    assert acceptance.confidence_at(0.25, 0) == pytest.approx(0.25 ** (1 / exponent))


def test_the_deeper_rate_is_the_mean_of_the_second_and_third_position() -> None:
    rates = (0.5, 0.4, 0.2, 0.9)
    assert Acceptance(4, rates).deeper_rate(0) == pytest.approx(0.3)
    assert Acceptance(2, rates).deeper_rate(0) == pytest.approx(0.4)
    assert Acceptance(1, rates).deeper_rate(0) == 0.0


def test_before_any_observation_the_mean_over_workloads_is_the_prior() -> None:
    acceptance = Acceptance(2, prior=(0.5, 0.25))
    assert acceptance.mean_rates() == pytest.approx([0.5, 0.25])
    acceptance.observe([RowOutcome(1, 1, 1, 10)])
    num = len(acceptance.rates())
    greedy = acceptance.by_position()[0]
    expected = (1.001 * greedy + (num - 1) * 0.001 * 0.5) / (1.001 + (num - 1) * 0.001)
    assert acceptance.mean_rates()[0] == pytest.approx(expected, rel=1e-9)


def test_the_product_of_a_tree_s_rates_is_how_often_each_node_is_accepted() -> None:
    """Node 1 is a sibling of node 0, and node 2 a child of node 0: their acceptance is not that of a chain."""
    acceptance = Acceptance(3, prior=(0.5,))
    paths = [(0, 2), (0, 2), (0,), (0,), (0,), (1,), (1,), (1,), (), ()]
    for _ in range(300):
        acceptance.observe([RowOutcome(1, 3, len(path), 10, parents=(-1, -1, 0), path=path) for path in paths])
    assert np.cumprod(acceptance.by_position()) == pytest.approx([0.5, 0.3, 0.2], abs=0.01)


def test_a_chain_is_counted_alike_with_and_without_its_parents() -> None:
    plain, written = Acceptance(4, prior=(0.6,)), Acceptance(4, prior=(0.6,))
    for accepted in (0, 1, 4, 2, 3, 1):
        plain.observe([RowOutcome(1, 4, accepted, 10, confidences=(0.9, 0.8, 0.7, 0.6))])
        written.observe(
            [
                RowOutcome(
                    *(1, 4, accepted, 10),
                    confidences=(0.9, 0.8, 0.7, 0.6),
                    parents=(-1, 0, 1, 2),
                    path=tuple(range(accepted)),
                )
            ]
        )
    assert written.by_position() == pytest.approx(plain.by_position())
    assert written.confidence_at(0.5, 0) == pytest.approx(plain.confidence_at(0.5, 0))
