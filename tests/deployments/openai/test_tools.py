"""Calls of tools: found in a model's text however it was cut, shown in OpenAI's shape, and forced by a grammar."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx
import pytest
import xgrammar
from api_harness import CHAT, EOS, HERMES_HINT, TOOL_TEMPLATE, error_of, make_engine, stream_of, talk, tool_codec
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_tokenizer import byte_level
from tokenizers import AddedToken
from xgrammar.testing import _is_grammar_accept_string

from deployments.openai.messages import Tool, ToolChoice
from deployments.openai.tool_grammar import forcing_grammar, text_or_calls
from deployments.text.tokenizer import TextCodec
from deployments.text.tool_calls import detect_form
from deployments.text.tool_parsers import make_parser
from engine.errors import InvalidRequest

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"city": {"type": "string"}},
        },
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
TOOLS = [WEATHER, TIME]
FUNCTIONS = {"weather": WEATHER["function"]["parameters"], "time": None}
PARIS = '{"city": "Paris 🙂"}'
ONE = f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>'
TWO = f'{ONE}\n<tool_call>\n{{"name": "time", "arguments": {{}}}}\n</tool_call>'

HERMES_CASES = [
    ("just text", "just text", []),
    ("a < b <tool", "a < b <tool", []),
    (ONE, "", [("weather", PARIS)]),
    (TWO, "", [("weather", PARIS), ("time", "{}")]),
    (f"Let me see.\n\n{ONE}\n", "Let me see.", [("weather", PARIS)]),
    (f"{ONE} Done.", " Done.", [("weather", PARIS)]),
    ('<tool_call>{"name": "time"}</tool_call>', "", [("time", "{}")]),
    ('<tool_call>{"name": "time", "arguments": {}}', "", [("time", "{}")]),
    ('a \n<tool_call>{"name": "other"}</tool_call> b', 'a \n<tool_call>{"name": "other"}</tool_call> b', []),
    ('<tool_call>{"name": "time", "arguments": 3}</tool_call>', None, []),
    ("<tool_call>nonsense", None, []),
    (f'<tool_call>{{"name": "time", "arguments": {"[" * 3000}</tool_call>', None, []),
    (" \n ", " \n ", []),
]
LLAMA_ONE = f'{{"name": "weather", "parameters": {PARIS}}}'
LLAMA_CASES = [
    ("just text", "just text", []),
    ("<|python", "<|python", []),
    (LLAMA_ONE, "", [("weather", PARIS)]),
    (f" \n{LLAMA_ONE}\n", "", [("weather", PARIS)]),
    (f"<|python_tag|>{LLAMA_ONE}", "", [("weather", PARIS)]),
    (
        f'{LLAMA_ONE}; {{"type": "function", "name": "time", "parameters": {{}}}}',
        "",
        [("weather", PARIS), ("time", "{}")],
    ),
    (f"{LLAMA_ONE} and more", " and more", [("weather", PARIS)]),
    ('{"name": "other", "parameters": {}}', None, []),
    ('{"answer": "}"} {"name": "time"}', None, []),
    ('{"name": "time", "par', None, []),
    ('{"name": "weather", "parameters": {"city": "a}\\\\\\"{"}}', "", [("weather", '{"city": "a}\\\\\\"{"}')]),
]
XML = "<tool_call>\n<function=weather>\n<parameter=city>\n{}\n</parameter>\n{}</function>\n</tool_call>"
XML_CASES = [
    ("just <function=text", None, []),
    (XML.format("Paris", ""), "", [("weather", '{"city": "Paris"}')]),
    (XML.format("3", "<parameter=days>\n3\n</parameter>\n"), "", [("weather", '{"city": "3", "days": 3}')]),
    (XML.format("a\n</b>", "<parameter=x>yes</parameter>"), "", [("weather", '{"city": "a\\n</b>", "x": "yes"}')]),
    ("Hm.\n<tool_call><function=time></function></tool_call>", "Hm.", [("time", "{}")]),
    ("<tool_call><function=other></function></tool_call>", None, []),
    ("<tool_call><function=time> nonsense </tool_call> b", " b", [("time", "")]),
    (ONE, "", [("weather", PARIS)]),
]
MISTRAL_LIST = f'[TOOL_CALLS] [{{"name": "weather", "arguments": {PARIS}}}, {{"name": "time", "arguments": {{}}}}]'
MISTRAL_CASES = [
    ("just text [TOOL", "just text [TOOL", []),
    ("[1, 2]", "[1, 2]", []),
    (MISTRAL_LIST, "", [("weather", PARIS), ("time", "{}")]),
    (f"Let me see. {MISTRAL_LIST}", "Let me see.", [("weather", PARIS), ("time", "{}")]),
    (f"[TOOL_CALLS]weather{PARIS}[TOOL_CALLS]time{{}}", "", [("weather", PARIS), ("time", "{}")]),
    (f"[TOOL_CALLS]weather[CALL_ID]abc123[ARGS]{PARIS}", "", [("weather", PARIS)]),
    ('[TOOL_CALLS] [{"name": "other", "arguments": {}}]', None, []),
    ("[TOOL_CALLS]other{}", None, []),
    ("[TOOL_CALLS]no call", None, []),
]
FORCED_CASES = [(MISTRAL_LIST.removeprefix("[TOOL_CALLS] "), "", [("weather", PARIS), ("time", "{}")])]
BROKEN_CASES = [
    ("hermes", '<tool_call>{"name": "time", "arguments": {"a": oops}}</tool_call> b', " b", [("time", '{"a": ')]),
    ("hermes", '<tool_call>{"name": "time", "arguments": {"a": 1</tool_call> b', " b", [("time", '{"a": 1')]),
    ("hermes", '<tool_call>{"name": "time", "arguments": {"a": "</tool_call>', "", [("time", '{"a": "</tool_call>')]),
    ("llama3", '{"name": "time", "parameters": {"a": oops}}', "oops}}", [("time", '{"a": ')]),
]
CASES = [
    *(("hermes", *case) for case in HERMES_CASES),
    *(("llama3", *case) for case in LLAMA_CASES),
    *(("qwen_xml", *case) for case in XML_CASES),
    *(("mistral", *case) for case in MISTRAL_CASES),
    *(("mistral-forced", *case) for case in FORCED_CASES),
    *BROKEN_CASES,
]


@dataclass
class Call:
    number: int
    id: str
    name: str
    arguments: str


def parse(form: Any, pieces: list[str]) -> tuple[str, list[Call]]:
    """Text, and calls with their deltas joined. The first delta of a call, and no other one, has id and name."""
    parser = make_parser(form.removesuffix("-forced"), FUNCTIONS, is_forced=form.endswith("-forced"))
    parsed = [*(parser.push(piece) for piece in pieces), parser.finish()]
    calls: list[Call] = []
    for delta in (delta for item in parsed for delta in item.calls):
        if delta.number == len(calls):
            assert delta.id
            assert delta.name
            calls.append(Call(delta.number, delta.id, delta.name, delta.arguments))
        else:
            assert delta.number == len(calls) - 1, "calls follow one another"
            assert delta.id is None
            assert delta.name is None
            calls[-1].arguments += delta.arguments
    assert parser.num_calls <= len(calls)
    return "".join(item.text for item in parsed), calls


@pytest.mark.parametrize(("form", "text", "shown", "calls"), CASES)
@pytest.mark.parametrize("width", [1, 3, 10**6])
def test_calls_are_found_and_all_else_stays_text(
    form: str, text: str, shown: str | None, calls: list[tuple[str, str]], width: int
) -> None:
    pieces = [text[i : i + width] for i in range(0, len(text), width)]
    found_text, found = parse(form, pieces)
    assert found_text == (text if shown is None else shown)
    assert [(call.name, call.arguments) for call in found] == calls
    assert [call.number for call in found] == list(range(len(calls)))
    assert len({call.id for call in found}) == len(found)


parts = st.lists(
    st.sampled_from(
        [
            *(
                "<tool_call>",
                "</tool_call>",
                "<tool",
                "</",
                ">",
                " ",
                "\n",
                "a",
                ";",
                "<|python_tag|>",
                "{",
                "}",
                '"',
                "\\",
            ),
            *("[TOOL_CALLS]", "[", "]", "[ARGS]", "time", "<function=time>", "<parameter=a>", "</parameter>"),
            *("</function>", '{"name": "time", "arguments": {'),
            *('{"name": "time"}', LLAMA_ONE, f'{{"name": "weather", "arguments": {PARIS}}}', '{"name": "no"}'),
        ]
    ),
    max_size=12,
)


@pytest.mark.parametrize("form", ["hermes", "llama3", "qwen_xml", "mistral", "mistral-forced"])
@settings(max_examples=300, deadline=None)
@example(data=None, parts=["a", " ", ONE, "\n"])
@given(data=st.data(), parts=parts)
def test_the_result_does_not_depend_on_the_cuts(form: str, data: st.DataObject | None, parts: list[str]) -> None:
    text = "".join(parts)
    edges = data.draw(st.lists(st.integers(0, len(text)), max_size=8)) if data else list(range(len(text)))
    cut = [text[a:b] for a, b in pairwise([0, *sorted(edges), len(text)])]
    whole_text, whole = parse(form, [text])
    cut_text, found = parse(form, cut)
    assert cut_text == whole_text
    assert [(c.number, c.name, c.arguments) for c in found] == [(c.number, c.name, c.arguments) for c in whole]
    if not whole:
        assert whole_text == text, "text without calls is shown as it is"


@pytest.mark.parametrize("form", ["hermes", "llama3"])
def test_a_call_without_end_is_held_and_shown_in_the_end(form: str) -> None:
    text = {"hermes": "<tool_call>", "llama3": ""}[form] + '{"a": "' + "x" * 20_000
    parser = make_parser(form, FUNCTIONS)
    assert not any(parser.push(char).text for char in text)
    assert parser.finish().text == text


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ messages }}", None),
        ("{% if tools %}<tools>{{ tools }}</tools> answer in <tool_call>{% endif %}", "hermes"),
        ("{% if tools %}<tool_call><function=name>{% endif %}", "qwen_xml"),
        ('{% if tools %}{"name": n, "parameters": {}} <|python_tag|>{% endif %}', "llama3"),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", "mistral"),
        ("{% if tools %}{{ tools }}{% endif %}", None),
    ],
)
def test_the_form_is_found_in_the_template(template: str, form: str | None) -> None:
    assert detect_form(template) == form


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
    spec = forcing_grammar(form, tools(*TOOLS), ToolChoice(mode, name), is_parallel=is_parallel)
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
    spec = text_or_calls(tools(*TOOLS), is_parallel=True)
    grammar = xgrammar.Grammar.from_ebnf(spec.text)
    for text in ("", "text with < and <tool_call>", ONE, TWO):
        assert _is_grammar_accept_string(grammar, text), text
    for text in ("<b>", ONE.replace("city", "town"), ONE + " text", ONE[:-1]):
        assert not _is_grammar_accept_string(grammar, text), text


def test_what_the_grammar_takes_is_parsed_as_calls() -> None:
    assert [call.name for call in parse("hermes", [TWO])[1]] == ["weather", "time"]
    assert [call.name for call in parse("llama3", [LLAMA_ONE])[1]] == ["weather"]


def test_a_schema_that_cannot_be_enforced_names_tools() -> None:
    bad = {"type": "function", "function": {"name": "f", "parameters": {"not": {"type": "string"}}}}
    with pytest.raises(InvalidRequest) as caught:
        forcing_grammar("hermes", tools(bad), ToolChoice("required"), is_parallel=True)
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
