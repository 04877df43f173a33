"""Which depths a choice compares: all in every fourth choice and for a new batch, else the last one and a neighbour."""

from __future__ import annotations

from autoscale.policy.depth_search import DepthSearch


def test_a_new_batch_and_every_fourth_choice_compare_all_depths() -> None:
    search = DepthSearch()
    assert [search.is_wide(same_batch=True) for _ in range(8)] == [False, False, False, True] * 2
    assert search.is_wide(same_batch=False)
    assert list(search.depths(5, is_wide=True)) == [1, 2, 3, 4, 5]


def test_other_choices_compare_the_last_depth_and_its_neighbours_in_turns() -> None:
    search = DepthSearch()
    search.found(3)
    found = []
    for _ in range(2):
        search.is_wide(same_batch=True)
        found.append(list(search.depths(5, is_wide=False)))
    assert found == [[2, 3], [3, 4]]


def test_depths_stay_within_bounds() -> None:
    search = DepthSearch()
    for depth, max_k, expected in ((0, 5, [[1], [1, 2]]), (5, 5, [[4, 5], [5]]), (5, 2, [[1, 2], [2]])):
        search.found(depth)
        search.is_wide(same_batch=True)
        lower = list(search.depths(max_k, is_wide=False))
        search.is_wide(same_batch=True)
        assert [lower, list(search.depths(max_k, is_wide=False))] == expected


def test_before_a_depth_was_found_it_is_one() -> None:
    assert list(DepthSearch().depths(5, is_wide=False)) == [1, 2]
