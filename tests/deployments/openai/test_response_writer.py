"""JSON of responses and chunks, by value: both endpoints, tool calls, thoughts, log-probabilities, usage, traces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from deployments.openai.response_writer import ChatFormat, ChoiceFormat, CompletionFormat, ResponseWriter, join_deltas
from deployments.openai.responses import StepTrace, TextDelta, TreeTrace
from deployments.text.logprobs import TokenName, TokenRecord
from deployments.text.tool_calls import ToolCallDelta
from engine.messages import TokenLogprobs

RECORD = TokenRecord(5, 0, TokenLogprobs(logprob=-0.5))
BEGIN, MORE = ToolCallDelta(0, "", "call_1", "time"), ToolCallDelta(0, '{"a": 1}')
USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 3,
    "total_tokens": 13,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {
        "accepted_prediction_tokens": 1,
        "rejected_prediction_tokens": 4,
        "reasoning_tokens": 2,
    },
    "speculative": {"drafted": 5, "accepted": 1},
}


def name_of(token_id: int) -> TokenName:
    return TokenName(str(token_id), str(token_id).encode())


def writer(choice_format: ChoiceFormat, **options: Any) -> ResponseWriter:
    return ResponseWriter(
        choice_format,
        request_id="r",
        created=7,
        model="m",
        system_fingerprint="fp",
        **{"num_prompt": 10, **options},
    )


def delta(text: str, finish_reason: Any = None, **fields: Any) -> TextDelta:
    return TextDelta(text, finish_reason, 3, 4, 5, 1, num_reasoning=2, **fields)


def frame(object_name: str, prefix: str, *choices: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {
        "id": f"{prefix}r",
        "object": object_name,
        "created": 7,
        "model": "m",
        "choices": list(choices),
        "system_fingerprint": "fp",
        **others,
    }


def chat_choice(content: str | None, finish_reason: str, index: int = 0, **fields: Any) -> dict[str, Any]:
    message = {"content": content, "role": "assistant", "refusal": None, **fields}
    return {"message": message, "finish_reason": finish_reason, "index": index, "logprobs": None}


def test_a_whole_chat_response() -> None:
    found = json.loads(writer(ChatFormat()).response([delta("hi", "length", reasoning="hm")]))
    choice = chat_choice("hi", "length", reasoning_content="hm")
    assert found == frame("chat.completion", "chatcmpl-", choice, usage=USAGE)


@pytest.mark.parametrize(("text", "content"), [("", None), ("hm", "hm")])
def test_a_response_with_calls_has_no_empty_text(text: str, content: str | None) -> None:
    joined = join_deltas([delta(text), delta("", calls=(BEGIN,)), delta("", "tool_calls", calls=(MORE,))])
    (choice,) = json.loads(writer(ChatFormat()).response([joined]))["choices"]
    call = {"id": "call_1", "function": {"name": "time", "arguments": '{"a": 1}'}, "type": "function"}
    assert choice == chat_choice(content, "tool_calls", tool_calls=[call])
    (choice,) = json.loads(writer(ChatFormat()).response([delta("", "stop")]))["choices"]
    assert choice == chat_choice("", "stop"), "without calls an empty text is a text"


def test_a_whole_completion() -> None:
    found = json.loads(writer(CompletionFormat()).response([delta("hi", "length"), delta("", "stop", index=1)]))
    choices = [
        {"text": text, "finish_reason": reason, "index": index, "logprobs": None}
        for index, (text, reason) in enumerate((("hi", "length"), ("", "stop")))
    ]
    assert found.pop("usage")["completion_tokens"] == 6
    assert found == frame("text_completion", "cmpl-", *choices)


def chunk(choice_format: ChoiceFormat, text_delta: TextDelta, *, is_first: bool = False) -> dict[str, Any]:
    found = json.loads(writer(choice_format).chunk(text_delta, is_first=is_first, includes_usage=False))
    (choice,) = found.pop("choices")
    found.pop("paceline", None)
    is_chat = isinstance(choice_format, ChatFormat)
    assert found | {"choices": []} == frame(
        *(("chat.completion.chunk", "chatcmpl-") if is_chat else ("text_completion", "cmpl-"))
    )
    return dict(choice)


@pytest.mark.parametrize(
    ("text_delta", "is_first", "expected"),
    [
        (delta("hi"), True, {"role": "assistant", "content": "hi"}),
        (delta(""), True, {"role": "assistant", "content": ""}),
        (delta("hi"), False, {"content": "hi"}),
        (delta("", "stop"), False, {}),
        (delta("", reasoning="hm"), True, {"role": "assistant", "reasoning_content": "hm"}),
        (delta("hi", reasoning="hm"), False, {"content": "hi", "reasoning_content": "hm"}),
        (
            delta("", calls=(BEGIN,)),
            True,
            {
                "role": "assistant",
                "tool_calls": [
                    {"index": 0, "function": {"name": "time", "arguments": ""}, "id": "call_1", "type": "function"}
                ],
            },
        ),
        (delta("", calls=(MORE,)), False, {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": 1}'}}]}),
    ],
)
def test_what_a_chat_chunk_adds(text_delta: TextDelta, is_first: bool, expected: dict[str, Any]) -> None:
    found = chunk(ChatFormat(), text_delta, is_first=is_first)
    assert found == {"delta": expected, "finish_reason": text_delta.finish_reason, "index": 0, "logprobs": None}


def test_what_a_completion_chunk_adds() -> None:
    for text_delta in (delta("hi", index=2), delta("", "stop")):
        assert chunk(CompletionFormat(), text_delta) == {
            "text": text_delta.text,
            "finish_reason": text_delta.finish_reason,
            "index": text_delta.index,
            "logprobs": None,
        }


def test_log_probabilities_are_in_the_endpoint_s_format_where_tokens_have_names() -> None:
    text_delta = delta("hi", "stop", records=(RECORD,))
    (choice,) = json.loads(writer(ChatFormat(name_of)).response([text_delta]))["choices"]
    assert choice["logprobs"]["content"][0] == {"token": "5", "logprob": -0.5, "bytes": [53], "top_logprobs": []}
    assert chunk(ChatFormat(name_of), text_delta)["logprobs"] == choice["logprobs"]
    expected = {"tokens": ["5"], "token_logprobs": [-0.5], "top_logprobs": None, "text_offset": [0]}
    assert chunk(CompletionFormat(name_of), text_delta)["logprobs"] == expected
    assert chunk(CompletionFormat(name_of, 1), text_delta)["logprobs"]["top_logprobs"] == [{"5": -0.5}]
    for choice_format in (ChatFormat(), CompletionFormat()):
        assert chunk(choice_format, text_delta)["logprobs"] is None
    for choice_format in (ChatFormat(name_of), CompletionFormat(name_of)):
        assert chunk(choice_format, delta("hi"))["logprobs"] is None


@pytest.mark.parametrize("choice_format", [ChatFormat(), CompletionFormat()], ids=["chat", "completion"])
@pytest.mark.parametrize("includes_usage", [False, True])
def test_a_chunk_from_the_template_equals_a_written_one(choice_format: Any, includes_usage: bool) -> None:
    """Continuous usage switches the template off, so those chunks differ in their usage only."""
    fast, slow = writer(choice_format), writer(choice_format, has_continuous_usage=True)
    for index in (0, 3, 0):
        for text in ("hi", '"\\\n🙂', "hi"):
            found, full = (
                json.loads(each.chunk(delta(text, index=index), is_first=False, includes_usage=includes_usage))
                for each in (fast, slow)
            )
            assert full.pop("usage")["total_tokens"] > 0
            assert ("usage" in found) is includes_usage
            assert found.pop("usage", None) is None
            assert found == full


def test_a_trace_is_part_of_its_chunk() -> None:
    trace = StepTrace(2, 1, "bonus", (5, 6), ("h", "i"))
    text = writer(ChatFormat()).chunk(delta("hi", trace=trace), is_first=False, includes_usage=False)
    assert json.loads(text)["paceline"] == {
        "step": 2,
        "accepted": 1,
        "last": "bonus",
        "token_ids": [5, 6],
        "texts": ["h", "i"],
    }
    tree = TreeTrace(("a", "b"), (-1, -1), (1,))
    text = writer(ChatFormat()).chunk(
        delta("hi", trace=replace(trace, tree=tree)), is_first=False, includes_usage=False
    )
    assert json.loads(text)["paceline"]["tree"] == {"texts": ["a", "b"], "parents": [-1, -1], "path": [1]}


def test_continuous_usage_sums_the_latest_of_each_choice() -> None:
    written = writer(ChatFormat(), num_choices=2, choices_per_prompt=2, has_continuous_usage=True)
    totals = [
        json.loads(written.chunk(delta("a", index=index), is_first=False, includes_usage=True))["usage"]
        for index in (0, 1, 0)
    ]
    assert [usage["completion_tokens"] for usage in totals] == [3, 6, 6]
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in totals] == [4, 4, 4]


def test_usage_counts_the_cached_tokens_of_each_prompt_once() -> None:
    """Two prompts of two choices each: choices 0 and 2 are the first ones."""
    lasts = [delta("", "stop", index=index) for index in range(4)]
    found = json.loads(writer(ChatFormat(), num_choices=4, choices_per_prompt=2).usage_chunk(lasts))
    usage = {
        "prompt_tokens": 10,
        "completion_tokens": 12,
        "total_tokens": 22,
        "prompt_tokens_details": {"cached_tokens": 8},
        "completion_tokens_details": {
            "accepted_prediction_tokens": 4,
            "rejected_prediction_tokens": 16,
            "reasoning_tokens": 8,
        },
        "speculative": {"drafted": 20, "accepted": 4},
    }
    assert found == frame("chat.completion.chunk", "chatcmpl-", usage=usage)
    assert writer(ChatFormat(), num_choices=4).num_choices == 4


def test_joined_deltas_hold_all_text_and_the_last_totals() -> None:
    first = TextDelta("a", None, 1, 2, 3, 1, 1, "h", 1, (RECORD,), (BEGIN, MORE))
    second = ToolCallDelta(1, "{}", "call_2", "other")
    last = TextDelta("b", "tool_calls", 5, 6, 7, 2, 1, "m", 2, (RECORD, RECORD), (MORE, second))
    assert join_deltas([first, last]) == TextDelta(
        "ab",
        "tool_calls",
        5,
        6,
        7,
        2,
        1,
        "hm",
        2,
        (RECORD,) * 3,
        (ToolCallDelta(0, '{"a": 1}' * 2, "call_1", "time"), second),
    )


@pytest.mark.parametrize(
    ("text_delta", "is_plain", "is_silent"),
    [
        (delta("a"), True, False),
        (delta(""), False, True),
        (delta("a", "stop"), False, False),
        (delta("", "stop"), False, False),
        (delta("a", reasoning="h"), False, False),
        (delta("", reasoning="h"), False, False),
        (delta("a", records=(RECORD,)), False, False),
        (delta("", records=(RECORD,)), False, False),
        (delta("a", calls=(MORE,)), False, False),
        (delta("", calls=(MORE,)), False, False),
        (delta("a", trace=StepTrace(1, 0, None, (), ())), False, False),
        (delta("", trace=StepTrace(1, 0, None, (), ())), False, False),
    ],
)
def test_which_deltas_hold_text_only_or_nothing(text_delta: TextDelta, is_plain: bool, is_silent: bool) -> None:
    assert (text_delta.is_plain, text_delta.is_silent) == (is_plain, is_silent)
