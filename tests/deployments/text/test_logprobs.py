"""Log-probabilities in OpenAI's two formats, by value."""

from __future__ import annotations

import math

import msgspec
import pytest

from deployments.text.logprobs import TokenName, TokenRecord, chat_logprobs, completion_logprobs, spell
from engine.messages import TokenLogprobs

NAMES = {
    1: TokenName("a", b"a"),
    2: TokenName("é", "é".encode()),
    3: TokenName("\ufffd", b"\xc3"),
    4: TokenName("<|end|>", None),
}
RECORDS = (
    TokenRecord(1, 0, None),
    TokenRecord(3, 1, TokenLogprobs(logprob=-0.5, top=((3, -0.5), (2, -1.0), (1, -2.0)))),
    TokenRecord(4, 2, TokenLogprobs(logprob=-math.inf, top=((2, -0.25), (3, -1.5), (1, -math.inf)))),
)


@pytest.mark.parametrize(("token_id", "spelt"), [(1, "a"), (2, "é"), (3, "bytes:\\xc3"), (4, "<|end|>")])
def test_a_token_is_spelt_by_its_text_or_by_bytes_that_are_no_text(token_id: int, spelt: str) -> None:
    assert spell(NAMES[token_id]) == spelt


def test_chat_has_one_entry_per_token_with_its_bytes() -> None:
    """The first token of a prompt has none. JSON has no minus infinity, so -9999 is the lowest value."""
    broken = {"token": "\ufffd", "bytes": [0xC3]}
    accented = {"token": "é", "bytes": [0xC3, 0xA9]}
    assert msgspec.to_builtins(chat_logprobs(RECORDS, NAMES.__getitem__, 2)) == {
        "content": [
            {
                **broken,
                "logprob": -0.5,
                "top_logprobs": [{**broken, "logprob": -0.5}, {**accented, "logprob": -1.0}],
            },
            {
                "token": "<|end|>",
                "bytes": None,
                "logprob": -9999.0,
                "top_logprobs": [{**accented, "logprob": -0.25}, {**broken, "logprob": -1.5}],
            },
        ],
        "refusal": None,
    }
    assert [each.top_logprobs for each in chat_logprobs(RECORDS, NAMES.__getitem__, 0).content] == [[], []]


def test_completions_have_lists_and_each_alternatives_entry_holds_the_token_itself() -> None:
    assert msgspec.to_builtins(completion_logprobs(RECORDS, NAMES.__getitem__, 2)) == {
        "tokens": ["a", "bytes:\\xc3", "<|end|>"],
        "token_logprobs": [None, -0.5, -9999.0],
        "top_logprobs": [
            None,
            {"bytes:\\xc3": -0.5, "é": -1.0},
            {"é": -0.25, "bytes:\\xc3": -1.5, "<|end|>": -9999.0},
        ],
        "text_offset": [0, 1, 2],
    }


def test_completions_without_alternatives_have_none() -> None:
    found = completion_logprobs(RECORDS, NAMES.__getitem__, 0)
    assert found.top_logprobs is None
    assert found.token_logprobs == [None, -0.5, -9999.0]


def test_two_tokens_of_one_spelling_show_the_likelier_one() -> None:
    record = TokenRecord(2, 0, TokenLogprobs(logprob=-3.0, top=((1, -0.1),)))
    (top,) = completion_logprobs((record,), lambda _: TokenName("x", b"x"), 1).top_logprobs or ()
    assert top == {"x": -0.1}
