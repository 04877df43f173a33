"""Numbers and patterns at the edge of what the grammar compiler enforces: exact, or refused with the place."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from byte_grammar import byte_grammars, walk
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.messages import GrammarSpec
from engine.sampling.grammar import Matcher, checked
from engine.sampling.json_schema import schema_problems
from engine.sampling.schema_values import pattern_problem

BOUNDS = st.one_of(
    st.integers(-50, 50),
    st.integers(-(10**8), 10**8).map(lambda n: n / 10**6),
    st.integers(-(10**9), 10**9).map(lambda n: n / 10**8),
    st.sampled_from([0, 1e-7, -1e-7, 5e-324, 123456789012.6, 1e15, 2**53, 2**63, 1e21, 1e308, 10**400]),
)
LOWER = st.sampled_from(["minimum", "exclusiveMinimum"])
UPPER = st.sampled_from(["maximum", "exclusiveMaximum"])
WIDTHS = st.one_of(st.none(), st.sampled_from([0, 1e-7, 1e-6, 2e-6, 0.01, 1, 10]))

ODD_PARTS = (
    *("[^]", '["]', "[\\n\\t]", "[\\x00-\\x1f]", "[\\\\]", "[ \\n]", "[!-~]", "[a\\u0009]", "\\.", "\\e"),
    *("[\\cA]", "[\t]", "[\\d-]", "\\d", "[\\u{9}]", "(a|b)", "+", "{2}"),
)


def text_of(schema: Any, rng: random.Random) -> str | None:
    """A text that the grammar of a schema allows; None if the schema is refused or the text does not end."""
    spec = GrammarSpec(kind="json_schema", text=json.dumps(schema))
    if checked(spec).problem is not None:
        return None
    return walk(Matcher(byte_grammars().compile(spec), ()), rng, 120)


@settings(max_examples=200, deadline=None)
@example(lower="exclusiveMinimum", least=2**63, upper="maximum", width=None, kind="number", seed=0)
@given(
    lower=LOWER,
    least=BOUNDS,
    upper=UPPER,
    width=WIDTHS,
    kind=st.sampled_from(["number", "integer"]),
    seed=st.integers(),
)
def test_a_number_is_within_its_bounds_or_they_are_refused(
    lower: str, least: float, upper: str, width: float | None, kind: str, seed: int
) -> None:
    schema: dict[str, Any] = {"type": kind, lower: least}
    if width is not None and abs(least) < 1e300:
        schema[upper] = least + width
    rng = random.Random(seed)
    for _ in range(4):
        text = text_of(schema, rng)
        if text is not None:
            jsonschema.validate(json.loads(text), schema)


@settings(max_examples=150, deadline=None)
@given(
    pattern=st.lists(
        st.sampled_from([*"ab-^]", *ODD_PARTS]),
        min_size=1,
        max_size=4,
    ).map("".join),
    seed=st.integers(),
)
def test_a_text_of_a_pattern_is_json(pattern: str, seed: int) -> None:
    rng = random.Random(seed)
    for schema in (
        {"type": "string", "pattern": pattern},
        {"type": "object", "patternProperties": {pattern: {"type": "null"}}, "maxProperties": 1},
    ):
        text = text_of(schema, rng)
        if text is not None:
            json.loads(text)


@pytest.mark.parametrize(
    ("type_name", "name"),
    [
        *(("string", "minLength"), ("string", "maxLength"), ("array", "minItems"), ("array", "maxItems")),
        *(("object", "minProperties"), ("object", "maxProperties")),
    ],
)
def test_a_count_below_zero_is_refused(type_name: str, name: str) -> None:
    problem = f"$.{name}: -1 given, 0 or more is allowed"
    assert problem in list(schema_problems({"type": type_name, name: -1}))
    assert problem.replace("-1", "0") not in list(schema_problems({"type": type_name, name: 0}))


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": "integer", "multipleOf": 1025}, "$.multipleOf: 1025 given, allowed are whole numbers from 1 to 1024"),
        ({"type": "integer", "multipleOf": 1.5}, "$.multipleOf: 1.5 given, allowed are whole numbers from 1 to 1024"),
        ({"type": "integer", "multipleOf": 0}, "$.multipleOf: 0 given, allowed are whole numbers from 1 to 1024"),
        ({"type": "string", "maxLength": -1}, "$.maxLength: -1 given, 0 or more is allowed"),
        ({"type": "integer", "minimum": 10**400}, "$.minimum: a number beyond 64 bits cannot be enforced exactly"),
        ({"type": "number", "maximum": float("inf")}, "$.maximum: a number beyond 64 bits cannot be enforced exactly"),
        ({"type": "number", "minimum": 1e-7}, "$.minimum: 1e-07 given, at most 6 decimals can be enforced exactly"),
        (
            {"type": "number", "exclusiveMinimum": 3, "exclusiveMaximum": 3.000001},
            "$: no number of at most 6 decimals is within the bounds",
        ),
        (
            {"type": "number", "exclusiveMinimum": 2**33},
            "$.exclusiveMinimum: 8589934592 given, at most 4294967296 is allowed for a number; use minimum or maximum",
        ),
        ({"const": 2**63}, "$.const: a number beyond 64 bits cannot be enforced exactly"),
        ({"enum": [{"a": [-(2**63) - 1]}]}, "$.enum: a number beyond 64 bits cannot be enforced exactly"),
        ({"const": float("inf")}, "$.const: a number beyond 64 bits cannot be enforced exactly"),
        ({"type": "string", "pattern": "[ab]^c"}, "$.pattern: '^' is not supported outside of [...]"),
        ({"type": "string", "pattern": "a$b"}, "$.pattern: '$' is not supported outside of [...]"),
        ({"type": "string", "pattern": "[ \\n]]"}, "$.pattern: ']' is not supported outside of [...]"),
        ({"type": "string", "pattern": "\\e"}, "$.pattern: '\\\\e' is not supported outside of [...]"),
        (
            {"type": "object", "patternProperties": {"[\\n]": {}}},
            "$.patternProperties: '[\\\\n]' has no character that a JSON string can hold as it is",
        ),
    ],
)
def test_a_value_that_cannot_be_enforced_is_named_with_its_place(schema: Any, problem: str) -> None:
    assert list(schema_problems(schema)) == [problem]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 1024},
        {"type": "integer", "multipleOf": 2.0},
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        {"type": "number", "minimum": 0.000001, "maximum": 0.000001},
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.000002},
        {"enum": [2**63 - 1, -(2**63), 1e300, 0.1]},
        {"type": "string", "minLength": 0},
    ],
)
def test_values_at_the_edge_are_enforced(schema: Any) -> None:
    assert list(schema_problems(schema)) == []
    rng = random.Random(1)
    text = next(text for text in (text_of(schema, rng) for _ in range(50)) if text is not None)
    jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    "pattern",
    [
        "[a\\n]",
        "[^\\n]",
        "[\\t-~]",
        "[\\d]",
        "[\\n\\s]",
        "[\\]]",
        "[-]",
        "[\\x1f-\\x21]",
        "^\\[a\\]\\^\\$$|^(?:^a$|b$)",
    ],
)
def test_a_class_with_one_plain_character_is_supported(pattern: str) -> None:
    assert pattern_problem(pattern) is None


@pytest.mark.parametrize(
    "pattern",
    [
        "[^]",
        '["]',
        "[\\n]",
        "[\\x09]",
        "[\\u0009]",
        "[\\u{9}]",
        "[\\cI]",
        "[\\x00-\\x1f]",
        "[\\\\]",
        '[\\n"\\\\]',
        "[\t]",
    ],
)
def test_a_class_of_escaped_characters_only_is_not(pattern: str) -> None:
    assert "has no character that a JSON string can hold" in str(pattern_problem(f"a{pattern}"))
