"""Expectations move from their priors to what was seen, apart by class, match, role and depth."""

from __future__ import annotations

import pytest

from engine.proposals.rates import HIGHEST, PRIOR_STRENGTH, SourceRates, num_to_ask


def test_a_lookup_is_expected_to_do_what_its_kind_did() -> None:
    rates = SourceRates()
    long, short = (rates.of_lookup("greedy", length, is_shared=False) for length in (8, 2))
    assert long("alone", 0) > short("alone", 0) > short("first", 0) > short("other", 0)
    before = short("alone", 0)
    for _ in range(3000):
        rates.saw_lookup("greedy", 2, "other", 0, is_shared=False, accepted=True)
        rates.saw_lookup("greedy", 8, "alone", 0, is_shared=False, accepted=False)
    assert short("other", 0) == HIGHEST
    assert long("alone", 0) < 0.01
    assert short("alone", 0) == before
    assert rates.of_lookup("hot", 2, is_shared=False)("other", 0) < 0.3
    assert rates.of_lookup("greedy", 2, is_shared=True)("other", 0) < 0.3
    assert short("other", 1) < 0.3
    assert short("other", 20) == short("other", 50), "deep nodes count together"


@pytest.mark.parametrize(
    ("match_len", "is_shared", "by_depth"),
    [
        (2, False, [0.5, 0.65, 0.7, 0.7]),
        (4, False, [0.6, 0.7, 0.75, 0.75]),
        (7, False, [0.75, 0.8, 0.8, 0.8]),
        (8, False, [0.85] * 4),
        (8, True, [0.5, 0.65, 0.7, 0.7]),
    ],
)
def test_before_any_observation_a_lookup_is_worth_more_the_longer_it_is(
    match_len: int, is_shared: bool, by_depth: list[float]
) -> None:
    expected = SourceRates().of_lookup("greedy", match_len, is_shared=is_shared)
    for role, share in (("alone", 1.0), ("first", 0.75), ("other", 0.25)):
        found = [expected(role, depth) for depth in range(4)]  # type: ignore[arg-type]
        assert found == pytest.approx([share * prior for prior in by_depth])


def test_eight_depths_are_told_apart() -> None:
    rates = SourceRates()
    for _ in range(30):
        rates.saw_model("greedy", 20, expected=0.8, accepted=False)
        rates.saw_lookup("greedy", 2, "alone", 20, is_shared=False, accepted=False)
    lookup = rates.of_lookup("greedy", 2, is_shared=False)
    models = [rates.of_model("greedy", 0.8, 0, depth, drawn=False) for depth in (6, 7, 8, 99)]
    lookups = [lookup("alone", depth) for depth in (6, 7, 8, 99)]
    assert models[0] == pytest.approx(0.8)
    assert lookups[0] == pytest.approx(0.7)
    for found in (models, lookups):
        assert found[1] == found[2] == found[3] < 0.2


def test_the_first_observations_count_as_much_as_the_prior() -> None:
    rates = SourceRates()
    expected = rates.of_lookup("greedy", 2, is_shared=False)
    before = expected("alone", 0)
    for _ in range(round(PRIOR_STRENGTH)):
        rates.saw_lookup("greedy", 2, "alone", 0, is_shared=False, accepted=True)
    assert expected("alone", 0) == pytest.approx((before + 1) / 2, abs=0.01)


def test_confidence_is_corrected_by_what_it_was_worth() -> None:
    rates = SourceRates()
    assert rates.of_model("greedy", 0.8, 0, 0, drawn=False) == pytest.approx(0.8)
    for step in range(4000):
        rates.saw_model("greedy", 0, expected=0.8, accepted=step % 5 < 2)
    assert rates.of_model("greedy", 0.8, 0, 0, drawn=False) == pytest.approx(0.4, abs=0.03)
    assert rates.of_model("greedy", 0.8, 0, 1, drawn=False) == pytest.approx(0.8)
    assert rates.of_model("cool", 0.8, 0, 0, drawn=False) == pytest.approx(0.8)


def test_a_drawn_sibling_is_worth_less_than_the_one_before() -> None:
    rates = SourceRates()
    shares = [rates.of_model("cool", 0.6, rank, 0, drawn=True) for rank in range(4)]
    assert shares == sorted(shares, reverse=True)
    assert shares[1] == pytest.approx(0.6 * 0.4)


@pytest.mark.parametrize(
    ("certain", "of_places", "asked"),
    [
        ([], [0.6, 0.5, 0.4], 3),
        ([0.9, 0.8, 0.7], [0.6, 0.5, 0.4], 0),
        ([0.55, 0.1], [0.6, 0.5, 0.4], 2),
        ([0.1, 0.55, 0.52], [0.6, 0.5, 0.4], 1),
        ([0.9], [], 0),
    ],
)
def test_the_model_is_asked_for_what_lookup_leaves(certain: list[float], of_places: list[float], asked: int) -> None:
    assert num_to_ask(certain, of_places) == asked


def test_the_model_is_asked_for_less_where_a_node_has_a_price() -> None:
    places = [0.6, 0.5, 0.4, 0.3]
    asked = [num_to_ask([0.7, 0.35], places, price) for price in (0.0, 0.1, 0.2, 0.7)]
    # Beside 0.7 and 0.35: four rows hold 0.6 and 0.5 for nothing in return, a third one displaces 0.35.
    assert asked == [3, 2, 2, 0]
    assert num_to_ask([], places, 0.45) == 2


def test_places_follow_what_was_accepted() -> None:
    rates = SourceRates()
    prior = rates.of_places("greedy", 4)
    assert prior == sorted(prior, reverse=True)
    for _ in range(3000):
        rates.saw_place("greedy", 1, accepted=True)
    assert rates.of_places("greedy", 4)[1] > 0.99
    assert rates.of_places("greedy", 4)[2] == prior[2]
