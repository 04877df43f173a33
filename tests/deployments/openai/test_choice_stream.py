"""Examples of the text, tokens and usage of one response, by value."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from api_harness import EOS, HERMES_HINT, LIMITS, TOOL_TEMPLATE
from tiny_tokenizer import byte_level

from deployments.openai.choice_stream import ChoiceStream, Echo, make_choice, read_text_deltas
from deployments.openai.engine_requests import make_submits
from deployments.openai.requests import ChatBody, CompletionBody
from deployments.openai.responses import StepTrace, TextDelta, TreeTrace
from deployments.text.detokenizer import ByteDetokenizer, StopChecker, TextStream, WindowDetokenizer
from deployments.text.logprobs import TokenName, TokenRecord
from deployments.text.reasoning import ThoughtParser
from deployments.text.tokenizer import TextCodec
from deployments.text.tool_parsers import make_parser
from engine.errors import EngineError
from engine.messages import Delta, TokenLogprobs, VerifiedTree
from engine.sampling.grammar import checked

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


def test_a_trace_shows_the_tree_of_its_step() -> None:
    tree = VerifiedTree((0, 3, 1), (-1, 0, 0), (0, 2))
    stream = choice("c", has_trace=True, name_of=lambda token_id: TokenName(WORDS[token_id].decode(), WORDS[token_id]))
    (piece,) = stream.push(delta(0, 1, 2, num_accepted_now=2, last="bonus", tree=tree))
    assert piece.trace is not None
    assert piece.trace.tree == TreeTrace(("a", "xyz", "b"), (-1, 0, 0), (0, 2))
    (piece,) = choice("b", has_trace=True, name_of=lambda token_id: TokenName("?", None)).push(
        delta(0, 1, 0, num_accepted_now=2, last="bonus", tree=tree)
    )
    assert piece.trace is not None
    assert piece.trace.tree == TreeTrace(("?",) * 3, (-1, 0, 0), (0, 2)), "the token that completes a stop is used"
    (piece,) = choice(has_trace=True).push(delta(0, num_accepted_now=1, tree=tree))
    assert piece.trace == StepTrace(1, 1, None, (0,), ("a",))


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


PIECES = (b"<think>", b"hm ", b"</think>", b"text ", b'<tool_call>{"name": "f", "arguments": {', b"}}", b"</tool_call>")
"""Bytes of tokens 0 to 6. Token 7 completes one call and begins another."""
BOTH = b'}}</tool_call><tool_call>{"name": "f", "arguments": {'


def calling(**options: Any) -> ChoiceStream:
    text = TextStream(ByteDetokenizer((*PIECES, BOTH)))
    return ChoiceStream(text, parser=make_parser("hermes", {"f": None}), **options)


def calls_of(pieces: list[TextDelta]) -> list[tuple[int, str | None, str]]:
    return [(call.number, call.name, call.arguments) for piece in pieces for call in piece.calls]


def test_calls_are_reported_as_they_arrive_and_decide_the_finish_reason() -> None:
    stream = calling()
    (first,) = stream.push(delta(3, 4))
    assert (first.text, calls_of([first])) == ("text", [(0, "f", ""), (0, None, "{")])
    (second,) = stream.push(delta(5, 6))
    assert (second.text, calls_of([second]), second.finish_reason) == ("", [(0, None, "}")], None)
    (last,) = stream.push(delta(finish_reason="stop"))
    assert (last.text, last.finish_reason, last.num_completion) == ("", "tool_calls", 4)


@pytest.mark.parametrize(
    ("tokens", "engine_reason", "reason"),
    [((4, 5, 6), "length", "length"), ((4,), "stop", "stop"), ((3,), "stop", "stop"), ((3,), "length", "length")],
)
def test_a_response_without_a_complete_call_or_cut_short_has_not_called(
    tokens: tuple[int, ...], engine_reason: str, reason: str
) -> None:
    (piece,) = calling().push(delta(*tokens, finish_reason=engine_reason))
    assert piece.finish_reason == reason


def test_without_parallel_calls_the_first_one_ends_the_choice() -> None:
    stream = calling(is_parallel=False)
    (first,) = stream.push(delta(3, 4, 7, 5, 6))
    assert (first.finish_reason, first.num_completion) == ("tool_calls", 3)
    assert {number for number, _, _ in calls_of([first])} == {0}
    (both,) = calling().push(delta(3, 4, 7, 5, 6, finish_reason="stop"))
    assert {number for number, _, _ in calls_of([both])} == {0, 1}


def test_what_the_parser_holds_back_is_shown_at_the_end() -> None:
    stream = ChoiceStream(TextStream(ByteDetokenizer((b"a <tool",))), parser=make_parser("hermes", {}))
    (first,) = stream.push(delta(0))
    (last,) = stream.push(delta(finish_reason="length"))
    assert (first.text, last.text) == ("a", " <tool")


def test_thoughts_are_split_and_counted_up_to_their_end() -> None:
    stream = ChoiceStream(TextStream(ByteDetokenizer(PIECES)), thoughts=ThoughtParser(is_open=False))
    pieces = [stream.push(delta(token))[0] for token in (0, 1, 2, 3)]
    assert [(piece.reasoning, piece.text) for piece in pieces] == [("", ""), ("hm", ""), ("", ""), ("", "text ")]
    assert [piece.num_reasoning for piece in pieces] == [1, 2, 3, 3]
    assert pieces[-1].num_completion == 4


def test_thoughts_that_do_not_end_are_thoughts() -> None:
    stream = ChoiceStream(TextStream(ByteDetokenizer((b"hm", b" </th"))), thoughts=ThoughtParser(is_open=True))
    (first,) = stream.push(delta(0, 1))
    (last,) = stream.push(delta(finish_reason="length"))
    assert (first.reasoning, last.reasoning, last.text, last.num_reasoning) == ("hm", " </th", "", 2)
    (only,) = ChoiceStream(TextStream(ByteDetokenizer((b"<th",))), thoughts=ThoughtParser(is_open=False)).push(
        delta(0, finish_reason="length")
    )
    assert (only.reasoning, only.text) == ("", "<th"), "what did not become a thought is text"


def test_an_echo_is_shown_with_the_first_delta_only() -> None:
    stream = choice(echo=Echo((3, 4, 5), detokenizer()))
    assert [stream.push(delta(0))[0].text for _ in range(2)] == ["xyzéa", "a"]


def test_a_plain_stream_and_a_recorded_one_count_alike() -> None:
    for options in ({}, {"has_trace": True}):
        stream = choice("c", **options)
        (first,) = stream.push(delta(0, num_cached=1, num_drafted=2, num_accepted=3))
        (second,) = stream.push(delta(1, 2, 0, num_cached=1, num_drafted=4, num_accepted=5))
        found = [
            (piece.num_completion, piece.num_cached, piece.num_drafted, piece.num_accepted, piece.finish_reason)
            for piece in (first, second)
        ]
        assert found == [(1, 1, 2, 3, None), (3, 1, 4, 5, "stop")]


CHAT = {"model": "m", "messages": [{"role": "user", "content": "go"}]}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def made(script: str, body: dict[str, Any], hint: str = HERMES_HINT, *, reason: str = "stop") -> list[TextDelta]:
    """The text deltas of a response of these tokens, pushed one by one."""
    tokenizer = byte_level()
    tokenizer.chat_template = TOOL_TEMPLATE + hint
    codec = TextCodec(tokenizer, eos_token_ids=[EOS])
    body_type = ChatBody if "messages" in body else CompletionBody
    parsed = body_type.model_validate_json(json.dumps(body))
    submit, *_ = make_submits(parsed, "r", codec, LIMITS, checked)
    stream = make_choice(parsed, submit, 3, codec)
    ids = codec.encode(script)
    logprobs = TokenLogprobs(logprob=-1.0)
    pieces: list[TextDelta] = []
    for index, token in enumerate(ids):
        pieces += stream.push(
            delta(
                token,
                finish_reason=reason if index == len(ids) - 1 else None,
                logprobs=(logprobs,),
                prompt_logprobs=(logprobs,) * (len(submit.prompt) - 1),
            )
        )
        if pieces[-1].finish_reason is not None:
            break
    return pieces


def text_of(pieces: list[TextDelta]) -> str:
    return "".join(piece.text for piece in pieces)


def test_a_choice_finds_calls_where_the_body_has_tools() -> None:
    assert made(CALL, {**CHAT, "tools": TOOLS})[-1].finish_reason == "tool_calls"
    assert text_of(made(CALL, CHAT)) == CALL
    assert text_of(made(CALL, {**CHAT, "tools": TOOLS, "tool_choice": "none"})) == CALL
    assert {piece.index for piece in made("go", CHAT)} == {3}


def test_a_choice_with_one_call_ends_after_it_unless_calls_may_be_parallel() -> None:
    for parallel, numbers in ((False, {0}), (True, {0, 1}), (None, {0, 1})):
        pieces = made(CALL + CALL, {**CHAT, "tools": TOOLS, "parallel_tool_calls": parallel})
        assert {call.number for piece in pieces for call in piece.calls} == numbers
        assert pieces[-1].finish_reason == "tool_calls"


def test_a_choice_splits_thoughts_where_the_prompt_leaves_them_open() -> None:
    hint = HERMES_HINT + "{# </think> #}"
    script = "<think>hm</think>go"

    def split(body: dict[str, Any], hint: str, script: str) -> tuple[str, str]:
        pieces = made(script, body, hint)
        return "".join(piece.reasoning for piece in pieces), text_of(pieces)

    assert split(CHAT, hint, script) == ("hm", "go")
    assert split(CHAT, hint + "<think>", "hm</think>go") == ("hm", "go")
    assert split(CHAT, hint + "<think></think>", script) == ("", script)
    assert split(CHAT, HERMES_HINT, script) == ("", script)
    assert split({**CHAT, "add_generation_prompt": False}, hint, script) == ("", script)


def test_the_options_of_a_body_reach_its_choice() -> None:
    completion = {"model": "m", "prompt": "a b"}
    assert text_of(made("go", {**completion, "echo": True})) == "a bgo"
    assert text_of(made("go", completion)) == "go"
    assert text_of(made("go", {**completion, "echo": True, "max_tokens": 0})) == "a b"
    assert text_of(made("one two", {**completion, "stop": " t"})) == "one"
    assert text_of(made("one two", {**completion, "stop": "o", "min_tokens": 3})).startswith("one")
    scored = made("go", {**completion, "echo": True, "logprobs": 0})
    assert [len(piece.records) for piece in scored] == [3 + 1] + [1] * (len(scored) - 1), (
        "a, space and b; then one each"
    )
    assert not any(piece.records for piece in made("go", {**completion, "echo": True}))
    assert all(piece.records for piece in made("go", {**CHAT, "logprobs": True}))
    traced = made("go", {**CHAT, "stream": True, "speculative": {"trace": True}})
    assert all(piece.trace is not None for piece in traced)
    assert all(piece.trace is None for piece in made("go", CHAT))


def test_the_request_s_own_stop_token_is_hidden() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("go")
    pieces = made("go", {"model": "m", "prompt": "a", "stop_token_ids": [ids[-1]]})
    assert text_of(pieces) == tokenizer.decode(ids[:-1])
    assert pieces[-1].num_completion == len(ids)


def test_tokens_are_streamed_one_by_one_where_the_body_says_so() -> None:
    codec = TextCodec(byte_level(), eos_token_ids=[EOS])
    for fields, num in (({"stream": True, "stream_granularity": "token"}, 2), ({"stream": True}, 1)):
        body = ChatBody.model_validate_json(json.dumps({**CHAT, **fields}))
        submit, *_ = make_submits(body, "r", codec, LIMITS, checked)
        pieces = make_choice(body, submit, 0, codec).push(delta(*codec.encode("a")[:1] * 2))
        assert len(pieces) == num
