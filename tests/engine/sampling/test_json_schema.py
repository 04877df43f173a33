"""JSON schemas: every finished text is valid, and a schema that cannot be enforced is refused.

Random schemas are walked token by token with random choices on a vocabulary of bytes and words; `jsonschema` validates.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest
from byte_grammar import byte_grammars, walk
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InvalidRequest
from engine.messages import GrammarSpec
from engine.sampling.grammar import Matcher, validate_grammar
from engine.sampling.json_schema import schema_problems

names = st.sampled_from(["a", "b", "name", "é", "long name", 'q"'])


def schemas() -> st.SearchStrategy[Any]:
    """Schemas of the supported subset, with all its keywords."""
    number = st.integers(-20, 20)
    ordered = st.tuples(number, number).map(sorted)
    small = st.tuples(st.integers(0, 4), st.integers(0, 4)).map(sorted)
    leaves = st.one_of(
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.just({"type": ["integer", "null"]}),
        ordered.map(lambda b: {"type": "integer", "minimum": b[0], "maximum": b[1]}),
        number.map(lambda b: {"type": "integer", "exclusiveMinimum": b}),
        st.integers(1, 9).map(lambda b: {"type": "integer", "multipleOf": b}),
        ordered.map(lambda b: {"type": "number", "minimum": b[0], "maximum": b[1] + 1}),
        number.map(lambda b: {"type": "number", "exclusiveMaximum": b}),
        small.map(lambda b: {"type": "string", "minLength": b[0], "maxLength": b[1]}),
        st.sampled_from(["^a+b?$", "^[0-9]{2,4}$", "^(foo|bar)$", '^[^"\\\\]{1,3}$', "^.x$"]).map(
            lambda p: {"type": "string", "pattern": p}
        ),
        st.sampled_from(["date", "time", "date-time", "uuid", "ipv4", "email"]).map(
            lambda f: {"type": "string", "format": f}
        ),
        st.lists(st.one_of(number, names, st.booleans(), st.none()), min_size=1, max_size=3).map(lambda v: {"enum": v}),
        st.one_of(number, names, st.just([1, "x"]), st.just({"k": 1.5})).map(lambda v: {"const": v}),
    )

    def grow(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        properties = st.dictionaries(names, inner, min_size=1, max_size=3)
        return st.one_of(
            st.tuples(properties, st.data()).map(lambda p: _object(p[0])),
            properties.map(lambda p: {"type": "object", "properties": p, "additionalProperties": False}),
            inner.map(lambda s: {"type": "object", "additionalProperties": s, "maxProperties": 2}),
            inner.map(lambda s: {"type": "object", "patternProperties": {"^x[a-z]$": s}}),
            st.tuples(inner, small).map(
                lambda p: {"type": "array", "items": p[0], "minItems": p[1][0], "maxItems": p[1][1]}
            ),
            st.lists(inner, min_size=1, max_size=2).map(
                lambda p: {"type": "array", "prefixItems": p, "items": False, "minItems": len(p)}
            ),
            st.lists(inner, min_size=1, max_size=3).map(lambda p: {"anyOf": p}),
            inner.map(lambda s: {"allOf": [s]}),
            inner.map(lambda s: {"$defs": {"s": s}, "type": "array", "items": {"$ref": "#/$defs/s"}, "maxItems": 2}),
        )

    return st.recursive(leaves, grow, max_leaves=6)


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": sorted(properties)[: 1 + len(properties) // 2]}


def _rooted(schema: Any) -> Any:
    """Definitions belong at the root, where references look for them."""
    return json.loads(re.sub(r'"\$ref": "#/\$defs/s"', '"type": "boolean"', json.dumps(schema)))


@settings(max_examples=250)
@given(schema=schemas(), seed=st.integers(0, 2**32))
def test_every_text_that_ends_is_valid_under_its_schema(schema: Any, seed: int) -> None:
    schema = _rooted(schema)
    rng = random.Random(seed)
    compiled = byte_grammars().compile(GrammarSpec(kind="json_schema", text=json.dumps(schema)))
    for _ in range(3):
        text = walk(Matcher(compiled, ()), rng, 300)
        if text is not None:
            jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, r"\$.uniqueItems: is not supported"),
        ({"type": "object", "properties": {"a": {"not": {}}}}, r"\$.properties.a.not: is not supported"),
        ({"if": {}, "then": {}}, r"\$.if: is not supported"),
        ({"minimum": 3}, r"\$.minimum: needs a matching type"),
        ({"type": "string", "minimum": 3}, r"\$.minimum: needs a matching type"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "pattern together with maxLength"),
        ({"type": "string", "pattern": 'a"b'}, "pattern: '\"' is not supported"),
        ({"type": "string", "pattern": "^[a-z]+\\n$"}, "is not supported outside of"),
        ({"type": "string", "pattern": "a(?=b)"}, "is not supported outside of"),
        ({"type": "string", "format": "colour"}, "'colour' given, allowed are date"),
        ({"type": "objec"}, "'objec' given, allowed are integer"),
        ({"allOf": [{"type": "integer"}, {"minimum": 3, "type": "integer"}]}, "2 schemas given, allowed is 1"),
        ({"anyOf": [{"type": "integer"}], "minimum": 3}, "minimum together with anyOf cannot be enforced"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "may overlap"),
        ({"type": "string", "enum": ["a", 1]}, "type together with enum"),
        ({"type": "object", "properties": {}, "required": ["a"]}, "'a' is not among the properties"),
        ({"type": "object", "minProperties": 2}, "minProperties: needs properties"),
        ({"$ref": "#/$defs/none"}, "none"),
        ({"type": "integer", "minimum": "three"}, "must be a number"),
        ({"type": {"a": 1}}, "not well-formed"),
        ([], r"\$: \[\] given"),
    ],
)
def test_a_schema_that_cannot_be_promised_is_refused_with_the_place(schema: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        validate_grammar(GrammarSpec(kind="json_schema", text=json.dumps(schema)), field="response_format")
    assert caught.value.field == "response_format"
    assert str(caught.value).startswith("response_format: ")


ANNOTATIONS = (
    *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
    *("$schema", "$id", "$comment", "$anchor", "discriminator", "strict"),
)
ARRAY, OBJECT = {"type": "array"}, {"type": "object"}
PROPERTIES = {"type": "object", "properties": {"a": {"type": "null"}}}


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": ["string", "null"]},
        dict.fromkeys(ANNOTATIONS, "a"),
        {"type": "integer", "minimum": 1, "exclusiveMaximum": 9},
        {"type": "integer", "exclusiveMinimum": 1, "maximum": 9},
        {"type": "integer", "multipleOf": 3},
        {"type": "number", "minimum": 1, "exclusiveMaximum": 9},
        {"type": "number", "exclusiveMinimum": 1, "maximum": 9},
        {"type": "string", "minLength": 1, "maxLength": 9},
        {"type": "string", "pattern": '[^"\\\\\n]'},
        *(
            {"type": "string", "format": name}
            for name in ("date", "time", "date-time", "duration", "email", "hostname")
        ),
        *(
            {"type": "string", "format": name}
            for name in ("ipv4", "ipv6", "uuid", "uri", "uri-reference", "json-pointer")
        ),
        {**ARRAY, "items": {}, "minItems": 1, "maxItems": 9},
        {**ARRAY, "prefixItems": [{}], "unevaluatedItems": False},
        {"items": {"type": "null"}},
        {"properties": {"a": {}}, "required": ["a"], "additionalProperties": False, "minProperties": 1},
        {**OBJECT, "patternProperties": {"a": {}}, "maxProperties": 3},
        {**OBJECT, "propertyNames": {"type": "string"}, "additionalProperties": {}, "maxProperties": 3},
        {**OBJECT, "unevaluatedProperties": False},
        {"$defs": {"a": {"type": "null"}}, "$ref": "#/$defs/a"},
        {"definitions": {"a": {"type": "null"}}, "$ref": "#/definitions/a"},
        {"anyOf": [{"type": "null"}, {"type": "null"}]},
        {"oneOf": [{"type": "null"}, {"type": "string"}]},
        {"allOf": [{"type": "null"}]},
        {"enum": [1, "a", None], "type": ["integer", "string", "null"]},
        {"enum": [True, [], {}], "type": ["boolean", "array", "object"]},
        {"const": 1.5, "type": "number"},
        {"const": 1, "type": "number"},
        {"const": None, "type": "null"},
    ],
)
def test_schemas_in_which_every_keyword_is_enforced(schema: Any) -> None:
    assert list(schema_problems(schema)) == []


@pytest.mark.parametrize(
    ("schema", "problems"),
    [
        (None, ["$: null given, a schema is an object or a boolean"]),
        ({"type": "boolean", "minimum": 1}, ["$.minimum: needs a matching type in the same schema"]),
        ({"type": "null", "a": 1}, ["$.a: is not supported"]),
        ({"type": "number", "multipleOf": 2}, ["$.multipleOf: needs a matching type in the same schema"]),
        (
            {"type": "integer", "multipleOf": 2, "minimum": 1},
            ["$: multipleOf together with minimum cannot be enforced"],
        ),
        (
            {"type": "integer", "multipleOf": 2, "maximum": 1},
            ["$: multipleOf together with maximum cannot be enforced"],
        ),
        (
            {"type": "integer", "multipleOf": 2, "exclusiveMinimum": 1, "exclusiveMaximum": 2},
            ["$: multipleOf together with exclusiveMinimum, exclusiveMaximum cannot be enforced"],
        ),
        (
            {"type": "string", "pattern": "a", "minLength": 1, "maxLength": 2, "format": "date"},
            [
                "$: pattern together with minLength, maxLength, format cannot be enforced",
                "$: format together with minLength, maxLength cannot be enforced",
            ],
        ),
        (
            {**OBJECT, "patternProperties": {}, "properties": {}, "additionalProperties": {}, "propertyNames": {}},
            [
                "$: patternProperties together with properties, additionalProperties, propertyNames cannot be enforced",
                "$: propertyNames together with properties cannot be enforced",
            ],
        ),
        (
            {**PROPERTIES, "patternProperties": {}, "minProperties": 1},
            ["$: patternProperties together with properties, minProperties cannot be enforced"],
        ),
        (
            {**PROPERTIES, "propertyNames": {}, "minProperties": 1},
            ["$: propertyNames together with properties, minProperties cannot be enforced"],
        ),
        (
            {**PROPERTIES, "minProperties": 1, "additionalProperties": {}},
            ["$.minProperties: needs properties and no additionalProperties, as keys could repeat otherwise"],
        ),
        ({"type": "string", "pattern": "\\\\"}, ["$.pattern: '\\\\\\\\' is not supported outside of [...]"]),
        ({"type": "string", "pattern": "a(?!b)"}, ["$.pattern: '(?!' is not supported outside of [...]"]),
        ({**ARRAY, "prefixItems": [{}, {"a": 1}]}, ["$.prefixItems[1].a: is not supported"]),
        ({**ARRAY, "items": {"a": 1}}, ["$.items.a: is not supported"]),
        ({**OBJECT, "additionalProperties": {"a": 1}}, ["$.additionalProperties.a: is not supported"]),
        ({**OBJECT, "propertyNames": {"a": 1}}, ["$.propertyNames.a: is not supported"]),
        ({**OBJECT, "patternProperties": {"x": {"a": 1}}}, ["$.patternProperties.x.a: is not supported"]),
        ({**OBJECT, "properties": []}, ["$.properties: an object of schemas is expected"]),
        ({"$defs": {"x": {"a": 1}}}, ["$.$defs.x.a: is not supported"]),
        ({"definitions": {"x": {"a": 1}}}, ["$.definitions.x.a: is not supported"]),
        ({"anyOf": [{}, {"a": 1}]}, ["$.anyOf[1].a: is not supported"]),
        ({"anyOf": []}, ["$.anyOf: a list of at least one schema is expected"]),
        ({"oneOf": {}}, ["$.oneOf: a list of at least one schema is expected"]),
        *(
            (
                {"oneOf": parts},
                ["$.oneOf: its schemas may overlap, which cannot be enforced; use anyOf, or different types"],
            )
            for parts in ([{"type": "null"}] * 2, [{}, {"type": "null"}], [True, {"type": "null"}])
        ),
        ({"allOf": [{}, {}]}, ["$.allOf: 2 schemas given, allowed is 1; merge them"]),
        *(
            (
                {"const": value, "type": name},
                ["$: type together with const cannot be enforced; use only one of them"],
            )
            for value, name in (
                (True, "integer"),
                (1.5, "integer"),
                (True, "number"),
                ("1", "number"),
                (1, "string"),
                (1, "boolean"),
                ({}, "array"),
                ([], "object"),
                (0, "null"),
                (1, "any"),
            )
        ),
        (
            {"enum": [1], "type": "integer", "minimum": 0},
            ["$: minimum, type together with enum cannot be enforced; use only one of them"],
        ),
        ({"enum": 1, "type": "integer"}, ["$: type together with enum cannot be enforced; use only one of them"]),
        ({"$ref": "#", "type": "null"}, ["$: type together with $ref cannot be enforced; use only one of them"]),
    ],
)
def test_what_is_not_enforced_is_named_with_its_place(schema: Any, problems: list[str]) -> None:
    assert list(schema_problems(schema)) == problems
