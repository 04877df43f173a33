"""Tools on a model whose template has none: the system message describes them, and calls are found and forced."""

from __future__ import annotations

import json
from typing import Any

import httpx
from api_harness import CHAT, EOS, error_of, make_engine, talk
from tiny_tokenizer import byte_level

from deployments.openai.generic_tools import plain_turns
from deployments.text.tokenizer import TextCodec

TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
GENERIC = TextCodec(byte_level(), eos_token_ids=[EOS], generic_tools=True)


def ask(script: str, body: dict[str, Any], codec: TextCodec = GENERIC) -> tuple[httpx.Response, Any]:
    engine = make_engine(script=codec.encode(script))
    return talk(
        engine, lambda client: client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 500, **body}), codec
    ), engine


def test_tools_are_described_and_calls_are_found() -> None:
    response, engine = ask(CALL, {"tools": TOOLS})
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    prompt = GENERIC.decode(engine.submitted[0].prompt)
    assert prompt.startswith("system\n")
    assert json.dumps(TOOLS[0]["function"]) in prompt
    grammar = engine.submitted[0].sampling.grammar
    assert grammar is not None, "a response that begins as a call is one"
    assert "tool_call" in grammar.text


def test_calls_can_be_required_and_hidden() -> None:
    _, engine = ask(CALL, {"tools": TOOLS, "tool_choice": "required"})
    assert engine.submitted[0].sampling.grammar.text.startswith('root ::= "<tool_call>')
    _, engine = ask("hi", {"tools": TOOLS, "tool_choice": "none"})
    assert engine.submitted[0].sampling.grammar is None
    assert "weather" not in GENERIC.decode(engine.submitted[0].prompt)
    _, engine = ask("hi", {})
    assert "system" not in GENERIC.decode(engine.submitted[0].prompt)


def test_calls_and_results_become_plain_turns() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
    turns = [
        {"role": "system", "content": "be brief"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "1"},
    ]
    system, assistant, result = plain_turns(turns, TOOLS)
    assert system["content"].startswith("be brief\n\n")
    assert "weather" in system["content"]
    assert assistant == {"role": "assistant", "content": CALL}
    assert result == {"role": "user", "content": "<tool_response>\nsunny\n</tool_response>"}
    assert plain_turns(turns, None)[0] == turns[0]


def test_a_conversation_with_calls_goes_on() -> None:
    turns = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    response, engine = ask("It is sunny.", {"messages": turns, "tools": TOOLS})
    assert response.json()["choices"][0]["message"]["content"] == "It is sunny."
    assert "<tool_response>\nsunny" in GENERIC.decode(engine.submitted[0].prompt)


def test_without_the_setting_tools_are_refused() -> None:
    response, _ = ask("hi", {"tools": TOOLS}, TextCodec(byte_level(), eos_token_ids=[EOS]))
    assert response.status_code == 400
    assert "generic_tools" in error_of(response)["message"]
