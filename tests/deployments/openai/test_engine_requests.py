"""From bodies to what the engine gets: no number that a client may send breaks the choice of a token."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from api_harness import CHAT, CODEC, LIMITS
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_tokenizer import byte_level
from tokenizers import AddedToken

from deployments.openai.engine_requests import MIN_TEMPERATURE, make_submits
from deployments.openai.requests import ChatBody, CompletionBody
from deployments.text.tokenizer import TextCodec
from engine.errors import InvalidRequest
from engine.sampling.distribution import draw, gumbel, most_likely, warp
from engine.sampling.grammar import checked
from engine.sampling.row_sampling import RowSampling

TINY = [5e-324, 1e-308, 1e-45, 1e-40, 1.2e-38, 1e-37, 1e-30, 1e-6, MIN_TEMPERATURE]
VOCAB = 64


def extremes(low: float, high: float, *others: float) -> st.SearchStrategy[float]:
    """Bounds of an option, values next to them, and values that float32 cannot hold."""
    inner = [math.nextafter(low, high), math.nextafter(high, low), *others]
    return st.sampled_from([low, high, *(value for value in (*TINY, *inner) if low <= value <= high)])


options = st.fixed_dictionaries(
    {},
    optional={
        "temperature": extremes(0.0, 2.0),
        "top_p": extremes(5e-324, 1.0),
        "min_p": extremes(0.0, 1.0),
        "top_k": st.sampled_from([-1, 0, 1, 2, VOCAB, 2**31 - 1]),
        "presence_penalty": extremes(-2.0, 2.0),
        "frequency_penalty": extremes(-2.0, 2.0),
        "repetition_penalty": extremes(0.1, 10.0),
    },
)
logits = st.lists(st.sampled_from([0.0, 1e-30, 1.0, -40.0, 40.0, 90.0, -1e4, 1e4]), min_size=VOCAB, max_size=VOCAB)


@settings(max_examples=400, deadline=None)
@example(given={"temperature": 1e-39}, values=[40.0, 90.0, *[-40.0] * (VOCAB - 2)], seed=0)
@given(given=options, values=logits, seed=st.integers(0, 2**32))
def test_no_value_of_an_option_makes_a_choice_of_what_is_no_number(
    given: dict[str, float], values: list[float], seed: int
) -> None:
    body = ChatBody.model_validate_json(json.dumps({**CHAT, **given}))
    sampling = make_submits(body, "r", CODEC, LIMITS, checked)[0].sampling
    row = torch.tensor([values])
    best = int(most_likely(row)[0])
    # Penalties as they apply to a token that was seen twice.
    penalized = row / sampling.repetition_penalty if row[0, best] > 0 else row * sampling.repetition_penalty
    row = penalized - 2 * sampling.frequency_penalty - sampling.presence_penalty
    assert torch.isfinite(row).all()
    if sampling.temperature == 0.0:
        return
    row_sampling = RowSampling(sampling.temperature, sampling.top_p, 0, 0, False, sampling.top_k, sampling.min_p)
    probs = warp(row, [row_sampling])
    assert torch.isfinite(probs).all()
    assert probs.sum().item() == pytest.approx(1.0, abs=1e-4)
    token = int(draw(probs, gumbel([seed], torch.arange(VOCAB)))[0])
    assert probs[0, token] > 0


@pytest.mark.parametrize("temperature", [0, *TINY[:-1]])
def test_a_temperature_too_small_to_divide_by_is_greedy(temperature: float) -> None:
    body = ChatBody.model_validate_json(json.dumps({**CHAT, "temperature": temperature}))
    assert make_submits(body, "r", CODEC, LIMITS, checked)[0].sampling.temperature == 0.0


def completion(**fields: Any) -> CompletionBody:
    return CompletionBody.model_validate_json(json.dumps({"model": "tiny", "prompt": "go ", **fields}))


def infill_codec() -> TextCodec:
    tokenizer = byte_level()
    names = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    tokenizer.add_tokens([AddedToken(name, special=True) for name in names], special_tokens=True)
    return TextCodec(tokenizer, eos_token_ids=[tokenizer.eos_token_id])


def test_a_suffix_fills_in_the_middle_where_the_tokenizer_has_tokens_for_it() -> None:
    codec = infill_codec()
    limits = replace(LIMITS, vocab_size=codec.vocab_size)
    (submit,) = make_submits(completion(suffix=" stop"), "r", codec, limits, checked)
    assert submit.prompt == codec.encode("<|fim_prefix|>go <|fim_suffix|> stop<|fim_middle|>")
    ids = list(codec.encode("go "))
    (submit,) = make_submits(completion(prompt=ids, suffix=" stop"), "r", codec, limits, checked)
    assert submit.prompt == codec.encode("<|fim_prefix|>go <|fim_suffix|> stop<|fim_middle|>")
    with pytest.raises(InvalidRequest, match="no fill-in-the-middle tokens") as caught:
        make_submits(completion(suffix=" stop"), "r", CODEC, LIMITS, checked)
    assert caught.value.field == "suffix"


def test_an_empty_suffix_is_absent() -> None:
    assert make_submits(completion(suffix=""), "r", CODEC, LIMITS, checked) == make_submits(
        completion(), "r", CODEC, LIMITS, checked
    )
