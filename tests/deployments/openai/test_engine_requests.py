"""From bodies to what the engine gets: no number that a client may send makes sampling fail."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import xgrammar
from api_harness import CHAT, CODEC, LIMITS, tool_codec
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_tokenizer import TEMPLATE, byte_level
from tokenizers import AddedToken
from tool_texts import ONE, TOOLS
from xgrammar.testing import _is_grammar_accept_string

from deployments.errors import ContextLengthExceeded
from deployments.openai.engine_requests import MIN_TEMPERATURE, choose_grammar, make_submits
from deployments.openai.requests import ChatBody, CompletionBody
from deployments.text.tokenizer import TextCodec
from engine.errors import InvalidRequest
from engine.messages import GrammarSpec, SamplingParams, SpeculativeOptions
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


@pytest.mark.parametrize(
    ("choice", "is_parallel", "takes_two"),
    [
        ("required", None, True),
        ("required", True, True),
        ("required", False, False),
        ({"type": "function", "function": {"name": "weather"}}, True, False),
    ],
)
def test_a_forced_answer_holds_several_calls_unless_one_is_named_or_asked_for(
    choice: Any, is_parallel: bool | None, takes_two: bool
) -> None:
    fields = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": is_parallel}
    body = ChatBody.model_validate_json(json.dumps({**CHAT, **fields}))
    spec = choose_grammar(body, tool_codec("hermes"), checked)
    assert spec is not None
    grammar = xgrammar.Grammar.from_ebnf(spec.text)
    assert _is_grammar_accept_string(grammar, ONE)
    assert _is_grammar_accept_string(grammar, f"{ONE}\n{ONE}") == takes_two


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


def chat(**fields: Any) -> ChatBody:
    return ChatBody.model_validate_json(json.dumps({**CHAT, **fields}))


def test_without_options_the_engine_gets_the_model_s_own_distribution() -> None:
    (submit,) = make_submits(completion(), "r", CODEC, LIMITS, checked)
    assert submit.request_id == "r"
    assert submit.prompt == CODEC.encode("go ")
    assert submit.sampling == SamplingParams(max_tokens=16, stop_token_ids=CODEC.eos_token_ids)
    assert submit.speculative == SpeculativeOptions(enabled=True, max_k=None)


def test_every_option_reaches_the_engine_by_value() -> None:
    other = next(i for i in range(10) if i not in CODEC.eos_token_ids)
    (eos,) = CODEC.eos_token_ids
    (submit,) = make_submits(
        completion(
            temperature=0.5,
            top_p=0.25,
            top_k=7,
            min_p=0.125,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            repetition_penalty=1.5,
            logit_bias={"5": 2},
            seed=11,
            max_tokens=9,
            min_tokens=3,
            stop_token_ids=[other, eos],
            logprobs=2,
            guided_regex="a+",
            speculative={"enabled": False, "max_k": 3, "learn": False},
        ),
        "r",
        CODEC,
        LIMITS,
        checked,
    )
    assert submit.sampling == SamplingParams(
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias=((5, 2.0),),
        max_tokens=9,
        min_tokens=3,
        seed=11,
        stop_token_ids=(eos, other),
        num_logprobs=2,
        num_prompt_logprobs=None,
        grammar=GrammarSpec(kind="regex", text="a+"),
    )
    assert submit.speculative == SpeculativeOptions(enabled=False, max_k=3, learn=False)


@pytest.mark.parametrize(("given", "expected"), [(-1, 0), (0, 0), (1, 1), (None, 0)])
def test_no_top_k_is_zero(given: int | None, expected: int) -> None:
    assert make_submits(completion(top_k=given), "r", CODEC, LIMITS, checked)[0].sampling.top_k == expected


def test_zero_is_not_the_default() -> None:
    """0 is a value of these options, and the neutral one of some of them only."""
    (submit,) = make_submits(
        completion(temperature=0, min_p=0, presence_penalty=0, seed=0), "r", CODEC, LIMITS, checked
    )
    assert (submit.sampling.temperature, submit.sampling.seed) == (0.0, 0)


@pytest.mark.parametrize(
    ("given", "expected"), [(None, 1.0), (MIN_TEMPERATURE, 1e-5), (math.nextafter(MIN_TEMPERATURE, 0), 0.0), (2, 2.0)]
)
def test_the_least_temperature_that_is_not_greedy(given: float | None, expected: float) -> None:
    assert make_submits(completion(temperature=given), "r", CODEC, LIMITS, checked)[0].sampling.temperature == expected


def test_ignoring_eos_leaves_the_request_s_own_stop_tokens() -> None:
    (submit,) = make_submits(completion(ignore_eos=True, stop_token_ids=[3]), "r", CODEC, LIMITS, checked)
    assert submit.sampling.stop_token_ids == (3,)
    with pytest.raises(InvalidRequest, match="cannot be combined with guided_regex") as caught:
        make_submits(completion(ignore_eos=True, guided_regex="a"), "r", CODEC, LIMITS, checked)
    assert caught.value.field == "ignore_eos"


def test_each_choice_of_each_prompt_has_an_id_and_the_next_seed() -> None:
    submits = make_submits(completion(prompt=["go", "stop"], n=3, seed=2**63 - 2), "r", CODEC, LIMITS, checked)
    assert [submit.request_id for submit in submits] == ["r", "r-1", "r-2", "r-3", "r-4", "r-5"]
    assert [submit.prompt for submit in submits] == [CODEC.encode("go")] * 3 + [CODEC.encode("stop")] * 3
    assert [submit.sampling.seed for submit in submits] == [2**63 - 2, 2**63 - 1, -(2**63)] * 2
    assert {submit.sampling.seed for submit in make_submits(completion(n=2), "r", CODEC, LIMITS, checked)} == {None}


def test_an_echo_with_log_probabilities_scores_the_prompt() -> None:
    (submit,) = make_submits(completion(echo=True, logprobs=2, max_tokens=0), "r", CODEC, LIMITS, checked)
    assert (submit.sampling.num_logprobs, submit.sampling.num_prompt_logprobs) == (2, 2)
    assert submit.sampling.max_tokens == 1, "scoring takes one step, whose token is dropped"
    assert make_submits(completion(echo=True), "r", CODEC, LIMITS, checked)[0].sampling.num_prompt_logprobs is None
    (submit,) = make_submits(chat(logprobs=True, top_logprobs=3), "r", CODEC, LIMITS, checked)
    assert (submit.sampling.num_logprobs, submit.sampling.num_prompt_logprobs) == (3, None)
    assert make_submits(chat(logprobs=True), "r", CODEC, LIMITS, checked)[0].sampling.num_logprobs == 0


def test_the_number_of_tokens_is_what_is_set_or_what_the_context_leaves() -> None:
    num_prompt = len(make_submits(chat(), "r", CODEC, LIMITS, checked)[0].prompt)
    room = LIMITS.max_model_len - num_prompt

    def found(body: ChatBody | CompletionBody, *, strict: bool = False) -> int:
        return make_submits(body, "r", CODEC, replace(LIMITS, strict_max_tokens=strict), checked)[0].sampling.max_tokens

    assert found(chat()) == room
    assert found(completion()) == 16
    assert found(completion(prompt=[5] * (LIMITS.max_model_len - 3))) == 3
    assert found(chat(max_tokens=5)) == found(chat(max_completion_tokens=5)) == 5
    assert found(chat(max_tokens=room + 1)) == room
    assert found(chat(max_tokens=room), strict=True) == room
    for field in ("max_tokens", "max_completion_tokens"):
        with pytest.raises(ContextLengthExceeded, match=f"{field} is {room + 1}.*; {room} are left") as caught:
            found(chat(**{field: room + 1}), strict=True)
        assert caught.value.field == field


def test_min_tokens_beyond_the_tokens_that_may_be_generated_are_refused() -> None:
    assert make_submits(completion(min_tokens=16), "r", CODEC, LIMITS, checked)[0].sampling.min_tokens == 16
    with pytest.raises(InvalidRequest, match="min_tokens is 17, but at most 16") as caught:
        make_submits(completion(min_tokens=17), "r", CODEC, LIMITS, checked)
    assert caught.value.field == "min_tokens"


@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids"])
def test_token_ids_outside_the_vocabulary_are_refused_by_field(field: str) -> None:
    last = LIMITS.vocab_size - 1
    values = {"logit_bias": {str(last): 1}, "stop_token_ids": [last]}
    make_submits(completion(**{field: values[field]}), "r", CODEC, LIMITS, checked)
    values = {"logit_bias": {str(last + 1): 1}, "stop_token_ids": [last + 1]}
    with pytest.raises(
        InvalidRequest, match=f"{field}: token id {last + 1} at index 0 is outside 0 to {last}"
    ) as caught:
        make_submits(completion(**{field: values[field]}), "r", CODEC, LIMITS, checked)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("prompt", "field", "message"),
    [
        ("", "prompt", "prompt must hold at least one token"),
        (["a", ""], "prompt", r"prompt\[1\] must hold at least one token"),
        ([5, -1], "prompt", "prompt: token id -1 at index 1"),
        ([5] * 256, "prompt", "maximum context length is 256 tokens. prompt has 256"),
        ([[5], [10**30]], "prompt", r"prompt\[1\]: token id a very large number at index 0"),
    ],
)
def test_prompts_that_do_not_fit_are_refused(prompt: object, field: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        make_submits(completion(prompt=prompt), "r", CODEC, LIMITS, checked)
    assert caught.value.field == field


def test_the_longest_prompts() -> None:
    (submit,) = make_submits(completion(prompt=[5] * 255), "r", CODEC, LIMITS, checked)
    assert (len(submit.prompt), submit.sampling.max_tokens) == (255, 1)
    limits = replace(LIMITS, max_prompt_tokens=10)
    assert len(make_submits(completion(prompt=[5] * 10), "r", CODEC, limits, checked)[0].prompt) == 10
    with pytest.raises(ContextLengthExceeded, match="at most 10 tokens, but prompt has 11"):
        make_submits(completion(prompt=[5] * 11), "r", CODEC, limits, checked)


@pytest.mark.parametrize(
    ("end", "fields", "allows_thoughts"),
    [
        ("", {}, True),
        ("<think>", {}, True),
        ("<think></think>", {}, False),
        ("", {"add_generation_prompt": False}, False),
    ],
)
def test_a_grammar_begins_after_the_thoughts_that_the_prompt_leaves_possible(
    end: str, fields: dict[str, Any], allows_thoughts: bool
) -> None:
    tokenizer = byte_level()
    tokenizer.chat_template = TEMPLATE + "{# </think> #}" + end
    codec = TextCodec(tokenizer, eos_token_ids=[tokenizer.eos_token_id])
    (submit,) = make_submits(chat(guided_regex="a+", **fields), "r", codec, LIMITS, checked)
    grammar = submit.sampling.grammar
    assert grammar is not None
    if allows_thoughts:
        assert (grammar.kind, "</think" in grammar.text) == ("ebnf", True)
    else:
        assert grammar == GrammarSpec(kind="regex", text="a+")
    (submit,) = make_submits(chat(guided_regex="a+"), "r", CODEC, LIMITS, checked)
    assert submit.sampling.grammar == GrammarSpec(kind="regex", text="a+")
