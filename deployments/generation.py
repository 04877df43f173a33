"""From a request body to the engine and back to pieces.

Owns how a body becomes Submits (defaults, options, how many), the reading of deltas, and the ids of requests that run.
Does not know HTTP or the shape of answers.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, get_args

from deployments.admission import Client
from deployments.choice import ChoiceStream, Echo
from deployments.detokenizer import TextStream
from deployments.http_errors import ContextLengthExceeded
from deployments.prompts import ApiLimits, check_ids, encode_prompts
from deployments.protocol import DEFAULT_COMPLETION_TOKENS, ChatBody, CompletionBody
from deployments.responses import Piece
from deployments.structured import check_grammar
from deployments.text import TextCodec
from deployments.tool_grammar import forcing_grammar
from deployments.tools import make_parser
from engine.errors import EngineError, EngineUnavailable, InvalidRequest
from engine.request import Delta, GrammarSpec, Priority, SamplingParams, SpeculativeOptions, Submit


class RunningId:
    """An id in use until it is released; releasing it again changes nothing."""

    def __init__(self, request_id: str, ids: set[str]) -> None:
        self.request_id = request_id
        self._ids: set[str] | None = ids

    def release(self) -> None:
        if self._ids is not None:
            self._ids.discard(self.request_id)
            self._ids = None


class RunningIds:
    """Ids of the requests that run now; each is unique within the engine."""

    def __init__(self) -> None:
        self._ids: set[str] = set()

    def claim(self, wanted: str) -> RunningId:
        """The wanted id, or with a number appended where a request of that id still runs."""
        request_id, number = wanted, 1
        while request_id in self._ids:
            number += 1
            request_id = f"{wanted}-{number}"
        self._ids.add(request_id)
        return RunningId(request_id, self._ids)

    def __len__(self) -> int:
        return len(self._ids)


def choose_max_tokens(body: ChatBody | CompletionBody, num_prompt: int, limits: ApiLimits) -> int:
    """Most tokens to generate: what was asked for, or the default as far as it fits.

    Raises:
        ContextLengthExceeded: more was asked for than the prompt leaves.
    """
    room = limits.max_model_len - num_prompt
    requested = body.requested_max_tokens
    if requested is None:
        return room if isinstance(body, ChatBody) else min(DEFAULT_COMPLETION_TOKENS, room)
    if requested > room:
        field = body.max_tokens_field
        raise ContextLengthExceeded(
            f"{field} is {requested}, but the context holds {limits.max_model_len} tokens and the prompt takes "
            f"{num_prompt}; at most {room} are left",
            field=field,
        )
    return requested


def make_submits(
    body: ChatBody | CompletionBody, request_id: str, codec: TextCodec, limits: ApiLimits
) -> tuple[Submit, ...]:
    """The engine's view of a body: for each prompt in order, a submit per choice. Safe in a thread.

    The first has the request's id, the others have their index appended. Costs time linear in the prompts, and
    milliseconds more where there is a grammar.

    Raises:
        InvalidRequest: naming the field.
    """
    prompts = encode_prompts(body, codec, limits)
    grammar = choose_grammar(body, codec)
    speculative = SpeculativeOptions()
    if body.speculative is not None:
        speculative = SpeculativeOptions(enabled=body.speculative.enabled, max_k=body.speculative.max_k)
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
                # Scoring a prompt still takes one step, whose token is dropped.
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
    """Options that all choices share, by the names of SamplingParams."""
    check_ids([token_id for token_id, _ in body.logit_bias], "logit_bias", "logit_bias", limits)
    check_ids(body.stop_token_ids, "stop_token_ids", "stop_token_ids", limits)
    stops = () if body.ignore_eos else codec.eos_token_ids
    has_echo = isinstance(body, CompletionBody) and body.echo
    return {
        "temperature": _or(body.temperature, 1.0),
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


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _next_seed(seed: int, number: int) -> int:
    """The seed of a choice, within 64 bits."""
    return (seed + number + 2**63) % 2**64 - 2**63


def choose_grammar(body: ChatBody | CompletionBody, codec: TextCodec) -> GrammarSpec | None:
    """The grammar that a body asks for, checked: its own, or that of the tools it requires.

    Raises:
        InvalidRequest: naming the field.
    """
    field, grammar = next(iter(body.grammars()), ("tool_choice", None))
    if grammar is not None:
        check_grammar(grammar, field)
    elif isinstance(body, ChatBody) and body.tool_mode.mode in ("required", "named") and codec.tool_form is not None:
        is_parallel = body.tool_mode.mode == "required" and body.parallel_tool_calls is not False
        grammar = forcing_grammar(codec.tool_form, body.tools or (), body.tool_mode, is_parallel=is_parallel)
    if grammar is not None and body.ignore_eos:
        raise InvalidRequest(f"ignore_eos cannot be combined with {field}, whose text has an end", field="ignore_eos")
    return grammar


def choose_priority(body: ChatBody | CompletionBody, client: Client) -> Priority:
    """What was asked for, or the highest that the client may have, up to `normal`.

    Raises:
        InvalidRequest: more was asked for than the client may have.
    """
    highest_first = get_args(Priority)
    wanted, allowed = body.priority or "normal", client.max_priority
    if highest_first.index(wanted) >= highest_first.index(allowed):
        return wanted
    if body.priority is not None:
        raise InvalidRequest(f"priority is {wanted!r}, but this key allows up to {allowed!r}", field="priority")
    return allowed


def make_choice(body: ChatBody | CompletionBody, submit: Submit, index: int, codec: TextCodec) -> ChoiceStream:
    """The state of one answer to a body."""
    parser, echo = None, None
    if isinstance(body, ChatBody) and body.may_call_tools and codec.tool_form is not None:
        parser = make_parser(codec.tool_form, {tool.function.name for tool in body.tools or ()})
    if isinstance(body, CompletionBody) and body.echo:
        echo = Echo(submit.prompt, codec.detokenizer(), has_logprobs=body.num_logprobs is not None)
    return ChoiceStream(
        TextStream(codec.detokenizer(), body.stop, min_tokens=submit.sampling.min_tokens),
        index=index,
        by_token=body.streams_tokens,
        has_logprobs=body.num_logprobs is not None,
        has_trace=body.is_traced,
        hidden_stops=frozenset(body.stop_token_ids),
        parser=parser,
        is_parallel=not isinstance(body, ChatBody) or body.parallel_tool_calls is not False,
        echo=echo,
        has_answer=body.requested_max_tokens != 0,
    )


async def read_pieces(deltas: AsyncGenerator[Delta, None], choice: ChoiceStream) -> AsyncGenerator[Piece, None]:
    """The pieces of one answer, the last with `finish_reason`; ends, is closed or is cancelled with `deltas`.

    A stop string closes `deltas` before the last piece is handed on, so a slow client never keeps the engine busy.

    Raises:
        EngineError: the engine reported an error, or ended without a reason.
        EngineUnavailable: the engine gave the request up.
    """
    try:
        async for delta in deltas:
            if delta.finish_reason == "error":
                raise EngineError(delta.error or "The engine failed on this request")
            if delta.finish_reason == "abort":
                raise EngineUnavailable("The engine gave this request up; send it again")
            pieces = choice.push(delta)
            is_over = bool(pieces) and pieces[-1].finish_reason is not None
            if is_over:
                await deltas.aclose()
            for piece in pieces:
                yield piece
            if is_over:
                return
        raise EngineError("The engine ended this request without a finish reason")
    finally:
        await deltas.aclose()
