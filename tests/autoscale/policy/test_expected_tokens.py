"""Tokens that a step was expected to emit, by the source and workload of its drafts."""

from __future__ import annotations

import pytest
from step_stats import step_stats

from autoscale.policy.acceptance_rate import Acceptance
from autoscale.policy.expected_tokens import expected_tokens
from autoscale.policy.lookup_k import LookupK
from engine.core.stats import RowOutcome


def test_without_drafts_every_request_yields_one_token() -> None:
    assert expected_tokens(step_stats(num_decodes=3), Acceptance(2, (0.5,)), None) == 3.0


def test_a_draft_yields_the_sum_of_its_cumulative_acceptance() -> None:
    stats = step_stats(num_decodes=2, outcomes=(RowOutcome(1, 2, 0, 10), RowOutcome(2, 1, 1, 10)))
    assert expected_tokens(stats, Acceptance(3, (0.5,)), None) == pytest.approx(2 + (0.5 + 0.25) + 0.5)


def test_workloads_have_their_own_rates() -> None:
    acceptance = Acceptance(1, (0.5,))
    acceptance.observe([RowOutcome(1, 1, 1, 10, "hot")])
    stats = step_stats(num_decodes=1, outcomes=(RowOutcome(1, 1, 0, 10, "hot"),))
    assert expected_tokens(stats, acceptance, None) == pytest.approx(1 + (1 + 4 * 0.5) / 5)


def test_lookup_drafts_have_the_rates_of_their_match_where_lookup_is_asked_first() -> None:
    lookup = LookupK(2)
    stats = step_stats(num_decodes=1, outcomes=(RowOutcome(1, 1, 0, 10, source="lookup", match_len=8),))
    assert expected_tokens(stats, Acceptance(2, (0.5,)), lookup) == pytest.approx(1.85)
    assert expected_tokens(stats, Acceptance(2, (0.5,)), None) == pytest.approx(1.5)
    of_method = step_stats(num_decodes=1, outcomes=(RowOutcome(1, 1, 0, 10),))
    assert expected_tokens(of_method, Acceptance(2, (0.5,)), lookup) == pytest.approx(1.5)


def test_a_draft_longer_than_max_k_counts_up_to_it() -> None:
    """A grammar may force more tokens than a draft can propose."""
    stats = step_stats(num_decodes=1, outcomes=(RowOutcome(1, 9, 9, 20, source="grammar"),))
    assert expected_tokens(stats, Acceptance(2, (0.5,)), None) == pytest.approx(1.75)
