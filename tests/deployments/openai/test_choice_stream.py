"""Examples of the text, tokens and usage of one response, by value."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from deployments.openai.choice_stream import ChoiceStream, Echo, read_text_deltas
from deployments.openai.responses import StepTrace, TextDelta
from deployments.text.detokenizer import ByteDetokenizer, StopChecker, TextStream, WindowDetokenizer
from deployments.text.logprobs import TokenRecord
from engine.errors import EngineError
from engine.messages import Delta, TokenLogprobs

WORDS = (b"a", b"b", b"c", b"xyz", "é".encode()[:1], "é".encode()[1:], b"")
"""Bytes of tokens 0 to 6; 4 and 5 are the halves of one character, and 6 shows nothing."""


def detokenizer() -> ByteDetokenizer:
    return ByteDetokenizer(WORDS)


def choice(*stops: str, min_tokens: int = 0, **options: object) -> ChoiceStream:
    return ChoiceStream(TextStream(detokenizer(), stops, min_tokens=min_tokens), **options)  # type: ignore[arg-type]


def delta(*token_ids: int, **fields: object) -> Delta:
    return Delta(request_id="r", token_ids=token_ids, **fields)  # type: ignore[arg-type]


def test_text_and_counts_of_each_delta() -> None:
    stream = choice(index=2)
    (first,) = stream.push(delta(0, 3, num_cached=7, num_drafted=5, num_accepted=1))
    assert first == TextDelta("axyz", None, 2, 7, 5, 1, 2)
    (last,) = stream.push(delta(1, finish_reason="length", num_cached=7, num_drafted=6, num_accepted=2))
    assert last == TextDelta("b", "length", 3, 7, 6, 2, 2)


def test_half_a_character_is_held_back_and_dropped_at_the_end() -> None:
    stream = choice()
    assert [stream.push(delta(token))[0].text for token in (4, 5, 4)] == ["", "é", ""]
    (last,) = stream.push(delta(0, finish_reason="length"))
    assert last.text == "\ufffda"
    (only,) = choice().push(delta(4, finish_reason="length"))
    assert only.text == "", "a response that is cut inside a character ends before it"


@pytest.mark.parametrize("by_token", [False, True])
def test_a_stop_string_ends_the_response_and_is_not_shown(by_token: bool) -> None:
    pieces = choice("yz", by_token=by_token).push(delta(0, 3, 1))
    assert "".join(piece.text for piece in pieces) == "ax"
    assert (pieces[-1].finish_reason, pieces[-1].num_completion) == ("stop", 2), "the token that completed it counts"
    assert len(pieces) == (2 if by_token else 1)


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    stream = choice("abc")
    assert [stream.push(delta(token))[0].text for token in (0, 1, 0, 1)] == ["", "", "ab", ""]
    (last,) = stream.push(delta(finish_reason="length"))
    assert (last.text, last.finish_reason, last.num_completion) == ("ab", "length", 4)


def test_a_stop_string_before_min_tokens_is_passed_over() -> None:
    stream = choice("b", min_tokens=3)
    (first,) = stream.push(delta(0, 1))
    assert (first.text, first.finish_reason) == ("ab", None)
    (second,) = stream.push(delta(1, 0))
    assert (second.text, second.finish_reason, second.num_completion) == ("", "stop", 3)


def test_a_hidden_stop_token_counts_and_is_not_shown() -> None:
    (piece,) = choice(hidden_stops={2}).push(delta(0, 2, finish_reason="stop"))
    assert (piece.text, piece.finish_reason, piece.num_completion) == ("a", "stop", 2)
    (piece,) = choice(hidden_stops={2}).push(delta(0, 2, finish_reason="length"))
    assert (piece.text, piece.finish_reason, piece.num_completion) == ("ac", "length", 2)
    (piece,) = choice(hidden_stops={1}).push(delta(0, 2, finish_reason="stop"))
    assert piece.text == "ac"


def test_one_piece_per_token_has_its_reason_on_the_last() -> None:
    pieces = choice(by_token=True).push(delta(0, 1, 2, finish_reason="length"))
    assert [(piece.text, piece.finish_reason, piece.num_completion) for piece in pieces] == [
        ("a", None, 1),
        ("b", None, 2),
        ("c", "length", 3),
    ]


def test_each_token_s_log_probabilities_have_its_offset_in_the_text() -> None:
    logprobs = tuple(TokenLogprobs(logprob=-float(i)) for i in range(3))
    stream = choice(has_logprobs=True)
    (piece,) = stream.push(delta(3, 0, logprobs=logprobs[:2]))
    assert piece.records == (TokenRecord(3, 0, logprobs[0]), TokenRecord(0, 3, logprobs[1]))
    (piece,) = stream.push(delta(1, finish_reason="length", logprobs=logprobs[2:]))
    assert piece.records == (TokenRecord(1, 4, logprobs[2]),)


def test_an_echoed_prompt_comes_first_with_its_log_probabilities() -> None:
    logprobs = tuple(TokenLogprobs(logprob=-float(i)) for i in range(3))
    echo = Echo((3, 0), detokenizer(), has_logprobs=True)
    stream = choice(echo=echo, has_logprobs=True)
    (piece,) = stream.push(delta(1, prompt_logprobs=logprobs[:1], logprobs=logprobs[1:2]))
    assert (piece.text, piece.num_completion) == ("xyzab", 1)
    assert piece.records == (TokenRecord(3, 0, None), TokenRecord(0, 3, logprobs[0]), TokenRecord(1, 4, logprobs[1]))
    (piece,) = stream.push(delta(2, finish_reason="length", logprobs=logprobs[2:]))
    assert (piece.text, piece.records) == ("c", (TokenRecord(2, 5, logprobs[2]),))


def test_only_the_prompt_is_shown_where_nothing_was_to_be_generated() -> None:
    (piece,) = choice(echo=Echo((3,), detokenizer()), has_output=False).push(delta(1))
    assert (piece.text, piece.finish_reason, piece.num_completion, piece.records) == ("xyz", "length", 0, ())


def test_a_trace_says_where_the_tokens_of_each_step_come_from() -> None:
    stream = choice("c", has_trace=True)
    (piece,) = stream.push(delta(0, 1, 3, num_accepted_now=2, last="recovered"))
    assert piece.trace == StepTrace(1, 2, "recovered", (0, 1, 3), ("a", "b", "xyz"))
    (piece,) = stream.push(delta(0, num_accepted_now=1))
    assert piece.trace == StepTrace(2, 1, None, (0,), ("a",)), "a response that ended before the target's token"
    (piece,) = stream.push(delta(0, 2, 1, num_accepted_now=2, last="bonus"))
    assert piece.trace == StepTrace(3, 2, None, (0, 2), ("a", "")), "what follows a stop string was not used"
    assert (piece.finish_reason, piece.num_completion) == ("stop", 6)


@pytest.mark.parametrize(
    ("stops", "text", "shown"),
    [
        (("abab",), "aababab", "a"),
        (("aab",), "aaab", "a"),
        (("bc", "abcd"), "abcd", "a"),
        (("cd", "abcd"), "xabcd", "x"),
        (("abcd", "cd"), "xabcd", "x"),
    ],
)
def test_the_stop_string_that_is_completed_first_wins_and_of_those_the_longest(
    stops: tuple[str, ...], text: str, shown: str
) -> None:
    for cut in range(len(text) + 1):
        checker = StopChecker(stops)
        assert checker.push(text[:cut]) + checker.push(text[cut:]) == shown, cut
        assert checker.is_stopped
        assert (checker.push("more"), checker.finish()) == ("", "")


def test_a_window_shows_a_token_s_text_as_it_is_after_its_neighbour() -> None:
    """The decoder drops the first token's leading space, as SentencePiece does, so a window must begin before it."""
    words = ("▁the", "▁end", "\ufffd", "s")
    calls: list[int] = []

    def decode(token_ids: object) -> str:
        ids = list(token_ids)  # type: ignore[call-overload]
        calls.append(len(ids))
        return "".join(words[token] for token in ids).replace("▁", " ").removeprefix(" ")

    window = WindowDetokenizer(decode)
    assert [window.push((token,)) for token in (0, 1, 2, 3)] == ["the", " end", "", "\ufffds"]
    assert max(calls) == 3, "the window stays short"
    assert window.push((2,)) == ""
    assert window.finish() == ""


class Deltas:
    """A stream of deltas that knows whether it was closed."""

    def __init__(self, *deltas: Delta) -> None:
        self.num_read, self.is_closed = 0, False
        self._deltas = deltas

    async def __call__(self) -> AsyncGenerator[Delta, None]:
        try:
            for each in self._deltas:
                self.num_read += 1
                yield each
        finally:
            self.is_closed = True


async def read(deltas: Deltas, stream: ChoiceStream) -> list[TextDelta]:
    return [piece async for piece in read_text_deltas(deltas(), stream)]


def run(deltas: Deltas, stream: ChoiceStream) -> list[TextDelta]:
    return asyncio.run(read(deltas, stream))


def test_a_stop_string_closes_the_deltas_before_their_end() -> None:
    deltas = Deltas(delta(0), delta(1), delta(2))
    assert [piece.text for piece in run(deltas, choice("b"))] == ["a", ""]
    assert (deltas.num_read, deltas.is_closed) == (2, True)


def test_a_finish_reason_is_the_end() -> None:
    deltas = Deltas(delta(0), delta(1, finish_reason="length"), delta(2))
    assert [piece.finish_reason for piece in run(deltas, choice())] == [None, "length"]
    assert (deltas.num_read, deltas.is_closed) == (2, True)


def test_an_engine_that_ends_without_a_reason_is_an_error() -> None:
    for deltas in (Deltas(delta(0)), Deltas()):
        with pytest.raises(EngineError):
            run(deltas, choice())
        assert deltas.is_closed
