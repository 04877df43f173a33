"""Acceptance on live requests, and the test for a regression.

Promises: a first token counts once, as accepted if and only if the target committed it; a drop beyond chance is found,
equal and better acceptance is not one, and the counts before a swap come back with its rollback.
"""

from __future__ import annotations

import math
import random

import pytest

from engine.adaptation.live_acceptance import MIN_REQUESTS, Counts, LiveAcceptance, acceptance
from engine.draft.messages import DraftRequestRow, DraftResponseRow
from engine.sampling.row_sampling import RowSampling


def row(key: int, start: int, *tokens: int) -> DraftRequestRow:
    return DraftRequestRow(key, start, tokens, 2, RowSampling(0.0, 1.0, 0, 1, False))


def serve(live: LiveAcceptance, rng: random.Random, rate: float, *, requests: int, drafts: int = 20) -> None:
    """Requests whose first drafted tokens are each accepted at this rate."""
    for _ in range(requests):
        key, length = rng.randrange(2**40), 1
        live.observe([row(key, 0, 5)], [])
        for _ in range(drafts):
            live.drafted([row(key, length - 1, 5)], [DraftResponseRow((7, 8))])
            live.observe([row(key, length, 7 if rng.random() < rate else 9)], [])
            length += 1
        live.observe([], [key])


def test_a_first_token_counts_if_the_target_committed_it() -> None:
    live = LiveAcceptance()
    live.drafted([row(1, 0, 5), row(2, 0, 5), row(3, 0, 5)], [DraftResponseRow((7,)), DraftResponseRow((7,)),
                                                              DraftResponseRow()])  # fmt: skip
    live.observe([row(1, 1, 7, 6), row(2, 1, 6), row(3, 1, 7)], [])
    live.observe([row(1, 3, 7)], [])  # nothing was drafted before
    live.observe([], [1, 2, 3])
    assert live.rate == 0.5


def test_a_request_that_is_sent_again_counts_nothing() -> None:
    live = LiveAcceptance()
    live.drafted([row(1, 0, 5)], [DraftResponseRow((7,))])
    live.observe([row(1, 0, 7, 7)], [1])
    assert live.rate == 0.0


def test_the_error_is_that_of_independent_requests() -> None:
    """Requests of ten drafts that are all accepted or all rejected: as many facts as requests, not as drafts."""
    counts = [Counts(10, 10 * (number % 2)) for number in range(100)]
    rate, error = acceptance(counts)
    assert rate == 0.5
    assert error == pytest.approx(0.5 / math.sqrt(99))
    assert acceptance([]) == (0.0, math.inf)


def test_a_regression_is_found_and_the_counts_before_come_back() -> None:
    live, rng = LiveAcceptance(), random.Random(0)
    serve(live, rng, 0.7, requests=40)
    live.swapped()
    assert live.rate == 0.0
    serve(live, rng, 0.3, requests=MIN_REQUESTS - 1)
    assert not live.has_regressed  # too few requests
    serve(live, rng, 0.3, requests=20)
    assert live.has_regressed
    live.rolled_back()
    assert not live.has_regressed
    assert live.rate > 0.6


def test_equal_and_better_acceptance_is_no_regression() -> None:
    """20 comparisons of 800 drafts on either side, with fixed seeds."""
    for seed in range(20):
        live, rng = LiveAcceptance(), random.Random(seed)
        serve(live, rng, 0.6, requests=40)
        live.swapped()
        serve(live, rng, 0.6 if seed % 2 else 0.7, requests=40)
        assert not live.has_regressed


def test_requests_that_run_across_a_swap_count_for_neither() -> None:
    live = LiveAcceptance()
    live.drafted([row(1, 0, 5)], [DraftResponseRow((7,))])
    live.observe([row(1, 1, 9)], [])
    live.drafted([row(1, 1, 9)], [DraftResponseRow((7,))])
    live.swapped()
    live.observe([row(1, 2, 9)], [1])
    assert live.rate == 0.0
    assert not live.has_regressed
