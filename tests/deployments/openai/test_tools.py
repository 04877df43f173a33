"""Tool calls over HTTP: shown in OpenAI's shape, forced by a grammar, and sent back with the history."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import xgrammar
from api_harness import CHAT, EOS, HERMES_HINT, TOOL_TEMPLATE, error_of, make_engine, stream_of, talk, tool_codec
from tiny_tokenizer import byte_level
from tokenizers import AddedToken
from tool_texts import FUNCTIONS, LLAMA_ONE, MISTRAL_LIST, ONE, PARIS, TOOLS, TWO
from xgrammar.testing import _is_grammar_accept_string

from deployments.openai.messages import Tool, ToolChoice
from deployments.openai.tool_grammar import forcing_grammar, text_or_calls
from deployments.text.tokenizer import TextCodec
from deployments.text.tool_parsers import make_parser
from engine.errors import InvalidRequest
from engine.sampling.grammar import checked


@pytest.mark.parametrize("use_window", [False, True])
def test_marks_of_a_call_that_are_special_tokens_are_shown_to_the_parser_only(use_window: bool) -> None:
    tokenizer = byte_level()
    tokenizer.chat_template = TOOL_TEMPLATE + HERMES_HINT
    tokenizer.add_tokens([AddedToken("<tool_call>", special=True)], special_tokens=True)
    codec = TextCodec(tokenizer, eos_token_ids=[EOS], use_window=use_window)
    ids = codec.encode(f"go {ONE}")
    assert codec.encode("<tool_call>")[0] in ids
    assert "<tool_call>" not in codec.decode(ids)
    for shows_markers, text in ((True, f"go {ONE}"), (False, f"go {ONE.removeprefix('<tool_call>')}")):
        detokenizer = codec.detokenizer(shows_markers=shows_markers)
        assert "".join([*(detokenizer.push((i,)) for i in ids), detokenizer.finish()]) == text
    engine = make_engine(script=ids)
    response = talk(engine, lambda client: client.post("/v1/chat/completions", json={**CHAT, "tools": TOOLS}), codec)
    assert response.json()["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == PARIS


def tools(*definitions: dict[str, Any]) -> list[Tool]:
    return [Tool.model_validate_json(json.dumps(definition)) for definition in definitions]


def accepts(form: Any, text: str, mode: Any = "required", name: str | None = None, *, is_parallel: bool = True) -> bool:
    spec = forcing_grammar(form, tools(*TOOLS), ToolChoice(mode, name), is_parallel=is_parallel, check=checked)
    if spec.kind == "ebnf":
        return _is_grammar_accept_string(xgrammar.Grammar.from_ebnf(spec.text), text)
    return _is_grammar_accept_string(xgrammar.Grammar.from_json_schema(spec.text, any_whitespace=False), text)


def test_the_forcing_grammar_takes_calls_by_their_schemas_and_nothing_else() -> None:
    assert accepts("hermes", ONE)
    assert accepts("hermes", TWO)
    assert not accepts("hermes", TWO, is_parallel=False)
    assert accepts("hermes", ONE, "named", "weather")
    assert not accepts("hermes", ONE, "named", "time")
    assert not accepts("hermes", ONE.replace("city", "town"))
    assert not accepts("hermes", "text")
    assert not accepts("hermes", ONE + " text")
    assert accepts("llama3", LLAMA_ONE)
    assert not accepts("llama3", LLAMA_ONE.replace('"Paris 🙂"', "3"))
    assert not accepts("llama3", LLAMA_ONE, "named", "time")
    both = MISTRAL_LIST.removeprefix("[TOOL_CALLS] ")
    assert accepts("mistral", both)
    assert not accepts("mistral", both, is_parallel=False)
    assert not accepts("mistral", both.replace("city", "town"))
    assert accepts("qwen_xml", ONE)


def test_the_generic_grammar_takes_text_or_calls_by_their_schemas() -> None:
    spec = text_or_calls(tools(*TOOLS), is_parallel=True, check=checked)
    grammar = xgrammar.Grammar.from_ebnf(spec.text)
    for text in ("", "text with < and <tool_call>", ONE, TWO):
        assert _is_grammar_accept_string(grammar, text), text
    for text in ("<b>", ONE.replace("city", "town"), ONE + " text", ONE[:-1]):
        assert not _is_grammar_accept_string(grammar, text), text


def test_what_the_grammar_takes_is_parsed_as_calls() -> None:
    forced = MISTRAL_LIST.removeprefix("[TOOL_CALLS] ")
    for form, text in (("hermes", TWO), ("llama3", f"{LLAMA_ONE}; {LLAMA_ONE}"), ("mistral", forced)):
        parser = make_parser(form, FUNCTIONS, is_forced=True)
        assert parser.push(text).text == ""
        assert parser.num_calls == 2


def test_a_schema_that_cannot_be_enforced_names_tools() -> None:
    bad = {"type": "function", "function": {"name": "f", "parameters": {"not": {"type": "string"}}}}
    with pytest.raises(InvalidRequest) as caught:
        forcing_grammar("hermes", tools(bad), ToolChoice("required"), is_parallel=True, check=checked)
    assert caught.value.field == "tools"


def ask(form: str | None, script: str, body: dict[str, Any], **options: Any) -> tuple[httpx.Response, Any]:
    codec = tool_codec(form)
    engine = make_engine(script=codec.encode(script), **options)

    async def send(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 500, **body})

    return talk(engine, send, codec), engine


@pytest.mark.parametrize(("form", "script"), [("hermes", f"Let me see.\n{ONE}"), ("llama3", LLAMA_ONE)])
@pytest.mark.parametrize("granularity", ["step", "token"])
def test_an_answer_with_a_call(form: str, script: str, granularity: str) -> None:
    whole, engine = ask(form, script, {"tools": TOOLS})
    (choice,) = whole.json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == ("Let me see." if form == "hermes" else None)
    (call,) = choice["message"]["tool_calls"]
    assert call["id"].startswith("call_")
    assert call["type"] == "function"
    assert call["function"] == {"name": "weather", "arguments": PARIS}
    stream, _ = ask(form, script, {"tools": TOOLS, "stream": True, "stream_granularity": granularity})
    *chunks, done = stream_of(stream)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == (choice["message"]["content"] or "")
    first, *rest = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert (first["index"], first["type"], first["function"]["name"]) == (0, "function", "weather")
    assert len(rest) > 1, "arguments come while they are generated"
    assert all(call.keys() == {"index", "function"} and call["function"].keys() == {"arguments"} for call in rest)
    assert "".join(call["function"]["arguments"] for call in [first, *rest]) == PARIS
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert deltas[0]["role"] == "assistant"
    assert done == "[DONE]"
    assert whole.json()["usage"]["completion_tokens"] == len(engine.script) + 1


def test_parallel_calls_and_their_limit_to_one() -> None:
    both, _ = ask("hermes", TWO, {"tools": TOOLS})
    assert [call["function"]["name"] for call in both.json()["choices"][0]["message"]["tool_calls"]] == list(FUNCTIONS)
    one, engine = ask("hermes", TWO, {"tools": TOOLS, "parallel_tool_calls": False})
    (choice,) = one.json()["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert engine.aborted, "nothing is generated after the only call that is allowed"


def test_a_call_cut_off_by_max_tokens_says_length() -> None:
    response, _ = ask("hermes", ONE, {"tools": TOOLS, "max_tokens": 12})
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "length"
    assert ONE.startswith(choice["message"]["content"])
    assert "tool_calls" not in choice["message"]
    response, engine = ask("hermes", ONE, {"tools": TOOLS, "max_tokens": len(tool_codec("hermes").encode(ONE)) - 16})
    (choice,) = response.json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", None)
    assert PARIS.startswith(call["function"]["arguments"])
    assert engine.submitted


def test_tools_reach_the_template_and_the_choice_of_none_hides_them() -> None:
    codec = tool_codec("hermes")
    shown, engine = ask("hermes", "hi", {"tools": TOOLS})
    assert "of a city" in codec.decode(engine.submitted[0].prompt)
    assert shown.json()["choices"][0]["finish_reason"] == "stop"
    _, engine = ask("hermes", ONE, {"tools": TOOLS, "tool_choice": "none"})
    assert "of a city" not in codec.decode(engine.submitted[0].prompt)


@pytest.mark.parametrize("form", ["hermes", "llama3"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_required_and_named_calls_are_forced(form: str, choice: Any) -> None:
    _, engine = ask(form, "hi", {"tools": TOOLS, "tool_choice": choice})
    grammar = engine.submitted[0].sampling.grammar
    assert grammar is not None
    assert ('"time"' in grammar.text.replace("\\", "")) == (choice == "required")
    _, engine = ask(form, "hi", {"tools": TOOLS})
    assert engine.submitted[0].sampling.grammar is None


def test_calls_and_results_go_back_into_the_conversation() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": PARIS}}
    turns = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny", "name": "weather"},
    ]
    response, engine = ask("hermes", "hi", {"messages": turns, "tools": TOOLS})
    assert response.status_code == 200
    prompt = tool_codec("hermes").decode(engine.submitted[0].prompt)
    assert "system\nbe brief" in prompt
    assert 'weather {"city": "Paris' in prompt, "arguments reach the template as an object"
    assert "tool\nsunny" in prompt


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tools": TOOLS}, "tools"),
        ({"messages": [{"role": "tool", "tool_call_id": "1", "content": "a"}]}, "messages[0].role"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
                    }
                ]
            },
            "messages[0].tool_calls",
        ),
    ],
)
def test_a_model_without_tools_says_so(body: dict[str, Any], field: str) -> None:
    response, engine = ask(None, "hi", body)
    assert response.status_code == 400
    assert error_of(response)["param"] == field
    assert "chat template defines no tools" in error_of(response)["message"]
    assert not engine.submitted
    response, _ = ask(None, "hi", {"tools": TOOLS, "tool_choice": "none"})
    assert response.status_code == 200


def test_a_call_may_be_followed_by_nothing_but_eos() -> None:
    """The end token is counted, and shows nothing."""
    response, engine = ask("hermes", ONE, {"tools": TOOLS, "logprobs": True})
    (choice,) = response.json()["choices"]
    assert len(choice["logprobs"]["content"]) == len(engine.script) + 1 == response.json()["usage"]["completion_tokens"]
    assert choice["logprobs"]["content"][-1]["bytes"] is None
    assert engine.submitted[0].sampling.stop_token_ids == (EOS,)


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ("hermes", "ebnf"),
        ("generic", "ebnf"),
        ("qwen_xml", "ebnf"),
        ("llama3", "json_schema"),
        ("mistral", "json_schema"),
    ],
)
def test_the_kind_of_a_forcing_grammar(form: Any, kind: str) -> None:
    assert forcing_grammar(form, tools(*TOOLS), ToolChoice("required"), is_parallel=True, check=checked).kind == kind


def test_a_tool_whose_schema_is_nested_too_deep_is_refused() -> None:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(70):
        schema = {"type": "array", "items": schema}
    deep = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}},
    }
    for form in ("llama3", "hermes"):
        with pytest.raises(InvalidRequest, match="nested deeper than 64") as caught:
            forcing_grammar(form, tools(deep), ToolChoice("required"), is_parallel=True, check=checked)  # type: ignore[arg-type]
        assert caught.value.field == "tools"
