"""Values of request fields: the largest and smallest that are accepted, the next ones, and what each becomes.

The JSON Schema of a body, from which clients are generated, must agree with the parser.
"""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from pydantic import ValidationError

from deployments.openai.fields import value_error
from deployments.openai.requests import ChatBody, CompletionBody
from engine.config import MAX_K

CHAT = {"model": "m", "messages": [{"role": "user", "content": "go"}]}
COMPLETION = {"model": "m", "prompt": "go"}
INT32, INT64 = 2**31, 2**63


def texts(num: int) -> list[str]:
    return [str(index) for index in range(num)]


def table(num: int, value: object = 1) -> dict[str, object]:
    return dict.fromkeys(texts(num), value)


BOUNDS: list[tuple[dict[str, Any], str, list[Any], list[Any]]] = [
    (CHAT, "temperature", [0, 2], [-0.01, 2.01]),
    (CHAT, "top_p", [1e-300, 1], [0, 1.01]),
    (CHAT, "top_k", [-1, INT32 - 1], [-2, INT32]),
    (CHAT, "min_p", [0, 1], [-0.01, 1.01]),
    (CHAT, "presence_penalty", [-2, 2], [-2.01, 2.01]),
    (CHAT, "frequency_penalty", [-2, 2], [-2.01, 2.01]),
    (CHAT, "repetition_penalty", [0.1, 10], [0.09, 10.1]),
    (CHAT, "seed", [-INT64, INT64 - 1], [-INT64 - 1, INT64]),
    (CHAT, "max_tokens", [1, INT32 - 1], [0, INT32]),
    (CHAT, "max_completion_tokens", [1, INT32 - 1], [0, INT32]),
    (CHAT, "min_tokens", [0, INT32 - 1], [-1, INT32]),
    (CHAT, "n", [1, 16], [0, 17]),
    (CHAT, "timeout", [0.001, 86_400], [0.0009, 86_401]),
    (CHAT | {"logprobs": True}, "top_logprobs", [0, 20], [-1, 21]),
    (CHAT, "stop", ["a", [], ["x" * 1024], texts(16)], ["", [""], ["x" * 1025], texts(17), 1, [1]]),
    (CHAT, "stop_token_ids", [[], [5] * 64], [[5] * 65, 5, ["5"], [0.5]]),
    (
        CHAT,
        "logit_bias",
        [{}, table(300, -100), {"9": 100}, {"0" * 10: 0.5}],
        [table(301), {"9": 100.5}, {"9": -100.5}, {"0" * 11: 1}, {"": 1}, {"a": 1}, {"9": "1"}, []],
    ),
    (CHAT, "service_tier", ["x" * 1024], ["x" * 1025]),
    (CHAT, "metadata", [table(16, "a")], [table(17, "a")]),
    (CHAT, "chat_template_kwargs", [table(16), {"a": None, "b": "c", "d": 0.5}], [table(17), {"a": []}, {"a": {}}]),
    (CHAT, "speculative", [{"max_k": 0}, {"max_k": MAX_K}], [{"max_k": -1}, {"max_k": MAX_K + 1}]),
    (CHAT, "skip_special_tokens", [True, None], [False, 1, "true"]),
    (CHAT, "include_stop_str_in_output", [False, None], [True, 0]),
    (CHAT, "functions", [None], [[], {}, False]),
    (CHAT, "priority", ["high", "normal", "low", 0], [1, "urgent", "0"]),
    (CHAT, "stream_granularity", ["step"], ["word"]),
    (
        CHAT,
        "messages",
        [
            [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a", "cache_control": 1, "annotations": 2, "b": None}],
                }
            ]
        ],
        [
            [],
            [{"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}],
            [{"role": "user", "content": [{"type": "text", "text": 1}]}],
            [{"role": "user", "content": [{"type": "text"}]}],
            [{"role": "user", "content": [{"type": "image_url", "text": "a"}]}],
            [{"role": "user", "content": [{"text": "a"}]}],
            [{"role": "user", "content": []}],
            [{"role": "user", "content": ["a"]}],
            [{"role": "user", "content": 1}],
        ],
    ),
    (COMPLETION | {"echo": True}, "max_tokens", [0, INT32 - 1], [-1, INT32]),
    (COMPLETION, "logprobs", [0, 5], [-1, 6]),
    (COMPLETION, "best_of", [1], [0]),
    (
        COMPLETION,
        "prompt",
        ["", "a", [5], ["a"], ["a"] * 16, [[5]], [[5], [6, 7]]],
        [[], ["a"] * 17, [[5]] * 17, [[]], [[5], []], [0.5], [[0.5]], {}, 1, None],
    ),
]


def is_accepted(body: dict[str, Any]) -> bool:
    body_type = ChatBody if "messages" in body else CompletionBody
    try:
        body_type.model_validate_json(json.dumps(body))
    except ValidationError:
        return False
    return True


VALIDATORS = {
    body_type: jsonschema.Draft202012Validator(body_type.model_json_schema())
    for body_type in (ChatBody, CompletionBody)
}
CASES = [
    pytest.param({**base, field: value}, accepted, id=f"{field}-{json.dumps(value)[:30]}-{accepted}")
    for base, field, good, bad in BOUNDS
    for values, accepted in ((good, True), (bad, False))
    for value in values
]


@pytest.mark.parametrize(("body", "accepted"), CASES)
def test_the_parser_and_the_json_schema_accept_the_same_values(body: dict[str, Any], accepted: bool) -> None:
    assert is_accepted(body) is accepted
    assert VALIDATORS[ChatBody if "messages" in body else CompletionBody].is_valid(body) is accepted


def test_what_only_the_parser_can_check() -> None:
    assert not is_accepted({**CHAT, "logit_bias": {"5": 1, "05": 2}}), "one token twice"
    assert not is_accepted({**CHAT, "logit_bias": {"5": True}})
    assert not is_accepted({**CHAT, "logit_bias": {"\u0665": 1}}), "a digit that is not ASCII"
    assert not is_accepted({**CHAT, "stop_token_ids": [True]})
    assert not is_accepted({**COMPLETION, "prompt": ["a", [5]]})
    assert not is_accepted({**COMPLETION, "prompt": [5, "a"]})
    assert not is_accepted({**COMPLETION, "prompt": [5, True]})


def test_what_the_values_become() -> None:
    given = {
        "stop": ["b", "a", "b"],
        "stop_token_ids": [7, 5, 7],
        "logit_bias": {"5": 1, "007": -2.5},
        "chat_template_kwargs": {"a": 1},
    }
    body = ChatBody.model_validate_json(json.dumps(CHAT | given))
    assert body.stop == ("b", "a")
    assert body.stop_token_ids == (7, 5)
    assert body.logit_bias == ((5, 1.0), (7, -2.5))
    assert body.chat_template_kwargs == {"a": 1}
    plain = ChatBody.model_validate_json(json.dumps(CHAT | {"stop": None, "stop_token_ids": None, "logit_bias": None}))
    assert (plain.stop, plain.stop_token_ids, plain.logit_bias) == ((), (), ())
    assert ChatBody.model_validate_json(json.dumps(CHAT | {"stop": "a"})).stop == ("a",)
    assert ChatBody.model_validate_json(json.dumps(CHAT | {"priority": 0})).priority == "normal"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (1, False, False, False, False)),
        ({"n": 3, "stream": True, "stream_options": {"include_usage": True}}, (3, True, False, False, False)),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, (1, False, True, False, False)),
        ({"stream": True, "stream_options": {}}, (1, False, False, False, False)),
        ({"stream": True, "stream_granularity": "token"}, (1, False, False, True, False)),
        ({"stream": True, "stream_granularity": "step"}, (1, False, False, False, False)),
        ({"stream": True, "speculative": {"trace": True}}, (1, False, False, False, True)),
        ({"speculative": {}}, (1, False, False, False, False)),
    ],
)
def test_what_a_body_asks_of_its_stream(given: dict[str, Any], expected: tuple[object, ...]) -> None:
    body = ChatBody.model_validate_json(json.dumps(CHAT | given))
    found = (body.num_choices, body.includes_usage, body.has_continuous_usage, body.streams_tokens, body.is_traced)
    assert found == expected


@pytest.mark.parametrize(
    "given",
    [
        {"stream_options": {}},
        {"stream": False, "stream_options": {}},
        {"stream_granularity": "token"},
        {"speculative": {"trace": True}},
        {"stream": True, "speculative": {"trace": True}, "stream_granularity": "token"},
        {"guided_regex": "a", "guided_choice": ["a"]},
    ],
)
def test_what_does_not_go_together(given: dict[str, Any]) -> None:
    assert not is_accepted(CHAT | given)
    assert all(is_accepted(CHAT | {"stream": True, name: value}) for name, value in given.items() if name != "stream")


def test_braces_in_the_text_of_an_error_stay_as_they_are() -> None:
    assert str(value_error("must be like {type}, not {0}")) == "must be like {type}, not {0}"
