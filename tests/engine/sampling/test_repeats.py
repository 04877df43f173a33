"""Repetitions inside repetitions: refused before the matcher has to follow every way to read a text."""

from __future__ import annotations

import json

import pytest

from engine.messages import GrammarSpec
from engine.sampling.grammar import checked
from engine.sampling.repeats import repeat_problem

BOMB = "(((a{1,100}){1,100}){1,100}){1,100}"


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec(kind="regex", text=BOMB),
        GrammarSpec(kind="regex", text="x(a{20} ?b{3}){60}y"),
        GrammarSpec(kind="ebnf", text='root ::= (("a"{1,100}) {1,100})'),
        GrammarSpec(kind="json_schema", text=json.dumps({"type": "string", "pattern": BOMB})),
        GrammarSpec(kind="json_schema", text=json.dumps({"type": "object", "patternProperties": {BOMB: {}}})),
    ],
)
def test_a_product_of_repetitions_is_refused(spec: GrammarSpec) -> None:
    assert "repetitions inside repetitions allow" in str(checked(spec).problem)


@pytest.mark.parametrize(
    "pattern",
    [
        "a{100000}",
        "a{1,1000}b{1,1000}",
        r"(\d{1,3}\.){3}\d{1,3}",
        r"(\({90}){2}",
        r"([({9}]{90}){2}",
        "((a*)*){9}",
        "([a-z]{1,63}-){1,10}[a-z]{2,}",
    ],
)
def test_what_does_not_multiply_is_supported(pattern: str) -> None:
    assert repeat_problem(pattern, has_quotes=False) is None
    assert checked(GrammarSpec(kind="regex", text=pattern)).problem is None


def test_a_quoted_text_of_a_rule_is_no_repetition() -> None:
    assert repeat_problem('root ::= "({9}" ("({900}"){100}', has_quotes=True) is None
    assert repeat_problem('root ::= ("\\\\"{900}){100}', has_quotes=True) is not None


@pytest.mark.parametrize(
    ("pattern", "product"),
    [
        ("(a{10}){100}", None),
        ("(a{7}){143}", 1001),
        ("(a{20}b){51}", 1020),
        ("(ba{20}c{3}){51}", 1020),
        ("((a{2})b{20}){51}", 1020),
        ("((a{20})b{2}){51}", 1020),
        ("(a{20})(b){51}", None),
        ("a{20}{51}", 1020),
        ("a{20} {51}", 1020),
        ("a{20}b{51}", None),
        ("(a{20}){1,51}", 1020),
        ("(a{20}){51,}", 1020),
        ("(a{20}){2, 51}", 1020),
        ("(a{51}){0}", None),
        ("(a{1001}){1}", 1001),
        ("(a{999999999}){1}", 999_999_999),
        ("(a{1000000000}){2}", None),  # a larger bound is refused elsewhere
        ("a){20}(b{51})", None),
        ("a{20}){51}", None),  # closes nothing
        (r"(\a{20}){51}", 1020),
        (r"([\]{20}]b){51}", None),
        ("([a{20}){51}", None),
        ('("a{20}"){51}', 1020),
    ],
)
def test_the_product_is_that_of_the_largest_bounds_inside_each_other(pattern: str, product: int | None) -> None:
    found = repeat_problem(pattern, has_quotes=False)
    refused = f"repetitions inside repetitions allow {product} in total; at most 1000 are allowed"
    assert found == (None if product is None else refused)
