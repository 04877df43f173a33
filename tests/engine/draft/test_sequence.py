"""The draft's record of a request: what stays computed after a verdict, and when drafting ends."""

from __future__ import annotations

import pytest

from engine.draft.messages import DraftRequestRow
from engine.draft.sequence import Drafting, DraftSequence
from engine.sampling.row_sampling import RowSampling

GREEDY = RowSampling(0.0, 1.0, 1, 1, False)


def sequence(tokens: list[int], num_computed: int, *, first: int = 0) -> DraftSequence:
    return DraftSequence(1, first, tokens=tokens, positions=list(range(first, first + num_computed)))


@pytest.mark.parametrize(
    ("new_tokens", "num_kept"),
    [
        ((7, 8, 9), 4),  # both drafted tokens accepted, then a token of the target
        ((7, 5), 3),  # one accepted
        ((5,), 2),  # none accepted
        ((7,), 2),  # the last committed token is computed again, though it agrees
        ((7, 8), 3),
        ((), 1),  # nothing new: the last committed token is computed again
    ],
)
def test_accepted_tokens_stay_computed(new_tokens: tuple[int, ...], num_kept: int) -> None:
    record = sequence([1, 2, 7, 8], 4)
    record.follow(2, new_tokens, keeps_agreed=True)
    assert record.tokens == [1, 2, *new_tokens]
    assert record.positions == list(range(num_kept))


def test_without_keeping_everything_from_start_is_computed_again() -> None:
    record = sequence([1, 2, 7, 8], 3, first=1)
    record.follow(2, (7, 8, 9), keeps_agreed=False)
    assert record.positions == [1]
    assert record.uncomputed() == range(2, 5)


def test_uncomputed_positions_begin_after_the_last_slot() -> None:
    assert sequence([1, 2, 3], 2).uncomputed() == range(2, 3)
    assert sequence([1, 2, 3], 0).uncomputed() == range(3)
    assert sequence([1, 2, 3], 0, first=1).uncomputed() == range(1, 3)
    assert sequence([1, 2, 3], 3).uncomputed() == range(3, 3)


def test_a_gap_forbids_sharing_blocks() -> None:
    record = sequence([1, 2, 3, 4], 2, first=1)
    assert record.has_no_gap
    assert DraftSequence(1, 1).has_no_gap
    record.positions = [1, 3]
    assert not record.has_no_gap
    assert record.num_computed == 2


def drafting(k: int, exit_threshold: float = 0.0, sampling: RowSampling = GREEDY) -> Drafting:
    request_row = DraftRequestRow(1, 0, (1,), k, sampling, exit_threshold=exit_threshold)
    return Drafting(0, request_row, sequence([1], 1), sampling, k, (), (), 0)


def test_drafting_ends_at_k() -> None:
    row = drafting(2)
    assert row.continues
    row.token_ids = [5]
    assert row.continues
    row.token_ids = [5, 6]
    assert not row.continues
    assert not drafting(0).continues


def test_drafting_ends_below_the_exit_threshold() -> None:
    row = drafting(9, exit_threshold=0.5)
    row.cumulative_confidence = 0.5
    assert row.continues
    row.cumulative_confidence = 0.499
    assert not row.continues


@pytest.mark.parametrize(
    ("temperature", "coupled", "needs_q"), [(0.0, False, False), (1.0, True, False), (1.0, False, True)]
)
def test_only_the_rejection_rule_needs_q(temperature: float, coupled: bool, needs_q: bool) -> None:
    assert drafting(1, sampling=RowSampling(temperature, 1.0, 1, 1, coupled)).samples_from_q is needs_q
