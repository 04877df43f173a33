"""Texts of other requests: what is found is there, in the own group, and the memory is bounded."""

from __future__ import annotations

import random

import pytest
from fakes import FixedPacer, ToyEngine, ToyModel

from engine.core.drafter import NoDrafter
from engine.core.request import Request
from engine.core.step import Batch, Span, Verdict
from engine.lookup.continuations import Role
from engine.lookup.ngram import SHARED_MATCH_LEN, NgramDrafter
from engine.lookup.shared_text import ANCHOR, BYTES_PER_TOKEN, MAX_MATCH, Found, SharedText
from engine.messages import SamplingParams, Submit

SMALL = 1024 * BYTES_PER_TOKEN


def test_the_longest_match_then_the_most_frequent_continuation_then_the_latest() -> None:
    texts = SharedText(SMALL)
    texts.add([1, 2, 3, 4, 50, 51], 0)
    texts.add([9, 1, 2, 3, 4, 60, 61], 0)
    texts.add([1, 2, 3, 4, 50, 52], 0)
    assert texts.find([9, 1, 2, 3, 4], 0, 3) == Found((60, 61), 5)  # ends with its text
    assert texts.find([8, 1, 2, 3, 4], 0, 1) == Found((50,), 4)  # two of three
    assert texts.find([8, 1, 2, 3, 4], 0, 2) == Found((50, 52), 4)  # the later one of those two
    assert texts.find([1, 2, 3, 4, 60], 0, 1) == Found((61,), 5)
    assert texts.find([2, 3, 4, 60, 61], 0, 1) is None  # nothing follows
    assert texts.find([2, 3, 4], 0, 1) is None
    assert texts.find([7, 7, 7, 7], 0, 1) is None


def test_all_continuations_of_the_longest_match_form_a_tree() -> None:
    shares: dict[Role, float] = {"alone": 0.9, "first": 0.6, "other": 0.3}
    texts = SharedText(SMALL)
    for text in ([1, 2, 3, 4, 50, 51], [9, 1, 2, 3, 4, 60, 61], [1, 2, 3, 4, 50, 52]):
        texts.add(text, 0)
    found = texts.find_all([8, 1, 2, 3, 4], 0, 9, lambda role, depth: shares[role])
    assert found is not None
    assert found.token_ids == (50, 52, 60, 61, 51)
    assert found.parents == (-1, 0, -1, 2, 0)
    assert found.roles == ("first", "first", "other", "alone", "other")
    longer = texts.find_all([9, 1, 2, 3, 4], 0, 9, lambda role, depth: shares[role])
    assert longer is not None
    assert longer.token_ids == (60, 61)
    assert texts.find_all([2, 3, 4, 60, 61], 0, 9, lambda role, depth: 1.0) is None  # nothing follows
    assert texts.find_all([2, 3, 4], 0, 9, lambda role, depth: 1.0) is None


def test_groups_do_not_see_each_other() -> None:
    texts = SharedText(SMALL)
    texts.add(list(range(100, 120)), 1)
    texts.add(list(range(100, 110)), 2)
    for group, expected in ((1, Found((110, 111), 10)), (2, None), (3, None)):
        assert texts.find(list(range(100, 110)), group, 2) == expected
    assert texts.find([101, 102, 103, 104], 2, 1) == Found((105,), 4)


def test_a_match_is_counted_up_to_its_limit() -> None:
    texts = SharedText(SMALL)
    texts.add(list(range(200)), 0)
    assert texts.find(list(range(150)), 0, 2) == Found((150, 151), MAX_MATCH)


def test_what_is_found_is_there_and_old_texts_are_not() -> None:
    """Random texts of three groups over few tokens, many times the capacity."""
    rng, texts = random.Random(1), SharedText(SMALL)
    assert (texts.capacity, texts.num_bytes) == (1024, SMALL)
    kept: list[tuple[int, list[int]]] = []
    num_found = 0
    for _ in range(400):
        group, text = rng.randrange(3), [rng.randrange(6) for _ in range(rng.randint(1, 60))]
        asked = [rng.randrange(6) for _ in range(30)]
        if kept and rng.random() < 0.5:  # a part of a text that may still be there
            asked += rng.choice(kept)[1][:20]
        found = texts.find(asked, group, 4)
        if found is not None:
            num_found += 1
            match = (asked[-found.match_len :] + list(found.token_ids))[: found.match_len + 4]
            assert ANCHOR <= found.match_len <= MAX_MATCH
            assert any(
                other == group and any(held[i : i + len(match)] == match for i in range(len(held)))
                for other, held in kept
            )
        texts.add(text, group)
        kept.append((group, text))
        while sum(len(held) + 1 for _, held in kept[1:]) > texts.capacity:
            kept.pop(0)
    assert num_found > 50


def test_a_text_longer_than_the_memory_keeps_its_end() -> None:
    texts = SharedText(SMALL)
    texts.add(list(range(3000)), 0)
    assert texts.find([2994, 2995, 2996, 2997], 0, 5) == Found((2998, 2999), 4)
    assert texts.find([100, 101, 102, 103], 0, 1) is None


def test_after_a_billion_tokens_the_texts_are_forgotten_and_positions_start_again() -> None:
    texts = SharedText(SMALL)
    texts._next = (1 << 30) - 6
    texts.add([1, 2, 3, 4, 5], 0)  # with its separator it ends at the limit
    assert texts.find([1, 2, 3, 4], 0, 2) == Found((5,), 4)
    texts.add([11, 12, 13, 14, 15, 16], 0)
    assert texts.find([1, 2, 3, 4], 0, 2) is None
    assert texts.find([11, 12, 13, 14], 0, 2) == Found((15, 16), 4)
    texts.add([1, 2, 3, 4, 6], 0)
    assert texts.find([1, 2, 3, 4], 0, 2) == Found((6,), 4)
    assert texts.find([13, 14, 15, 16], 0, 1) is None, "a text ends where it ended"


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(ValueError, match=r"num_bytes: 1000 given, at least 16384 are needed"):
        SharedText(1000)


def request_of(key: int, prompt: list[int], output: list[int], client: str) -> Request:
    submit = Submit(request_id=str(key), prompt=tuple(prompt), sampling=SamplingParams(), client=client)
    return Request(submit=submit, key=key, stream_key=0, tokens=prompt + output)


def draft(drafter: NgramDrafter, request: Request, k: int = 2) -> tuple[tuple[int, ...], int]:
    span = Span(request, len(request.tokens) - 1, 1, k, samples=True, reason="plan")
    (row,) = drafter.draft(Batch(1, (span,), 0)).rows
    return row.token_ids, row.match_len


def finish(drafter: NgramDrafter, request: Request, *, reason: str = "stop") -> None:
    request.finish_reason = reason  # type: ignore[assignment]
    span = Span(request, len(request.tokens) - 1, 1, 0, samples=True, reason="plan")
    drafter.committed(Batch(1, (span,), 0), Verdict(()))


TEXT = [11, 12, 13, 14, 15, 16]


@pytest.mark.parametrize(
    ("per_client", "first", "second", "is_found"),
    [
        (True, "a", "a", True),
        (True, "a", "b", False),
        (True, "", "", False),  # without keys nobody is known
        (False, "a", "b", True),
        (False, "", "", True),
    ],
)
def test_outputs_of_finished_requests_are_looked_up_within_their_scope(
    per_client: bool, first: str, second: str, is_found: bool
) -> None:
    drafter = NgramDrafter(min_size=2, max_size=4, shared=SharedText(SMALL), per_client=per_client)
    asking = request_of(2, [1, 2, *TEXT[:4]], [], second)
    finish(drafter, request_of(1, [21, 22, 23, 24, 25], TEXT, first))
    assert draft(drafter, asking) == (((15, 16), SHARED_MATCH_LEN) if is_found else ((), 0))
    assert draft(drafter, request_of(3, [21, 22, 23, 24], [], second)) == ((), 0)  # prompts are not shared


def test_nothing_is_shared_before_a_request_ends_nor_by_default() -> None:
    running = request_of(1, [1], TEXT, "a")
    for drafter in (
        NgramDrafter(min_size=2, max_size=4, shared=SharedText(SMALL)),
        NgramDrafter(min_size=2, max_size=4),
    ):
        span = Span(running, len(running.tokens) - 1, 1, 0, samples=True, reason="plan")
        drafter.committed(Batch(1, (span,), 0), Verdict(()))
        assert draft(drafter, request_of(2, TEXT[:4], [], "a")) == ((), 0)


def test_the_own_text_comes_first_unless_the_other_match_is_longer() -> None:
    drafter = NgramDrafter(min_size=2, max_size=4, shared=SharedText(SMALL))
    finish(drafter, request_of(1, [1], TEXT, "a"))
    equal = request_of(2, [*TEXT[:4], 70, 71, 3, *TEXT[:4]], [], "a")
    assert draft(drafter, equal) == ((70, 71), 4)
    shorter = request_of(3, [*TEXT[2:4], 70, 71, 3, *TEXT[:4]], [], "a")
    assert draft(drafter, shorter) == ((15, 16), SHARED_MATCH_LEN)


def test_a_long_match_in_the_own_text_comes_first_whatever_the_others_have() -> None:
    """Eight tokens match in the own text, twelve in the other. Beyond MAX_MATCH_LEN, which is eight, none is longer."""
    drafter, long = NgramDrafter(min_size=2, max_size=4, shared=SharedText(SMALL)), list(range(100, 112))
    finish(drafter, request_of(1, [1], [*long, 15, 16], "a"))
    assert draft(drafter, request_of(2, [*long[-8:], 70, 71, 3, *long], [], "a")) == ((70, 71), 8)
    assert draft(drafter, request_of(3, [*long[-7:], 70, 71, 3, *long], [], "a")) == ((15, 16), SHARED_MATCH_LEN)


def test_sharing_changes_no_output_and_makes_drafts_right() -> None:
    """Greedy, seeded and unseeded requests of one client, three times; the seeded ones come out as without drafts."""
    params = [SamplingParams(temperature=t, seed=seed, max_tokens=40) for t, seed in ((0.0, None), (1.0, 7), (1.0, 8))]
    submits = [
        Submit(request_id=f"{turn}.{i}", prompt=(3, i, turn), sampling=sampling, client="a")
        for turn in range(3)
        for i, sampling in enumerate(params)
    ]
    shared = NgramDrafter(min_size=4, max_size=4, shared=SharedText(SMALL))
    outputs, num_drafted = [], 0
    for drafter in (NoDrafter(), shared):
        engine = ToyEngine(ToyModel(vocab_size=60, sharpness=4.0), drafter, FixedPacer(4))
        found = {}
        for submit in submits:  # one after the other, so that each finds the outputs of those before
            found |= engine.run([submit])
        outputs.append(found)
        num_drafted = sum(delta.num_drafted for deltas in engine.deltas.values() for delta in deltas[-1:])
    assert outputs[0] == outputs[1]
    assert num_drafted > 10
