"""Structured output as clients ask for it: what reaches the engine, and what is refused, by the field's name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from api_harness import URLS, error_of, make_engine, post
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.openai.structured import MAX_DEPTH, MAX_GRAMMAR_LEN, check_grammar
from engine.errors import InvalidRequest
from engine.messages import CheckedGrammar, GrammarSpec
from engine.sampling.grammar import checked

SCHEMA = {
    "type": "object",
    "properties": {"zip": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["zip", "age"],
    "additionalProperties": False,
}


def json_schema(schema: Any, **others: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, **others}}}


@pytest.mark.parametrize("kind", URLS)
@pytest.mark.parametrize(
    ("options", "grammar_kind", "text"),
    [
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
        ({"guided_regex": "[a-z]+ 🙂"}, "regex", "[a-z]+ 🙂"),
        ({"guided_grammar": 'root ::= "a" root | "b"'}, "ebnf", 'root ::= "a" root | "b"'),
        ({"guided_choice": ["yes", "no", "naïve", "no"]}, "choice", ["yes", "no", "naïve"]),
    ],
)
def test_guided_fields_reach_the_engine(kind: str, options: dict[str, Any], grammar_kind: str, text: Any) -> None:
    engine = make_engine()
    url, body = URLS[kind]
    assert post(engine, url, {**body, **options}).status_code == 200
    grammar = engine.submitted[0].sampling.grammar
    assert grammar.kind == grammar_kind
    assert (grammar.text if isinstance(text, str) else json.loads(grammar.text)) == text


@pytest.mark.parametrize("strict", [True, False, None])
def test_response_format_reaches_the_engine_with_its_properties_in_order(strict: bool | None) -> None:
    engine = make_engine()
    url, body = URLS["chat"]
    post(engine, url, {**body, **json_schema(SCHEMA, strict=strict, description="who")})
    post(engine, url, {**body, "response_format": {"type": "json_object"}})
    post(engine, url, {**body, "response_format": {"type": "text"}})
    schema, anything, plain = (submit.sampling.grammar for submit in engine.submitted)
    assert (schema.kind, json.loads(schema.text)) == ("json_schema", SCHEMA)
    assert list(json.loads(schema.text)["properties"]) == ["zip", "age"]
    assert (anything.kind, plain) == ("json_object", None)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (json_schema({"type": "nonsense"}), "response_format"),
        (json_schema({"not": {"type": "string"}}), "response_format"),
        (json_schema({"$ref": "#/$defs/nothing"}), "response_format"),
        (json_schema({"enum": []}), "response_format"),
        (json_schema({"type": "object", "properties": 5}), "response_format"),
        (json_schema({"type": ["string", ["a"]]}), "response_format"),
        (json_schema({"type": "string", "format": ["a"]}), "response_format"),
        (json_schema({"type": "array", "prefixItems": 5}), "response_format"),
        (json_schema({"type": "string", "pattern": "("}), "response_format"),
        (json_schema(nested(MAX_DEPTH + 1)), "response_format"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "3"}, "guided_json"),
        ({"guided_json": "[" * 2000}, "guided_json"),
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_regex": "a(?=b)"}, "guided_regex"),
        ({"guided_grammar": "root ::= nothing"}, "guided_grammar"),
        ({"guided_grammar": 'start ::= "a"'}, "guided_grammar"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_bad_grammars_are_refused_by_the_field_s_name(options: dict[str, Any], field: str) -> None:
    engine = make_engine()
    url, body = URLS["chat"]
    response = post(engine, url, {**body, **options})
    assert response.status_code == 400
    assert error_of(response)["param"] == field
    assert field in error_of(response)["message"]
    assert len(error_of(response)["message"]) < 600
    assert not engine.submitted


def test_size_is_limited_before_anything_is_compiled() -> None:
    with pytest.raises(InvalidRequest, match="at most") as caught:
        check_grammar(GrammarSpec(kind="json_schema", text=" " * (MAX_GRAMMAR_LEN + 1)), "guided_json", checked)
    assert caught.value.field == "guided_json"


def test_a_schema_may_be_nested_as_deep_as_the_limit() -> None:
    """Brackets next to one another are no deeper than one of them."""

    def check(text: str) -> str:
        return check_grammar(
            GrammarSpec(kind="json_schema", text=text),
            "guided_json",
            lambda spec, before="": CheckedGrammar(ebnf="rules"),
        )

    assert check("[" * MAX_DEPTH + "]" * MAX_DEPTH) == "rules"
    assert check("[" + "{}[]" * MAX_DEPTH + "]") == "rules"
    with pytest.raises(InvalidRequest, match="guided_json is nested deeper than 64 levels"):
        check("{[" * (MAX_DEPTH // 2) + "[" + "]" + "]}" * (MAX_DEPTH // 2))


keywords = st.sampled_from(
    (
        *("type", "properties", "items", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "required"),
        *(
            "minLength",
            "minItems",
            "minimum",
            "additionalProperties",
            "format",
            "not",
            "prefixItems",
            "title",
            "pattern",
        ),
    )
)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.sampled_from(["string", "object", "#", "#/$defs/a", "date", "("]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keywords | st.just("a"), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=300, deadline=None)
@given(schema=st.dictionaries(keywords, values, max_size=4))
def test_any_schema_is_either_taken_or_refused_cleanly(schema: dict[str, Any]) -> None:
    refusal = refusal_of(GrammarSpec(kind="json_schema", text=json.dumps(schema)))
    assert refusal is None or refusal.field == "guided_json"


def refusal_of(spec: GrammarSpec) -> InvalidRequest | None:
    try:
        check_grammar(spec, "guided_json", checked)
    except InvalidRequest as error:
        return error
    return None
