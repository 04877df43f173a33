"""From a request body to what the engine receives.

Owns how a body becomes `Submit`s: defaults, sampling options, the grammar, and how many choices there are. Does not
know HTTP or the shape of responses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deployments.errors import ContextLengthExceeded
from deployments.openai.prompts import ApiLimits, check_ids, context_length, encode_prompts
from deployments.openai.requests import DEFAULT_COMPLETION_TOKENS, ChatBody, CompletionBody
from deployments.openai.structured import after_thoughts, check_grammar
from deployments.openai.tool_grammar import forcing_grammar, text_or_calls
from deployments.text.tokenizer import TextCodec
from engine.errors import InvalidRequest
from engine.messages import CheckGrammar, GrammarSpec, SamplingParams, SpeculativeOptions, Submit

MIN_TEMPERATURE = 1e-5
"""A lower temperature is greedy. Logits divided by it would differ by more than float32 can tell from certainty."""


def choose_max_tokens(body: ChatBody | CompletionBody, num_prompt: int, limits: ApiLimits) -> int:
    """Most tokens to generate: what the request sets, or the route's default, as far as the context holds them.

    Raises:
        ContextLengthExceeded: the request sets more than the prompt leaves, and the limits are strict.
    """
    room = limits.max_model_len - num_prompt
    requested = body.requested_max_tokens
    if requested is None:
        return room if isinstance(body, ChatBody) else min(DEFAULT_COMPLETION_TOKENS, room)
    if requested > room and limits.strict_max_tokens:
        field = body.max_tokens_field
        raise ContextLengthExceeded(
            f"{context_length(limits)} {field} is {requested}, but the prompt has {num_prompt}; {room} are left",
            field=field,
        )
    return min(requested, room)


def make_submits(
    body: ChatBody | CompletionBody, request_id: str, codec: TextCodec, limits: ApiLimits, check: CheckGrammar
) -> tuple[Submit, ...]:
    """What the engine receives for a body: for each prompt in order, one submit per choice. Safe in a thread.

    The first submit has the request's id, the others have their index appended. Takes time linear in the prompts, and
    milliseconds more if there is a grammar, which `check` checks.

    Raises:
        EngineUnavailable: there is no engine to check a grammar.
        InvalidRequest: naming the field.
    """
    prompts = encode_prompts(body, codec, limits)
    grammar = choose_grammar(body, codec, check)
    if grammar is not None and isinstance(body, ChatBody) and body.begins_a_turn and codec.has_thoughts:
        (prompt,) = prompts
        if not codec.closes_thoughts(prompt):
            grammar = after_thoughts(grammar, is_open=codec.opens_thoughts(prompt), check=check)
    speculative = SpeculativeOptions()
    if body.speculative is not None:
        asked = body.speculative
        speculative = SpeculativeOptions(enabled=asked.enabled, max_k=asked.max_k, learn=asked.learn)
    shared = _sampling(body, codec, limits)
    submits: list[Submit] = []
    for prompt in prompts:
        max_tokens = choose_max_tokens(body, len(prompt), limits)
        min_tokens = body.min_tokens or 0
        if min_tokens > max_tokens:
            raise InvalidRequest(
                f"min_tokens is {min_tokens}, but at most {max_tokens} tokens are generated", field="min_tokens"
            )
        for number in range(body.num_choices):
            index = len(submits)
            sampling = SamplingParams(
                # Scoring a prompt also takes one step, whose token is dropped.
                max_tokens=max(max_tokens, 1),
                min_tokens=min_tokens,
                seed=None if body.seed is None else _next_seed(body.seed, number),
                grammar=grammar,
                **shared,
            )
            name = f"{request_id}-{index}" if index else request_id
            submits.append(Submit(request_id=name, prompt=prompt, sampling=sampling, speculative=speculative))
    return tuple(submits)


def _sampling(body: ChatBody | CompletionBody, codec: TextCodec, limits: ApiLimits) -> Mapping[str, Any]:
    """Options that all choices share, under the names of SamplingParams."""
    check_ids([token_id for token_id, _ in body.logit_bias], "logit_bias", "logit_bias", limits)
    check_ids(body.stop_token_ids, "stop_token_ids", "stop_token_ids", limits)
    stops = () if body.ignore_eos else codec.eos_token_ids
    has_echo = isinstance(body, CompletionBody) and body.echo
    return {
        "temperature": choose_temperature(body.temperature),
        "top_p": _or(body.top_p, 1.0),
        "top_k": max(body.top_k or 0, 0),
        "min_p": _or(body.min_p, 0.0),
        "presence_penalty": _or(body.presence_penalty, 0.0),
        "frequency_penalty": _or(body.frequency_penalty, 0.0),
        "repetition_penalty": _or(body.repetition_penalty, 1.0),
        "logit_bias": body.logit_bias,
        "stop_token_ids": tuple(dict.fromkeys((*stops, *body.stop_token_ids))),
        "num_logprobs": body.num_logprobs,
        "num_prompt_logprobs": body.num_logprobs if has_echo else None,
    }


def choose_temperature(value: float | None) -> float:
    """The temperature that the engine gets: 1 by default, and 0 (greedy) for one too small to divide logits by."""
    if value is None:
        return 1.0
    return value if value >= MIN_TEMPERATURE else 0.0


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _next_seed(seed: int, number: int) -> int:
    """The seed of a choice, within 64 bits."""
    return (seed + number + 2**63) % 2**64 - 2**63


def choose_grammar(body: ChatBody | CompletionBody, codec: TextCodec, check: CheckGrammar) -> GrammarSpec | None:
    """The grammar of a body's text, checked: the one it sets, or that of its tools.

    Raises:
        InvalidRequest: naming the field.
    """
    field, grammar = next(iter(body.grammars()), ("tool_choice", None))
    if grammar is not None:
        check_grammar(grammar, field, check)
    elif isinstance(body, ChatBody) and body.may_call_tools and codec.tool_form is not None:
        is_parallel = body.parallel_tool_calls is not False
        if body.must_call_tools:
            is_parallel = is_parallel and body.tool_mode.mode == "required"
            grammar = forcing_grammar(
                codec.tool_form, body.tools or (), body.tool_mode, is_parallel=is_parallel, check=check
            )
        elif codec.tool_form == "generic":
            grammar = text_or_calls(body.tools or (), is_parallel=is_parallel, check=check)
    if grammar is not None and body.ignore_eos:
        raise InvalidRequest(f"ignore_eos cannot be combined with {field}, whose text has an end", field="ignore_eos")
    return grammar
