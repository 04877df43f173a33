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
