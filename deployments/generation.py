"""From a request body to the engine and back to text.

Owns how a body becomes a Submit (prompt, defaults, what fits the context), how deltas become text with exact token
counts, and the ids of requests that run. Does not know HTTP or the shape of answers.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from deployments.detokenizer import TextStream
from deployments.http_errors import ContextLengthExceeded
from deployments.protocol import DEFAULT_COMPLETION_TOKENS, ChatBody, CompletionBody
from deployments.responses import FinishReason, Piece
from deployments.text import TextCodec
from engine.errors import EngineError, EngineUnavailable, InvalidRequest
from engine.request import Delta, SamplingParams, SpeculativeOptions, Submit


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiLimits:
    """What a request may ask for."""

    max_model_len: int
    """Prompt + output, tokens."""
    vocab_size: int
    """Token ids that the target accepts are below it."""
    max_body_bytes: int = 4 * 2**20
    inline_body_bytes: int = 4096
    """Longer bodies are parsed and tokenised in a thread, so that streams do not wait for them."""


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


def encode_prompt(body: ChatBody | CompletionBody, codec: TextCodec, limits: ApiLimits) -> tuple[int, ...]:
    """Token ids of the prompt, at least one.

    Raises:
        InvalidRequest: field `prompt` or `messages`.
    """
    if isinstance(body, ChatBody):
        prompt = codec.encode_chat([{"role": turn.role, "content": turn.content} for turn in body.messages])
        field = "messages"
    else:
        prompt = codec.encode(body.prompt) if isinstance(body.prompt, str) else body.prompt
        field = "prompt"
    if not prompt:
        raise InvalidRequest(f"{field} must hold at least one token; it is empty", field=field)
    if min(prompt) < 0 or max(prompt) >= limits.vocab_size:
        index = next(i for i, token_id in enumerate(prompt) if not 0 <= token_id < limits.vocab_size)
        raise InvalidRequest(
            f"{field}: token id {prompt[index]} at index {index} is outside 0 to {limits.vocab_size - 1}", field=field
        )
    if len(prompt) >= limits.max_model_len:
        raise ContextLengthExceeded(
            f"The context holds {limits.max_model_len} tokens, but {field} has {len(prompt)}, "
            "which leaves no room for an answer; shorten it",
            field=field,
        )
    return prompt


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


def make_submit(body: ChatBody | CompletionBody, request_id: str, codec: TextCodec, limits: ApiLimits) -> Submit:
    """The engine's view of a body. Costs time linear in the prompt; safe in a thread.

    Raises:
        InvalidRequest: naming the field.
    """
    prompt = encode_prompt(body, codec, limits)
    speculative = body.speculative
    return Submit(
        request_id=request_id,
        prompt=prompt,
        sampling=SamplingParams(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            max_tokens=choose_max_tokens(body, len(prompt), limits),
            seed=body.seed,
            stop_token_ids=codec.eos_token_ids,
        ),
        speculative=SpeculativeOptions()
        if speculative is None
        else SpeculativeOptions(enabled=speculative.enabled, max_k=speculative.max_k),
    )


async def read_pieces(deltas: AsyncGenerator[Delta, None], text: TextStream) -> AsyncGenerator[Piece, None]:
    """A piece per delta, the last with `finish_reason`; ends, is closed or is cancelled together with `deltas`.

    A stop string closes `deltas` before the last piece is handed on, so a slow client never keeps the engine busy.

    Raises:
        EngineError: the engine reported an error, or ended without a reason.
        EngineUnavailable: the engine gave the request up.
    """
    num_completion = 0
    try:
        async for delta in deltas:
            if delta.finish_reason == "error":
                raise EngineError(delta.error or "The engine failed on this request")
            if delta.finish_reason == "abort":
                raise EngineUnavailable("The engine gave this request up; send it again")
            piece = text.push(delta.token_ids, is_last=delta.finish_reason is not None)
            num_completion += piece.num_tokens
            finish_reason: FinishReason | None = "stop" if piece.is_stopped else delta.finish_reason
            if finish_reason is not None:
                await deltas.aclose()
            yield Piece(
                text=piece.text,
                finish_reason=finish_reason,
                num_completion=num_completion,
                num_cached=delta.num_cached,
                num_drafted=delta.num_drafted,
                num_accepted=delta.num_accepted,
            )
            if finish_reason is not None:
                return
        raise EngineError("The engine ended this request without a finish reason")
    finally:
        await deltas.aclose()
