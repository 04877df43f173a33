"""Calls of every form are found in a model's text, for any token boundaries, and everything else stays text."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tool_texts import FUNCTIONS, LLAMA_ONE, MISTRAL_LIST, ONE, PARIS, TWO

from deployments.text.tool_calls import detect_form
from deployments.text.tool_parsers import make_parser

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
    (
        f'<tool_call>{{"name": "other"}}</tool_call>{ONE}',
        '<tool_call>{"name": "other"}</tool_call>',
        [("weather", PARIS)],
    ),
    (f'<tool_call>{{"arguments": {{}}, "name": "time"}}</tool_call>{ONE}', "", [("time", "{}"), ("weather", PARIS)]),
    ("<tool_call>nonsense", None, []),
    (f'<tool_call>{{"name": "time", "arguments": {"[" * 3000}</tool_call>', None, []),
    (" \n ", " \n ", []),
]
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
    ("llama3", '{"name": "time", "parameters": {"a": 1', "", [("time", '{"a": 1')]),
    ("mistral", '[TOOL_CALLS]time{"a": 1', "", [("time", '{"a": 1')]),
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
