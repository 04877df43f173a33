"""What clients get: OpenAI's response and chunk objects, as structs that encode to JSON in about a microsecond.

Owns field names and order, and what an answer is written from: pieces of text.
`UNSET` fields are left out, `None` ones are null. Does not know requests or the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step added to an answer, and totals so far."""

    text: str
    finish_reason: FinishReason | None
    num_completion: int
    """Tokens of the answer, the one that completed a stop string included, those after it not."""
    num_cached: int
    num_drafted: int
    num_accepted: int


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(Struct, frozen=True):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class SpeculativeUsage(Struct, frozen=True):
    """Draft tokens verified for this request, and how many of them the target accepted."""

    drafted: int
    accepted: int


class Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    speculative: SpeculativeUsage


class ChatMessage(Struct, frozen=True):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatDelta(Struct, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    message: ChatMessage
    finish_reason: FinishReason
    index: int = 0
    logprobs: None = None


class ChatChunkChoice(Struct, frozen=True):
    delta: ChatDelta
    finish_reason: FinishReason | None
    index: int = 0
    logprobs: None = None


class CompletionChoice(Struct, frozen=True):
    """In a response and in a chunk alike."""

    text: str
    finish_reason: FinishReason | None
    index: int = 0
    logprobs: None = None


class Answer(Struct, frozen=True, kw_only=True):
    """A response, or one chunk of a stream; `object` says which."""

    id: str
    object: str
    created: int
    model: str
    choices: tuple[ChatChoice | ChatChunkChoice | CompletionChoice, ...]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | None = None


class ModelCard(Struct, frozen=True, kw_only=True):
    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "paceline"


class ModelList(Struct, frozen=True):
    data: tuple[ModelCard, ...]
    object: str = "list"


class HealthReport(Struct, frozen=True):
    status: str
    reason: str
    draft: str


class ChatFormat:
    """Choices of /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, text: str, finish_reason: FinishReason) -> ChatChoice:
        return ChatChoice(ChatMessage(text), finish_reason)

    def chunk_choice(self, text: str, finish_reason: FinishReason | None, *, is_first: bool) -> ChatChunkChoice:
        delta = ChatDelta(role="assistant" if is_first else UNSET, content=text if text or is_first else UNSET)
        return ChatChunkChoice(delta, finish_reason)


class CompletionFormat:
    """Choices of /v1/completions."""

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def choice(self, text: str, finish_reason: FinishReason) -> CompletionChoice:
        return CompletionChoice(text, finish_reason)

    def chunk_choice(self, text: str, finish_reason: FinishReason | None, *, is_first: bool) -> CompletionChoice:
        del is_first  # Only chat has a role to announce.
        return CompletionChoice(text, finish_reason)


class AnswerWriter:
    """JSON of the answer to one request, whole or in chunks.

    Args:
        answer_format: which endpoint's choices.
        request_id: the engine's; the answer's id derives from it.
        created: unix seconds.
        num_prompt: prompt tokens, for usage.
    """

    def __init__(
        self,
        answer_format: ChatFormat | CompletionFormat,
        *,
        request_id: str,
        created: int,
        model: str,
        system_fingerprint: str | None,
        num_prompt: int,
    ) -> None:
        self.answer_id = answer_format.id_prefix + request_id
        self._format = answer_format
        self._created = created
        self._model = model
        self._system_fingerprint = system_fingerprint
        self._num_prompt = num_prompt
        self._encoder = msgspec.json.Encoder()

    def whole(self, text: str, last: Piece, finish_reason: FinishReason) -> bytes:
        choice = self._format.choice(text, finish_reason)
        return self._encode(self._format.object, (choice,), self._usage(last))

    def chunk(self, piece: Piece, *, is_first: bool, includes_usage: bool) -> bytes:
        """One chunk; `usage` is null where the client will get it in a chunk of its own."""
        choice = self._format.chunk_choice(piece.text, piece.finish_reason, is_first=is_first)
        return self._encode(self._format.chunk_object, (choice,), None if includes_usage else UNSET)

    def usage_chunk(self, last: Piece) -> bytes:
        return self._encode(self._format.chunk_object, (), self._usage(last))

    def _usage(self, last: Piece) -> Usage:
        return Usage(
            prompt_tokens=self._num_prompt,
            completion_tokens=last.num_completion,
            total_tokens=self._num_prompt + last.num_completion,
            prompt_tokens_details=PromptTokensDetails(last.num_cached),
            completion_tokens_details=CompletionTokensDetails(last.num_accepted, last.num_drafted - last.num_accepted),
            speculative=SpeculativeUsage(last.num_drafted, last.num_accepted),
        )

    def _encode(
        self,
        object_name: str,
        choices: tuple[ChatChoice | ChatChunkChoice | CompletionChoice, ...],
        usage: Usage | UnsetType | None,
    ) -> bytes:
        return self._encoder.encode(
            Answer(
                id=self.answer_id,
                object=object_name,
                created=self._created,
                model=self._model,
                choices=choices,
                usage=usage,
                system_fingerprint=self._system_fingerprint,
            )
        )
