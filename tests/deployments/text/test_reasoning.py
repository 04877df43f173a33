"""Reasoning: split from the text for any token boundaries, shown in its own field, followed by grammars and calls."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import httpx
import pytest
import xgrammar
from api_harness import CHAT, EOS, HERMES_HINT, LIMITS, TOOL_TEMPLATE, error_of, make_engine, stream_of, talk
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import byte_level
from xgrammar.testing import _is_grammar_accept_string

from deployments.openai.structured import after_thoughts
from deployments.text.reasoning import ThoughtParser, has_thoughts
from deployments.text.tokenizer import TextCodec
from engine.messages import GrammarSpec
from engine.sampling.grammar import checked

SWITCH = (
    "{% if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}"
)
OPENED = "{% if add_generation_prompt %}<think>\n{% endif %}{# </think> #}"
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def codec_of(hint: str) -> TextCodec:
    tokenizer = byte_level()
    tokenizer.chat_template = TOOL_TEMPLATE + HERMES_HINT + hint
    return TextCodec(tokenizer, eos_token_ids=[EOS])


QWEN, ALWAYS = codec_of(SWITCH), codec_of(OPENED)
CASES = [
    (False, "<think>\nhm, well\n</think>\n\nyes", "hm, well", "yes"),
    (False, "plain < text", "", "plain < text"),
    (False, " \nplain", "", " \nplain"),
    (False, "<thin", "", "<thin"),
    (False, "<think>cut", "cut", ""),
    (False, "<think></think>a <think>b</think>", "", "a <think>b</think>"),
    (True, "hm </thin </think>yes", "hm </thin", "yes"),
    (True, "\n", "", ""),
    (True, "hm </thi", "hm </thi", ""),
]


def split(text: str, edges: list[int], *, is_open: bool) -> tuple[str, str]:
    parser = ThoughtParser(is_open=is_open)
    parts = [*(parser.push(text[a:b]) for a, b in pairwise(edges)), parser.finish()]
    return "".join(part.reasoning for part in parts), "".join(part.text for part in parts)


@pytest.mark.parametrize(("is_open", "text", "reasoning", "rest"), CASES)
def test_thoughts_and_text_are_split(is_open: bool, text: str, reasoning: str, rest: str) -> None:
    for width in (1, 3, 100):
        edges = [*range(0, len(text), width), len(text)]
        assert split(text, edges, is_open=is_open) == (reasoning, rest)


@settings(max_examples=300, deadline=None)
@given(
    data=st.data(),
    parts=st.lists(st.sampled_from(["<think>", "</think>", "<", "/think>", " ", "\n", "a"]), max_size=10),
    is_open=st.booleans(),
)
def test_the_split_does_not_depend_on_the_cuts(data: st.DataObject, parts: list[str], is_open: bool) -> None:
    text = "".join(parts)
    edges = [0, *sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8))), len(text)]
    assert split(text, edges, is_open=is_open) == split(text, [0, len(text)], is_open=is_open)


def ask(codec: TextCodec, script: str, body: dict[str, Any]) -> tuple[httpx.Response, Any]:
    engine = make_engine(script=codec.encode(script))
    return talk(
        engine, lambda client: client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 500, **body}), codec
    ), engine


@pytest.mark.parametrize(("codec", "begin"), [(QWEN, "<think>\n"), (ALWAYS, "")], ids=["written", "opened"])
@pytest.mark.parametrize("granularity", ["step", "token"])
def test_thoughts_have_a_field_of_their_own(codec: TextCodec, begin: str, granularity: str) -> None:
    script = f"{begin}hm 🙂 well\n</think>\n\nyes"
    whole, engine = ask(codec, script, {})
    (choice,) = whole.json()["choices"]
    assert choice["message"]["reasoning_content"] == "hm 🙂 well"
    assert choice["message"]["content"] == "yes"
    usage = whole.json()["usage"]
    num_thoughts = len(codec.encode(script[: script.index("</think>") + len("</think>")]))
    assert usage["completion_tokens_details"]["reasoning_tokens"] == num_thoughts
    assert engine.submitted
    stream, _ = ask(codec, script, {"stream": True, "stream_granularity": granularity})
    *chunks, _ = stream_of(stream)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm 🙂 well"
    assert "".join(delta.get("content", "") for delta in deltas) == "yes"
    assert sum("reasoning_content" in delta for delta in deltas) > 1


def test_a_call_after_thoughts_is_found() -> None:
    response, _ = ask(QWEN, f"<think>\nI call.\n</think>\n\n{CALL}", {"tools": TOOLS})
    (choice,) = response.json()["choices"]
    assert choice["message"]["reasoning_content"] == "I call."
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("options", "is_off"),
    [
        ({}, False),
        ({"enable_thinking": False}, True),
        ({"enable_thinking": True}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, True),
        ({"reasoning_effort": "none"}, True),
        ({"reasoning_effort": "low"}, False),
    ],
)
def test_thoughts_can_be_switched_and_then_the_text_is_all_text(options: dict[str, Any], is_off: bool) -> None:
    response, engine = ask(QWEN, "<think>a</think>b", options)
    assert QWEN.decode(engine.submitted[0].prompt).endswith("</think>\n\n") == is_off
    message = response.json()["choices"][0]["message"]
    assert message["content"] == ("<think>a</think>b" if is_off else "b")
    assert ("reasoning_content" in message) == (not is_off)


@pytest.mark.parametrize(
    ("codec", "options", "field"),
    [
        (codec_of(""), {"reasoning_effort": "low"}, "reasoning_effort"),
        (codec_of(""), {"enable_thinking": True}, "enable_thinking"),
        (ALWAYS, {"reasoning_effort": "none"}, "reasoning_effort"),
        (ALWAYS, {"enable_thinking": False}, "enable_thinking"),
    ],
)
def test_what_a_template_cannot_do_is_refused(codec: TextCodec, options: dict[str, Any], field: str) -> None:
    response, engine = ask(codec, "a", options)
    assert (response.status_code, error_of(response)["param"]) == (400, field)
    assert not engine.submitted
    neutral = {"reasoning_effort": "none", "enable_thinking": False}
    assert ask(codec_of(""), "a", neutral)[0].status_code == 200


JSON = GrammarSpec(kind="json_schema", text='{"type": "object", "properties": {"root": {"type": "integer"}}}')


@pytest.mark.parametrize(
    ("is_open", "text", "fits"),
    [
        (False, '{"root": 3}', True),
        (False, '<think>a < </thin <</think>\n\n{"root": 3}', True),
        (False, '<think>{"root": 3}', False),
        (False, '<think></think>{"root": "a"}', False),
        (False, 'a{"root": 3}', False),
        (True, 'a{}</think>{"root": 3}', True),
        (True, '{"root": 3}', False),
        (True, 'a</think>b</think>{"root": 3}', False),
    ],
)
def test_a_grammar_begins_after_the_thoughts(is_open: bool, text: str, fits: bool) -> None:
    spec = after_thoughts(JSON, is_open=is_open, check=checked)
    assert _is_grammar_accept_string(xgrammar.Grammar.from_ebnf(spec.text), text) == fits


@pytest.mark.parametrize(
    ("options", "allows_thoughts"),
    [({}, True), ({"enable_thinking": False}, False), ({"tools": TOOLS, "tool_choice": "required"}, True)],
)
def test_the_engine_gets_the_grammar_with_thoughts_where_there_may_be_some(
    options: dict[str, Any], allows_thoughts: bool
) -> None:
    given_grammar = {} if "tools" in options else {"guided_choice": ["yes", "no"]}
    _, engine = ask(QWEN, "yes", {**options, **given_grammar})
    grammar = engine.submitted[0].sampling.grammar
    assert ("<think>" in grammar.text) == allows_thoughts


def test_templates_without_thoughts_have_none() -> None:
    assert has_thoughts(SWITCH)
    assert not has_thoughts(TOOL_TEMPLATE)
    assert replace(LIMITS).max_model_len  # the harness's limits hold for these prompts
    assert json.loads(ask(codec_of(""), "<think>a</think>", {})[0].text)["choices"][0]["message"]["content"]
