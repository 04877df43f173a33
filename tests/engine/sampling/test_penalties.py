"""Penalties and bias of one request: their bounds, and the edits that follow from its tokens, by value."""

from __future__ import annotations

import math
from typing import Any

import pytest

from engine.messages import GrammarSpec, SamplingParams
from engine.sampling.penalties import LARGEST, SMALLEST_REPETITION, Penalties, TokenOptions


def edits_of(penalties: Penalties) -> dict[int, tuple[float, float, float]]:
    """Bias, divisor and offset by token."""
    edits = penalties.edits()
    if edits is None:
        return {}
    rows = zip(edits.bias.tolist(), edits.divisor.tolist(), edits.offset.tolist(), strict=True)
    return dict(zip(edits.token_ids.tolist(), rows, strict=True))


def test_generated_tokens_are_penalized_by_presence_and_count() -> None:
    penalties = Penalties(TokenOptions(num_prompt=1, presence_penalty=0.5, frequency_penalty=0.25))
    penalties.push(7, generated=False)
    assert edits_of(penalties) == {}, "prompt tokens are not generated"
    for token in (3, 4, 3):
        penalties.push(token, generated=True)
    assert edits_of(penalties) == {3: (0.0, 1.0, 1.0), 4: (0.0, 1.0, 0.75)}
    penalties.pop(3, generated=True)
    penalties.pop(4, generated=True)
    assert edits_of(penalties) == {3: (0.0, 1.0, 0.75), 4: (0.0, 1.0, 0.0)}


def test_the_repetition_penalty_counts_the_prompt_as_well() -> None:
    penalties = Penalties(TokenOptions(num_prompt=1, repetition_penalty=2.0, presence_penalty=0.5))
    penalties.push(7, generated=False)
    penalties.push(3, generated=True)
    assert edits_of(penalties) == {7: (0.0, 2.0, 0.0), 3: (0.0, 2.0, 0.5)}
    penalties.pop(7, generated=False)
    assert edits_of(penalties)[7] == (0.0, 1.0, 0.0)


def test_biases_of_one_token_add_up_and_need_no_counts() -> None:
    penalties = Penalties(TokenOptions(num_prompt=0, logit_bias=((5, 1.5), (9, -2.0), (5, 0.5))))
    penalties.push(5, generated=True)
    penalties.push(6, generated=True)
    assert edits_of(penalties) == {5: (2.0, 1.0, 0.0), 9: (-2.0, 1.0, 0.0)}


def test_any_number_of_tokens_is_counted() -> None:
    penalties = Penalties(TokenOptions(num_prompt=0, frequency_penalty=1.0, logit_bias=((0, 4.0),)))
    for token in range(100):
        for _ in range(1 + token % 3):
            penalties.push(token, generated=True)
    assert edits_of(penalties) == {
        token: (4.0 if token == 0 else 0.0, 1.0, float(1 + token % 3)) for token in range(100)
    }


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_each_penalty_is_finite_and_bounded(name: str) -> None:
    TokenOptions(num_prompt=0, **{name: LARGEST})  # type: ignore[arg-type]
    for value in (math.nextafter(LARGEST, math.inf), -math.nextafter(LARGEST, math.inf), math.nan, math.inf):
        with pytest.raises(ValueError, match="must be finite and within 1e\\+06 of 0"):
            TokenOptions(num_prompt=0, **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"presence_penalty": -1e6}, {"presence_penalty": -1.1e6}),
        ({"repetition_penalty": 1e-6}, {"repetition_penalty": 0.9e-6}),
        ({"logit_bias": ((0, 1e6), (2**31 - 1, -1e6))}, {"logit_bias": ((0, 1.1e6),)}),
        ({"logit_bias": ((0, 1.0),)}, {"logit_bias": ((-1, 1.0),)}),
        ({"logit_bias": ((5, 1.0),)}, {"logit_bias": ((2**31, 1.0),)}),
        ({"stop_token_ids": (0, 2**31 - 1)}, {"stop_token_ids": (5, -1)}),
        ({"stop_token_ids": ()}, {"stop_token_ids": (2**31,)}),
        ({"num_prompt": 0}, {"num_prompt": -1}),
    ],
)
def test_the_bounds_of_options(good: dict[str, Any], bad: dict[str, Any]) -> None:
    TokenOptions(**{"num_prompt": 1, **good})
    with pytest.raises(ValueError, match=r"^options: "):
        TokenOptions(**{"num_prompt": 1, **bad})


def test_the_bounds_are_those_that_float32_allows() -> None:
    assert (LARGEST, SMALLEST_REPETITION) == (1e6, 1e-6)


def test_options_are_those_of_the_request_and_none_where_all_are_neutral() -> None:
    grammar = GrammarSpec(kind="regex", text="a")
    sampling = SamplingParams(
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=2.0,
        logit_bias=((1, 2.0),),
        min_tokens=3,
        stop_token_ids=(4,),
        grammar=grammar,
    )
    assert TokenOptions.of(sampling, 9) == TokenOptions(
        num_prompt=9,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=2.0,
        logit_bias=((1, 2.0),),
        min_tokens=3,
        stop_token_ids=(4,),
        grammar=grammar,
    )
    assert TokenOptions.of(SamplingParams(stop_token_ids=(4,), temperature=0.0), 9) is None
    assert TokenOptions.of(SamplingParams(min_tokens=3), 9) is None, "without stop tokens there is nothing to forbid"
    (of_grammar, of_stop) = (
        TokenOptions.of(SamplingParams(min_tokens=3, grammar=grammar), 9),
        TokenOptions.of(SamplingParams(min_tokens=1, stop_token_ids=(4,)), 9),
    )
    assert of_grammar is not None
    assert of_grammar.min_tokens == 3
    assert of_stop is not None
    assert of_stop.min_tokens == 1


@pytest.mark.parametrize("num", [1, 16, 17, 300])
def test_any_number_of_biases_is_applied(num: int) -> None:
    bias = tuple((2 * token, token - 150.5) for token in range(num))
    edits = Penalties(TokenOptions(num_prompt=1, logit_bias=bias)).edits()
    assert edits is not None
    assert list(zip(edits.token_ids.tolist(), edits.bias.tolist(), strict=True)) == list(bias)
