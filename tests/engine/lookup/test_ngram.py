"""Prompt lookup: the longest match decides, its latest occurrence is drafted, an index lives as long as its request."""

from __future__ import annotations

import random

import pytest

from engine.core.pacing import MAX_MATCH_LEN
from engine.core.request import Request
from engine.core.step import Batch, Span
from engine.lookup.continuations import Expected, Role
from engine.lookup.ngram import MAX_OCCURRENCES, Lookup, NgramDrafter
from engine.messages import SamplingParams, Submit


def request_of(tokens: list[int], key: int = 1) -> Request:
    submit = Submit(request_id=str(key), prompt=tuple(tokens), sampling=SamplingParams())
    return Request(submit=submit, key=key, stream_key=0, tokens=tokens)


def draft(drafter: NgramDrafter, request: Request, k: int) -> tuple[tuple[int, ...], int, str]:
    span = Span(request, len(request.tokens) - 1, 1, k, samples=True, reason="probe")
    (row,) = drafter.draft(Batch(1, (span,), 0)).rows
    return row.token_ids, row.match_len, row.reason


@pytest.mark.parametrize(
    ("tokens", "expected", "match_len"),
    [
        ([1, 2, 3, 1, 2], (3, 1), 2),
        ([1, 2, 3, 9, 1, 2, 4, 1, 2], (4, 1), 2),  # the latest occurrence
        ([5, 1, 2, 3, 6, 1, 2, 4, 5, 1, 2], (3, 6), 3),  # a longer match before a later one
        ([1, 1, 1], (1,), 2),  # a match may overlap the suffix
        ([1, 2, 3, 4], (), 0),
        ([1, 2, 1], (), 0),  # shorter than min_size
        ([1], (), 0),
    ],
)
def test_the_continuation_of_the_longest_match(tokens: list[int], expected: tuple[int, ...], match_len: int) -> None:
    found = draft(NgramDrafter(min_size=2, max_size=3), request_of(tokens), k=2)
    assert found == (expected, match_len, "probe" if expected else "no_match")


def test_a_match_is_counted_beyond_the_indexed_size_up_to_the_limit() -> None:
    text = list(range(100, 100 + MAX_MATCH_LEN + 5))
    drafter = NgramDrafter(min_size=2, max_size=3)
    for length in (4, MAX_MATCH_LEN, MAX_MATCH_LEN + 3):
        tokens = [*text, 1, *text[-length:]]
        assert draft(drafter, request_of(tokens, key=length), k=1) == ((1,), min(length, MAX_MATCH_LEN), "probe")


def test_an_index_that_grows_finds_what_a_new_one_finds() -> None:
    rng = random.Random(3)
    drafter, request = NgramDrafter(min_size=1, max_size=3), request_of([0])
    for _ in range(200):
        request.tokens += [rng.randrange(4) for _ in range(rng.randint(1, 3))]
        fresh = NgramDrafter(min_size=1, max_size=3)
        assert draft(drafter, request, k=3) == draft(fresh, request_of(list(request.tokens)), k=3)


def test_no_draft_without_k_and_nothing_after_forget() -> None:
    drafter = NgramDrafter(min_size=1, max_size=2)
    request = request_of([1, 2, 1])
    assert draft(drafter, request, k=0) == ((), 0, "probe")
    assert draft(drafter, request, k=1) == ((2,), 1, "probe")
    drafter.forget([1, 7])
    # Another request with the same key must not see the old index.
    assert draft(drafter, request_of([1]), k=1) == ((), 0, "no_match")


def role_only(match_len: int, is_shared: bool) -> Expected:
    """Expectations that depend on the role alone."""
    del match_len, is_shared
    shares: dict[Role, float] = {"alone": 0.9, "first": 0.6, "other": 0.3}
    return lambda role, depth: shares[role]


@pytest.mark.parametrize(
    ("tokens", "expected", "parents"),
    [
        ([1, 2, 3, 5, 1, 2, 4, 6, 7, 1, 2], (4, 6, 7, 1, 2, 3), (-1, 0, 1, 2, 3, -1)),
        ([1, 2, 3, 5, 1, 2, 3, 6, 7, 1, 2], (3, 6, 7, 1, 2, 5), (-1, 0, 1, 2, 3, 0)),  # alike, then otherwise
        ([1, 2, 3, 1, 2, 4, 1, 2, 3, 8, 9, 1, 2], (3, 8, 9, 4, 1, 1), (-1, 0, 1, -1, 2, 3)),  # two of three
        ([1, 2, 3, 1, 2], (3, 1, 2), (-1, 0, 1)),
    ],
)
def test_a_tree_has_the_continuations_of_several_occurrences(
    tokens: list[int], expected: tuple[int, ...], parents: tuple[int, ...]
) -> None:
    lookup = Lookup(min_size=2, max_size=2)
    (match,) = lookup.continuations(request_of(tokens), 6, role_only)
    found = match.continuations
    assert (found.token_ids, found.parents, match.is_shared) == (expected, parents, False)


def test_only_the_latest_occurrences_are_kept() -> None:
    tokens = [token for other in range(10, 20) for token in (1, 2, other)] + [1, 2]
    (match,) = Lookup(min_size=2, max_size=2).continuations(request_of(tokens), 99, role_only)
    firsts = [
        token
        for token, parent in zip(match.continuations.token_ids, match.continuations.parents, strict=True)
        if parent < 0
    ]
    assert firsts == list(range(19, 19 - MAX_OCCURRENCES, -1))


def test_a_tree_that_grows_finds_what_a_new_one_finds() -> None:
    rng = random.Random(4)
    lookup, request = Lookup(min_size=1, max_size=3), request_of([0])
    for _ in range(100):
        request.tokens += [rng.randrange(4) for _ in range(rng.randint(1, 3))]
        fresh = Lookup(min_size=1, max_size=3)
        assert lookup.continuations(request, 9, role_only) == fresh.continuations(
            request_of(list(request.tokens)), 9, role_only
        )
