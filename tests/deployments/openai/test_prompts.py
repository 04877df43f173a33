"""Prompts of conversations and of /tokenize: tools, thoughts, options of the template, and refusals by field."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from api_harness import CODEC, EOS, HERMES_HINT, LIMITS, TOOL_TEMPLATE
from pydantic import ValidationError
from tiny_tokenizer import TEMPLATE, byte_level

from deployments.openai.prompts import ApiLimits, check_ids, detokenize, encode_prompts, has_messages, tokenize
from deployments.openai.requests import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, TokenizeChatBody
from deployments.text.tokenizer import TextCodec
from engine.errors import InvalidRequest

CHAT = {"model": "m", "messages": [{"role": "user", "content": "go"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
HISTORY = [
    CHAT["messages"][0],
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "content": "a", "tool_call_id": "1"},
]
THOUGHTS = "{# <think> </think> #}"


def codec_of(template: str, *, generic_tools: bool = False) -> TextCodec:
    tokenizer = byte_level()
    tokenizer.chat_template = template
    return TextCodec(tokenizer, eos_token_ids=[EOS], generic_tools=generic_tools)


def prompt_of(codec: TextCodec, limits: ApiLimits | None = None, **fields: Any) -> str:
    body = ChatBody.model_validate_json(json.dumps({**CHAT, **fields}))
    (prompt,) = encode_prompts(body, codec, limits or replace(LIMITS, max_model_len=2048))
    return codec.decode(prompt)


def refusal(codec: TextCodec, **fields: Any) -> str | None:
    with pytest.raises(InvalidRequest) as caught:
        prompt_of(codec, **fields)
    return caught.value.field


def test_tools_are_shown_to_the_model_unless_it_may_not_call_them() -> None:
    codec = codec_of(TOOL_TEMPLATE + HERMES_HINT)
    shown = f"tools\n{json.dumps(TOOL)}\nuser\ngo\nassistant\n"
    assert json.loads(prompt_of(codec, tools=[TOOL]).splitlines()[1]) == TOOL
    assert prompt_of(codec, tools=[TOOL]).splitlines()[2:] == shown.splitlines()[2:]
    assert prompt_of(codec, tools=[TOOL], tool_choice="none") == "user\ngo\nassistant\n"
    assert prompt_of(codec, messages=HISTORY).startswith("user\ngo\nassistant\nf {}\ntool\na\n")


def test_a_model_without_tools_refuses_them_and_turns_with_them() -> None:
    codec = codec_of(TEMPLATE)
    assert refusal(codec, tools=[TOOL]) == "tools"
    assert prompt_of(codec, tools=[TOOL], tool_choice="none") == "user\ngo\nassistant\n"
    assert refusal(codec, messages=HISTORY) == "messages[1].tool_calls"
    assert refusal(codec, messages=[HISTORY[0], HISTORY[2]]) == "messages[1].role"


def test_generic_tools_are_plain_turns() -> None:
    codec = codec_of(TEMPLATE, generic_tools=True)
    assert prompt_of(codec, tools=[TOOL]).startswith("system\nYou have these functions.")
    assert prompt_of(codec, messages=HISTORY).count("<tool_call>") == 1
    assert prompt_of(codec) == "user\ngo\nassistant\n"


def test_the_end_of_the_prompt() -> None:
    assert prompt_of(CODEC, add_generation_prompt=False) == "user\ngo\n"
    history = [*CHAT["messages"], {"role": "assistant", "content": "stop"}]
    assert prompt_of(CODEC, messages=history, continue_final_message=True) == "user\ngo\nassistant\nstop"


SWITCH = TEMPLATE + THOUGHTS + "[{{ enable_thinking }}]"
EFFORT = TEMPLATE + THOUGHTS + "[{{ reasoning_effort }}]"


@pytest.mark.parametrize(
    ("template", "fields", "shown"),
    [
        (SWITCH, {"enable_thinking": True}, "[True]"),
        (SWITCH, {"enable_thinking": False}, "[False]"),
        (SWITCH, {"reasoning_effort": "none"}, "[False]"),
        (SWITCH, {"reasoning_effort": "minimal"}, "[False]"),
        (SWITCH, {"reasoning_effort": "low"}, "[True]"),
        (SWITCH, {"reasoning_effort": "high", "enable_thinking": False}, "[False]"),
        (SWITCH, {"chat_template_kwargs": {"enable_thinking": 3}}, "[3]"),
        (EFFORT, {"reasoning_effort": "high"}, "[high]"),
        (EFFORT, {"reasoning_effort": "none"}, "[none]"),
        (EFFORT, {"enable_thinking": True}, "[]"),
        (TEMPLATE, {"reasoning_effort": "none"}, ""),
        (TEMPLATE, {"enable_thinking": False}, ""),
        (TEMPLATE + THOUGHTS, {"enable_thinking": True}, ""),
    ],
)
def test_thinking_becomes_what_the_template_reads(template: str, fields: dict[str, Any], shown: str) -> None:
    assert prompt_of(codec_of(template), **fields) == f"user\ngo\nassistant\n{shown}"


@pytest.mark.parametrize(
    ("template", "fields"),
    [
        (TEMPLATE, {"reasoning_effort": "low"}),
        (TEMPLATE, {"reasoning_effort": "minimal"}),
        (TEMPLATE + THOUGHTS, {"reasoning_effort": "none"}),
        (TEMPLATE + THOUGHTS, {"reasoning_effort": "high"}),
        (TEMPLATE, {"enable_thinking": True}),
        (TEMPLATE + THOUGHTS, {"enable_thinking": False}),
        (EFFORT, {"enable_thinking": False}),
    ],
)
def test_what_the_template_cannot_switch_is_refused(template: str, fields: dict[str, Any]) -> None:
    assert refusal(codec_of(template), **fields) == next(iter(fields))


def test_several_prompts_and_token_ids() -> None:
    body = CompletionBody.model_validate_json(json.dumps({"model": "m", "prompt": [[5, 6], [7]]}))
    assert encode_prompts(body, CODEC, LIMITS) == ((5, 6), (7,))


def test_ids_are_checked_at_both_ends_of_the_vocabulary() -> None:
    limits = ApiLimits(max_model_len=8, vocab_size=10)
    check_ids([], "a", "b", limits)
    check_ids([0, 9], "a", "b", limits)
    for ids, message in (
        ([0, 10], "a: token id 10 at index 1 is outside 0 to 9"),
        ([-1], "a: token id -1 at index 0 is outside 0 to 9"),
        ([10**18], "a: token id a very large number at index 0 is outside 0 to 9"),
        ([10**18 - 1], "a: token id 999999999999999999 at index 0 is outside 0 to 9"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            check_ids(ids, "a", "b", limits)
        assert (str(caught.value), caught.value.field) == (message, "b")


def test_the_limits_of_a_server_by_default() -> None:
    limits = ApiLimits(max_model_len=8, vocab_size=10)
    assert (limits.max_body_bytes, limits.max_prompt_tokens, limits.inline_body_bytes, limits.strict_max_tokens) == (
        4_194_304,
        None,
        4096,
        False,
    )


@pytest.mark.parametrize(
    ("raw", "expected"),
    [(b'{"messages": []}', True), (b'{"prompt": "messages"}', False), (b'["messages"]', False), (b"{", False)],
)
def test_whether_a_body_holds_a_conversation(raw: bytes, expected: bool) -> None:
    assert has_messages(raw) is expected


def test_tokenize_counts_what_a_generation_would_get() -> None:
    chat = tokenize(TokenizeChatBody.model_validate_json(json.dumps(CHAT)), CODEC, LIMITS)
    assert chat.tokens == CODEC.encode("<|start|>user\ngo<|end|>\n<|start|>assistant\n")
    assert (chat.count, chat.max_model_len) == (len(chat.tokens), 256)
    text = tokenize(TokenizeBody(model="m", prompt="go"), CODEC, LIMITS)
    assert text.tokens == CODEC.encode("go")
    assert tokenize(TokenizeBody(model="m", prompt=""), CODEC, LIMITS).count == 0
    with_tools = codec_of(TOOL_TEMPLATE + HERMES_HINT)
    body = TokenizeChatBody.model_validate_json(json.dumps({**CHAT, "tools": [TOOL]}))
    assert "tools" in with_tools.decode(tokenize(body, with_tools, LIMITS).tokens)


def test_detokenize_shows_text_and_checks_ids() -> None:
    ids = [*CODEC.encode("go é"), EOS]
    assert (
        detokenize(DetokenizeBody.model_validate_json(json.dumps({"model": "m", "tokens": ids})), CODEC, LIMITS).prompt
        == "go é"
    )
    body = DetokenizeBody.model_validate_json(json.dumps({"model": "m", "tokens": [LIMITS.vocab_size]}))
    with pytest.raises(InvalidRequest) as caught:
        detokenize(body, CODEC, LIMITS)
    assert caught.value.field == "tokens"


def test_the_json_schema_of_token_ids() -> None:
    schema = DetokenizeBody.model_json_schema()
    for tokens, accepted in (([], True), ([5, 6], True), ("5", False), (["5"], False), ([0.5], False)):
        body = {"model": "m", "tokens": tokens}
        assert jsonschema.Draft202012Validator(schema).is_valid(body) is accepted
        try:
            DetokenizeBody.model_validate_json(json.dumps(body))
        except ValidationError:
            assert not accepted
        else:
            assert accepted


def test_a_conversation_that_does_not_fit_is_refused_by_its_field() -> None:
    length = len(encode_prompts(ChatBody.model_validate_json(json.dumps(CHAT)), CODEC, LIMITS)[0])
    prompt_of(CODEC, replace(LIMITS, max_model_len=length + 1))
    for limits in (replace(LIMITS, max_model_len=length), replace(LIMITS, max_prompt_tokens=length - 1)):
        with pytest.raises(InvalidRequest, match=f"messages has {length}") as caught:
            prompt_of(CODEC, limits)
        assert caught.value.field == "messages"
