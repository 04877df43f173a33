"""Every option is supported, accepted because its value changes nothing, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from deployments.errors import from_validation
from deployments.openai.generation_body import GenerationBody
from deployments.openai.requests import ChatBody, CompletionBody
from engine.errors import InvalidRequest

CHAT = {"model": "m", "messages": [{"role": "user", "content": "go"}]}
COMPLETION = {"model": "m", "prompt": "go"}

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA_FORMAT = {"name": "a", "schema": {}}


def with_arguments(arguments: str) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


CALL = with_arguments("{}")


def parse(body: dict[str, Any]) -> ChatBody | CompletionBody:
    body_type = ChatBody if "messages" in body else CompletionBody
    try:
        return body_type.model_validate_json(json.dumps(body))
    except ValidationError as error:
        raise from_validation(error.errors()) from None


def refusal(body: dict[str, Any]) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(body)
    return caught.value


COMMON_BAD = [
    ("max_tokens", [0, -1, 1.5, "4", True, 10**30]),
    ("temperature", [-0.1, 2.1, "1", float("nan"), float("inf"), True, []]),
    ("top_p", [0, -1, 1.01, float("nan")]),
    ("top_k", [-2, 1.5, "5", True, 10**30]),
    ("min_p", [-0.1, 1.1, "0"]),
    ("stop", ["", [""], ["a", 1], 3, {}, ["a"] * 17, "x" * 1025]),
    ("stop_token_ids", [5, ["5"], [1.5], [True], {}, [1] * 65]),
    ("seed", [2**63, -(2**63) - 1, 0.5, "1", True]),
    ("stream", ["true", 1]),
    ("stream_granularity", ["word", 1]),
    ("user", [1]),
    ("n", [0, 17, True, "2"]),
    ("presence_penalty", [2.1, -2.1, False, "0"]),
    ("frequency_penalty", [2.1, -2.1]),
    ("repetition_penalty", [0, -1, 11, "1"]),
    ("logit_bias", [[], {"x": 1}, {"-5": 1}, {"5": 101}, {"5": "1"}, {"5": True}, {"5": None}, {"1.0": 1}]),
    ("logit_bias", [{"5": 1, "05": 2}, {str(i): 1 for i in range(301)}, {"9" * 4000: 1}]),
    ("min_tokens", [-1, 1.5, "1"]),
    ("ignore_eos", ["yes", 1]),
    ("guided_regex", ["", 1, "x" * 5000]),
    ("guided_grammar", ["", {}]),
    ("guided_choice", [[], "a", [""], ["a", 1], ["a"] * 257]),
    ("guided_json", [1, []]),
    ("model", [None, 1]),
    ("speculative", [True, []]),
    ("frobnicate", [True, 0, {}]),
    ("priority", [1, False, "urgent"]),
    ("skip_special_tokens", [False]),
    ("structured_outputs", [{}, {"regex": "a", "choice": ["b"]}, "a"]),
]
CHAT_BAD = [
    ("messages", [[], None, "go", {}]),
    ("max_completion_tokens", [0, "1"]),
    ("logprobs", [0, 5, "true"]),
    ("top_logprobs", [0, 3, 21, -1, True]),
    ("response_format", ["json_object", []]),
    ("modalities", [["text", "audio"]]),
    ("tools", [{}, "f", [{"type": "function", "function": {"name": "f"}}] * 129]),
    ("tool_choice", ["required", "auto", "any", {"type": "function"}, {"function": {"name": "f"}}, 1]),
    ("parallel_tool_calls", [True, "no"]),
    ("metadata", ["a", {str(i): "b" for i in range(17)}]),
    ("store", ["yes"]),
    ("service_tier", [1]),
    ("reasoning_effort", ["much"]),
    ("enable_thinking", ["yes"]),
    ("verbosity", ["low"]),
    ("prompt", ["go"]),
    ("echo", [True]),
    ("continue_final_message", [True, 1]),
    ("chat_template_kwargs", [[], {str(i): 1 for i in range(17)}]),
]
COMPLETION_BAD = [
    ("prompt", [None, [], 1, [[]], [1, "a"], [[1], "a"], [1.5], [True], {"a": 1}, ["a"] * 17, [[1, "a"]]]),
    ("echo", [1, "yes"]),
    ("best_of", [2, 0]),
    ("suffix", [1]),
    ("logprobs", [6, -1, True, "1"]),
    ("response_format", [{"type": "json_object"}]),
    ("tools", [[]]),
]


@pytest.mark.parametrize(
    ("base", "field", "value"),
    [
        pytest.param(base, field, value, id=f"{'chat' if base is CHAT else 'completion'}-{field}-{str(value)[:20]}")
        for base, table in ((CHAT, COMMON_BAD + CHAT_BAD), (COMPLETION, COMMON_BAD + COMPLETION_BAD))
        for field, values in table
        for value in values
    ],
)
def test_every_bad_value_names_its_field(base: dict[str, Any], field: str, value: object) -> None:
    error = refusal({**base, field: value})
    assert error.field == field
    assert field in str(error)
    assert len(str(error)) < 400


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("messages[0].role", {"messages": [{"role": "function", "content": "a"}]}),
        ("messages[0].tool_call_id", {"messages": [{"role": "tool", "content": "a"}]}),
        ("messages[0].tool_call_id", {"messages": [{"role": "user", "content": "a", "tool_call_id": "1"}]}),
        ("messages[0].name", {"messages": [{"role": "user", "content": "a", "name": 1}]}),
        ("messages[0].reasoning", {"messages": [{"role": "user", "content": "a", "reasoning": "b"}]}),
        ("messages[0].audio", {"messages": [{"role": "user", "content": "a", "audio": {"id": "b"}}]}),
        ("suffix", {"suffix": "a", "echo": True, "prompt": "a", "messages": None}),
        ("messages[0].tool_calls", {"messages": [{"role": "user", "content": "a", "tool_calls": [CALL]}]}),
        ("messages[0].content", {"messages": [{"role": "assistant", "tool_calls": []}]}),
        ("messages[0].content", {"messages": [{"role": "user"}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": None}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": []}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": ["a"]}]}),
        ("messages[0].cache", {"messages": [{"role": "user", "content": "a", "cache": 1}]}),
        (
            "messages[1].tool_calls[0]",
            {"messages": [CHAT["messages"][0], {"role": "assistant", "content": "", "tool_calls": [1]}]},
        ),
        (
            "messages[0].tool_calls[0].function.arguments",
            {"messages": [{"role": "assistant", "tool_calls": [with_arguments("[1]")]}]},
        ),
        (
            "messages[0].tool_calls[0].function.arguments",
            {"messages": [{"role": "assistant", "tool_calls": [with_arguments('{"a": "\\ud800"}')]}]},
        ),
        (
            "messages[0].tool_calls[0].function.arguments",
            {"messages": [{"role": "assistant", "tool_calls": [with_arguments('{"a":' * 5000)]}]},
        ),
        ("response_format.type", {"response_format": {"type": "xml"}}),
        ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
        ("response_format.json_schema", {"response_format": {"type": "text", "json_schema": SCHEMA_FORMAT}}),
        (
            "response_format.json_schema.schema",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        ),
        (
            "response_format.json_schema.name",
            {"response_format": {"type": "json_schema", "json_schema": {**SCHEMA_FORMAT, "name": "a b"}}},
        ),
        ("guided_choice", {"guided_choice": ["a"], "guided_regex": "b"}),
        ("guided_regex", {"guided_regex": "b", "response_format": {"type": "json_object"}}),
        ("guided_regex", {"guided_regex": "b", "tools": [TOOL]}),
        ("tools", {"tools": [TOOL, TOOL]}),
        ("tools[0].type", {"tools": [{**TOOL, "type": "retrieval"}]}),
        ("tools[0].function.name", {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
        ("tools[0].function.parameters", {"tools": [{"type": "function", "function": {"name": "a", "parameters": 1}}]}),
        ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}),
        (
            "continue_final_message",
            {"messages": [{"role": "assistant", "content": "a"}]}
            | {"continue_final_message": True, "add_generation_prompt": True},
        ),
        ("chat_template_kwargs.a", {"chat_template_kwargs": {"a": [1]}}),
        ("stream_granularity", {"stream_granularity": "token"}),
        ("speculative.max_k", {"speculative": {"max_k": 17}}),
        ("speculative.enabled", {"speculative": {"enabled": "no"}}),
        ("speculative.k", {"speculative": {"k": 1}}),
        ("stream_options.include_usage", {"stream": True, "stream_options": {"include_usage": 1}}),
        ("stream_options", {"stream_options": {"include_usage": True}}),
        ("max_tokens", {"max_tokens": 4, "max_completion_tokens": 5}),
    ],
)
def test_nested_fields_are_named_by_their_path(field: str, body: dict[str, Any]) -> None:
    given = {**CHAT, **body}
    assert refusal({name: value for name, value in given.items() if name != "messages" or value}).field == field


def test_a_missing_field_is_named() -> None:
    for name in CHAT:
        assert refusal({key: value for key, value in CHAT.items() if key != name} or {"messages": []}).field in (
            name,
            "prompt",
        )


def test_image_parts_are_refused_clearly() -> None:
    error = refusal({**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]})
    assert "image_url" in str(error)
    assert "only 'text' is supported" in str(error)


NEUTRAL = {
    "n": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "user": "someone",
    "stop": [],
}
CHAT_NEUTRAL = {
    "logprobs": False,
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "tools": [],
    "tool_choice": "none",
    "safety_identifier": None,
    "store": False,
    "service_tier": "auto",
}
COMPLETION_NEUTRAL = {"echo": False, "best_of": 1}


@pytest.mark.parametrize(("base", "neutral"), [(CHAT, CHAT_NEUTRAL), (COMPLETION, COMPLETION_NEUTRAL)])
def test_neutral_values_and_nulls_are_accepted(base: dict[str, Any], neutral: dict[str, Any]) -> None:
    for field, value in {**NEUTRAL, **neutral}.items():
        parse({**base, field: value})
    required = {"model", "messages", "prompt"}
    body_type = type(parse(base))
    parse({**base, **{field: None for field in body_type.model_fields if field not in required}})


def test_every_field_of_a_body_is_read_or_may_only_be_neutral() -> None:
    """A declared field that no code reads would be an option that is ignored silently."""
    read = {
        *("model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p", "stop", "seed"),
        *("stream", "stream_options", "stream_granularity", "speculative", "user", "n", "best_of", "top_k", "min_p"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "min_tokens", "ignore_eos"),
        *("stop_token_ids", "logprobs", "top_logprobs", "echo", "response_format", "tools", "tool_choice"),
        *("parallel_tool_calls", "guided_json", "guided_regex", "guided_grammar", "guided_choice"),
        *("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "structured_outputs"),
        *("reasoning_effort", "enable_thinking", "suffix"),
    }
    labels = {"metadata", "prompt_cache_options", "store"}  # any other label is a text
    for base in (CHAT, COMPLETION):
        for field in type(parse(base)).model_fields.keys() - read - labels:
            assert refusal({**base, field: {"surely": "not neutral"}}).field == field


def test_values_are_understood() -> None:
    body = parse({**CHAT, "max_completion_tokens": 7, "stop": ["a", "b", "a"], "temperature": 1, "seed": -(2**63)})
    assert isinstance(body, ChatBody)
    assert (body.requested_max_tokens, body.stop, body.temperature, body.seed) == (7, ("a", "b"), 1.0, -(2**63))
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    body = parse({**CHAT, "messages": [{"role": "user", "content": parts}]})
    assert body.messages[0].content == "one\ntwo"
    assert parse({**CHAT, "max_tokens": 5, "max_completion_tokens": 5}).requested_max_tokens == 5


@pytest.mark.parametrize(
    ("given", "expected"), [("go", "go"), (["go"], "go"), ([1, 2], (1, 2)), ([[1, 2]], (1, 2)), ("", "")]
)
def test_a_prompt_is_text_or_token_ids(given: object, expected: object) -> None:
    assert parse({"model": "m", "prompt": given}).prompt == (expected,)


@pytest.mark.parametrize(("given", "expected"), [(["a", "b"], ("a", "b")), ([[1], [2, 3]], ((1,), (2, 3)))])
def test_several_prompts_keep_their_order(given: object, expected: object) -> None:
    assert parse({"model": "m", "prompt": given}).prompt == expected


def test_prompts_times_n_are_bounded() -> None:
    parse({**COMPLETION, "prompt": ["a"] * 8, "n": 16})
    assert refusal({**COMPLETION, "prompt": ["a"] * 9, "n": 16}).field == "n"


def test_the_answer_of_this_server_can_be_sent_back_as_a_message() -> None:
    message = {
        "role": "assistant",
        "content": "hi",
        "refusal": None,
        "annotations": [],
        "tool_calls": None,
        "audio": None,
    }
    parse({**CHAT, "messages": [*CHAT["messages"], message]})


REPLAYED = {
    "unknown null": {"function_call": None, "speaker": None},
    "annotations": {"annotations": [{"type": "url_citation"}]},
    "cache_control": {"cache_control": {"type": "ephemeral"}},
    "provider fields": {"provider_specific_fields": {"refusal": None}},
    "thoughts": {"reasoning_content": "hm", "reasoning": None},
    "name": {"name": "assistant_1"},
    "part label": {"content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}, "id": None}]},
    "call index": {"tool_calls": [{**CALL, "index": 0, "cache_control": None}]},
    "call without arguments": {"tool_calls": [with_arguments("")]},
}


@pytest.mark.parametrize("fields", REPLAYED.values(), ids=REPLAYED)
def test_history_is_accepted_as_other_servers_and_clients_write_it(fields: dict[str, Any]) -> None:
    body = parse({**CHAT, "messages": [*CHAT["messages"], {"role": "assistant", "content": "hi", **fields}]})
    assert isinstance(body, ChatBody)
    turn = body.messages[-1].for_template()
    assert turn["content"] == "hi"
    assert turn.get("reasoning_content") == fields.get("reasoning_content")
    assert turn.get("name") == fields.get("name")
    for call in turn.get("tool_calls", []):
        assert call["function"] == {"name": "f", "arguments": {}}


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
def test_a_name_is_accepted_with_every_role_and_reaches_the_template(role: str) -> None:
    body = parse({**CHAT, "messages": [{"role": role, "content": "a", "name": "bob"}]})
    assert body.messages[0].for_template()["name"] == "bob"


def test_an_unknown_field_is_refused_at_every_level_unless_it_is_null() -> None:
    places = {
        "": {"extra": 0},
        "stream_options": {"stream": True, "stream_options": {"extra": 0}},
        "speculative": {"speculative": {"extra": 0}},
        "messages[0]": {"messages": [{**CHAT["messages"][0], "extra": 0}]},
        "tools[0].function": {"tools": [{**TOOL, "function": {"name": "f", "extra": 0}}]},
    }
    for place, body in places.items():
        assert refusal({**CHAT, **body}).field == f"{place}.extra".removeprefix(".")
        parse(json.loads(json.dumps({**CHAT, **body}).replace('"extra": 0', '"extra": null')))


def test_labels_without_effect_are_accepted() -> None:
    labels = {
        "metadata": {"run": "7"},
        "prompt_cache_key": "a",
        "safety_identifier": "b",
        "store": True,
        "service_tier": "flex",
    }
    plain, labelled = parse(CHAT), parse({**CHAT, **labels})
    assert labelled.model_dump(exclude=set(labels)) == plain.model_dump(exclude=set(labels))


def test_the_spellings_of_vllm_are_understood() -> None:
    body = parse({**CHAT, "structured_outputs": {"choice": ["a", "b"]}, "skip_special_tokens": True, "priority": 0})
    assert [(field, spec.kind) for field, spec in body.grammars()] == [("structured_outputs.choice", "choice")]
    assert body.priority == "normal"
    for name, kind in {
        "json": "json_schema",
        "regex": "regex",
        "grammar": "ebnf",
        "json_object": "json_object",
    }.items():
        value = {"json": {"type": "object"}, "json_object": True}.get(name, "a")
        ((_, spec),) = parse({**CHAT, "structured_outputs": {name: value}}).grammars()
        assert spec.kind == kind


@pytest.mark.parametrize("raw", ["", "{", "nul", '{"a": 1,}', "[" * 10_000, '"\\ud800"'])
def test_malformed_json_says_so(raw: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ChatBody.model_validate_json(raw)
    error = from_validation(caught.value.errors())
    assert error.field is None
    assert "not valid JSON" in str(error)


def test_a_body_that_is_not_an_object_says_so() -> None:
    with pytest.raises(ValidationError) as caught:
        GenerationBody.model_validate_json("[]")
    assert "must be a JSON object" in str(from_validation(caught.value.errors()))


def test_integers_too_long_to_print_are_refused_without_failing() -> None:
    raw = json.dumps(CHAT)[:-1] + ', "seed": ' + "9" * 4000 + "}"
    with pytest.raises(ValidationError) as caught:
        ChatBody.model_validate_json(raw)
    assert from_validation(caught.value.errors()).field == "seed"
