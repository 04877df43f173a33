"""Turns, tools and tool choices: which values the parser and the JSON Schema accept, and what templates get."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from pydantic import ValidationError

from deployments.openai.messages import ToolChoice
from deployments.openai.requests import ChatBody
from deployments.openai.structured import MAX_CHOICE_STRINGS, MAX_GRAMMAR_LEN, MAX_REGEX_LEN
from engine.messages import GrammarSpec

USER = {"role": "user", "content": "go"}
CHAT = {"model": "m", "messages": [USER]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
NAMED = {"type": "function", "function": {"name": "f"}}


def call(arguments: str = "{}", **changes: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}, **changes}


def turn(role: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, **fields}]}


def chat(**fields: Any) -> ChatBody:
    return ChatBody.model_validate_json(json.dumps({**CHAT, **fields}))


def is_accepted(fields: dict[str, Any]) -> bool:
    try:
        chat(**fields)
    except ValidationError:
        return False
    return True


VALIDATOR = jsonschema.Draft202012Validator(ChatBody.model_json_schema())
SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}
BOTH = [
    *((turn(role, content="a"), True) for role in ("system", "developer", "user", "assistant")),
    (turn("tool", content="a", tool_call_id="1"), True),
    (turn("function", content="a"), False),
    (turn("tool", content="a", tool_call_id="1" * 256), True),
    (turn("tool", content="a", tool_call_id="1" * 257), False),
    (turn("tool", content="a", tool_call_id=""), False),
    (turn("user", content="a", name="n" * 256), True),
    (turn("user", content="a", name="n" * 257), False),
    (turn("assistant", tool_calls=[call()]), True),
    (turn("assistant", tool_calls=[call(id="i" * 256, index=0, cache_control={})]), True),
    (turn("assistant", tool_calls=[call(id="i" * 257)]), False),
    (turn("assistant", tool_calls=[call(id="")]), False),
    (turn("assistant", tool_calls=[call(type="other")]), False),
    (turn("assistant", tool_calls=[call(function={"name": "a b", "arguments": "{}"})]), False),
    (turn("assistant", content="a", annotations=[1], cache_control={}, provider_specific_fields=2), True),
    (turn("assistant", content="a", refusal="no"), False),
    (turn("assistant", content="a", audio={}), False),
    (turn("assistant", content="a", function_call={}), False),
    ({"tools": [TOOL], "tool_choice": "auto"}, True),
    ({"tools": [TOOL], "tool_choice": "required"}, True),
    ({"tools": [TOOL], "tool_choice": "none"}, True),
    ({"tools": [TOOL], "tool_choice": None}, True),
    ({"tools": [TOOL], "tool_choice": NAMED}, True),
    ({"tools": [TOOL], "tool_choice": "any"}, False),
    ({"tools": [TOOL], "tool_choice": {**NAMED, "strict": True}}, False),
    ({"tools": [TOOL], "tool_choice": {**NAMED, "type": "tool"}}, False),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, False),
    ({"tools": [TOOL], "tool_choice": {"function": {"name": "f"}}}, False),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": 1}}}, False),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f", "a": 1}}}, False),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {}}}, False),
    ({"tools": [{**TOOL, "function": {"name": f"f{i}"}} for i in range(128)]}, True),
    ({"tools": [{**TOOL, "function": {"name": f"f{i}"}} for i in range(129)]}, False),
    ({"tools": [{**TOOL, "function": {"name": "f" * 64}}]}, True),
    ({"tools": [{**TOOL, "function": {"name": "f" * 65}}]}, False),
    ({"tools": [{**TOOL, "type": "other"}]}, False),
    ({"tools": [{**TOOL, "cache_control": {}}]}, True),
    ({"response_format": {"type": "text"}}, True),
    ({"response_format": {"type": "json_object"}}, True),
    ({"response_format": SCHEMA_FORMAT}, True),
    ({"response_format": {"type": "xml"}}, False),
    ({"response_format": {**SCHEMA_FORMAT, "json_schema": {"name": "a" * 64, "schema": {}, "strict": True}}}, True),
    ({"response_format": {**SCHEMA_FORMAT, "json_schema": {"name": "a" * 65, "schema": {}}}}, False),
    ({"response_format": {**SCHEMA_FORMAT, "json_schema": {"name": "", "schema": {}}}}, False),
    ({"response_format": {**SCHEMA_FORMAT, "json_schema": {"name": "a"}}}, False),
    ({"guided_regex": "a" * MAX_REGEX_LEN}, True),
    ({"guided_regex": "a" * (MAX_REGEX_LEN + 1)}, False),
    ({"guided_regex": ""}, False),
    ({"guided_grammar": "a" * MAX_GRAMMAR_LEN}, True),
    ({"guided_grammar": "a" * (MAX_GRAMMAR_LEN + 1)}, False),
    ({"guided_grammar": ""}, False),
    ({"guided_choice": [str(i) for i in range(MAX_CHOICE_STRINGS)]}, True),
    ({"guided_choice": [str(i) for i in range(MAX_CHOICE_STRINGS + 1)]}, False),
    ({"guided_choice": []}, False),
    ({"guided_choice": [""]}, False),
    ({"guided_choice": "a"}, False),
    ({"guided_json": {}}, True),
    ({"guided_json": "{}"}, True),
    ({"guided_json": []}, False),
    ({"structured_outputs": {"regex": "a" * MAX_REGEX_LEN}}, True),
    ({"structured_outputs": {"regex": "a" * (MAX_REGEX_LEN + 1)}}, False),
    ({"structured_outputs": {"regex": ""}}, False),
]


@pytest.mark.parametrize(("fields", "accepted"), BOTH)
def test_the_parser_and_the_json_schema_accept_the_same(fields: dict[str, Any], accepted: bool) -> None:
    assert is_accepted(fields) is accepted
    assert VALIDATOR.is_valid({**CHAT, **fields}) is accepted


@pytest.mark.parametrize(
    "fields",
    [
        turn("user", content="a", tool_calls=[call()]),
        turn("user", content="a", reasoning="b"),
        turn("user", content="a", reasoning_content="b"),
        turn("tool", content="a"),
        turn("user", content="a", tool_call_id="1"),
        turn("assistant"),
        turn("assistant", tool_calls=[]),
        turn("assistant", tool_calls=[call("[]")]),
        turn("assistant", tool_calls=[call("{")]),
        {"tool_choice": "auto"},
        {"tool_choice": "required", "tools": []},
        {"tools": [TOOL, TOOL]},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        {"tools": [TOOL], "guided_regex": "a"},
        {"parallel_tool_calls": True},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "text", "json_schema": SCHEMA_FORMAT["json_schema"]}},
        {"structured_outputs": {}},
        {"structured_outputs": {"regex": "a", "json_object": True}},
        {"structured_outputs": {"json_object": False}},
        {"response_format": {"type": "json_object"}, "guided_regex": "a"},
        {"continue_final_message": True},
        {**turn("assistant", content=""), "continue_final_message": True},
        {**turn("assistant", content="a"), "continue_final_message": True, "add_generation_prompt": True},
        {"max_tokens": 4, "max_completion_tokens": 5},
        {"top_logprobs": 2},
        {"top_logprobs": 2, "logprobs": False},
    ],
)
def test_combinations_that_only_the_parser_can_refuse(fields: dict[str, Any]) -> None:
    assert not is_accepted(fields)


def test_a_turn_as_the_template_gets_it() -> None:
    body = chat(
        messages=[
            {"role": "developer", "content": "a", "name": "n"},
            {"role": "assistant", "tool_calls": [call(' {"a": 1} '), call("")], "reasoning": "hm"},
            {"role": "assistant", "content": "b", "reasoning_content": "first", "reasoning": "second"},
            {"role": "tool", "content": "c", "tool_call_id": "1"},
        ]
    )
    function = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert [each.for_template() for each in body.messages] == [
        {"role": "system", "content": "a", "name": "n"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [function, {**function, "function": {"name": "f", "arguments": {}}}],
            "reasoning_content": "hm",
        },
        {"role": "assistant", "content": "b", "reasoning_content": "first"},
        {"role": "tool", "content": "c", "tool_call_id": "1"},
    ]
    assert [each.uses_tools for each in body.messages] == [False, True, False, True]


def test_a_tool_as_the_template_gets_it() -> None:
    body = chat(tools=[TOOL, {"type": "function", "function": {"name": "g", "description": "d", "strict": True}}])
    assert body.tools is not None
    assert [tool.for_template() for tool in body.tools] == [
        TOOL,
        {
            "type": "function",
            "function": {"parameters": {"type": "object", "properties": {}}, "name": "g", "description": "d"},
        },
    ]


@pytest.mark.parametrize(
    ("fields", "mode", "may", "must"),
    [
        ({}, ToolChoice("none"), False, False),
        ({"tools": []}, ToolChoice("none"), False, False),
        ({"tools": [TOOL]}, ToolChoice("auto"), True, False),
        ({"tools": [TOOL], "tool_choice": "auto"}, ToolChoice("auto"), True, False),
        ({"tools": [TOOL], "tool_choice": "none"}, ToolChoice("none"), False, False),
        ({"tools": [TOOL], "tool_choice": "required"}, ToolChoice("required"), True, True),
        ({"tools": [TOOL], "tool_choice": NAMED}, ToolChoice("named", "f"), True, True),
    ],
)
def test_the_effective_tool_choice(fields: dict[str, Any], mode: ToolChoice, may: bool, must: bool) -> None:
    body = chat(**fields)
    assert (body.tool_mode, body.may_call_tools, body.must_call_tools) == (mode, may, must)
    assert body.needs_grammar is may


@pytest.mark.parametrize(
    ("fields", "field", "grammar"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format", GrammarSpec(kind="json_object")),
        ({"response_format": SCHEMA_FORMAT}, "response_format", GrammarSpec(kind="json_schema", text="{}")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"é": 1}}}},
            "response_format",
            GrammarSpec(kind="json_schema", text='{"é": 1}'),
        ),
        ({"guided_json": {"é": 1}}, "guided_json", GrammarSpec(kind="json_schema", text='{"é": 1}')),
        ({"guided_json": "{ }"}, "guided_json", GrammarSpec(kind="json_schema", text="{ }")),
        ({"guided_regex": "a"}, "guided_regex", GrammarSpec(kind="regex", text="a")),
        ({"guided_grammar": "a"}, "guided_grammar", GrammarSpec(kind="ebnf", text="a")),
        ({"guided_choice": ["é", "a", "é"]}, "guided_choice", GrammarSpec(kind="choice", text='["é", "a"]')),
        *(
            ({"structured_outputs": {name: value}}, f"structured_outputs.{name}", grammar)
            for name, value, grammar in (
                ("json", {"é": 1}, GrammarSpec(kind="json_schema", text='{"é": 1}')),
                ("regex", "a", GrammarSpec(kind="regex", text="a")),
                ("grammar", "a", GrammarSpec(kind="ebnf", text="a")),
                ("choice", ["é"], GrammarSpec(kind="choice", text='["é"]')),
                ("json_object", True, GrammarSpec(kind="json_object")),
            )
        ),
    ],
)
def test_the_grammar_of_a_body(fields: dict[str, Any], field: str, grammar: GrammarSpec) -> None:
    assert list(chat(**fields).grammars()) == [(field, grammar)]
    assert chat(**fields).needs_grammar


def test_a_body_without_a_grammar() -> None:
    assert list(chat(response_format={"type": "text"}).grammars()) == []
    assert not chat().needs_grammar


@pytest.mark.parametrize(
    ("fields", "begins"),
    [
        ({}, True),
        ({"add_generation_prompt": True}, True),
        ({"add_generation_prompt": False}, False),
        ({**turn("assistant", content="a"), "continue_final_message": True}, False),
    ],
)
def test_where_a_turn_of_the_assistant_begins(fields: dict[str, Any], begins: bool) -> None:
    assert chat(**fields).begins_a_turn is begins


@pytest.mark.parametrize(
    ("fields", "num"),
    [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 3}, 3)],
)
def test_alternatives_to_report(fields: dict[str, Any], num: int | None) -> None:
    assert chat(**fields).num_logprobs == num


@pytest.mark.parametrize(
    ("fields", "num", "field"),
    [
        ({}, None, "max_completion_tokens"),
        ({"max_tokens": 4}, 4, "max_tokens"),
        ({"max_completion_tokens": 5}, 5, "max_completion_tokens"),
        ({"max_tokens": 4, "max_completion_tokens": 4}, 4, "max_tokens"),
    ],
)
def test_the_requested_number_of_tokens(fields: dict[str, Any], num: int | None, field: str) -> None:
    assert (chat(**fields).requested_max_tokens, chat(**fields).max_tokens_field) == (num, field)
