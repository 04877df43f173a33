"""From pieces to the JSON of an answer, whole or in chunks.

Owns how each endpoint writes a choice, and usage summed over the choices of a request. Does not know HTTP, framing or
where pieces come from.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from deployments.openai.logprobs import NameOf, chat_logprobs, completion_logprobs
from deployments.openai.responses import (
    Answer,
    CallDelta,
    CalledFunction,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    CompletedCall,
    CompletionChoice,
    CompletionTokensDetails,
    PromptTokensDetails,
    SpeculativeUsage,
    StepTrace,
    TextDelta,
    Usage,
)
from deployments.openai.tools import FoundCall

TEXT_MARK = secrets.token_hex(16)
"""Stands for the text in a template; nobody can make it part of anything else."""


class AnswerFormat(Protocol):
    """One endpoint's way of writing a choice."""

    id_prefix: str
    object: str
    chunk_object: str

    def choice(self, whole: TextDelta) -> Any:
        """A finished choice, from one piece that holds all of it."""
        ...

    def chunk_choice(self, piece: TextDelta, *, is_first: bool) -> Any:
        """What a piece adds to a choice."""
        ...


class ChatFormat:
    """Choices of /v1/chat/completions.

    Args:
        name_of: how a token is spelt; only needed for log-probabilities.
        num_top: alternatives to show with each token.
    """

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, name_of: NameOf | None = None, num_top: int = 0) -> None:
        self._name_of = name_of
        self._num_top = num_top

    def choice(self, whole: TextDelta) -> ChatChoice:
        calls = tuple(CompletedCall(call.id, _function(call)) for call in whole.calls)
        message = ChatMessage(whole.text or None if calls else whole.text, tool_calls=calls or UNSET)
        return ChatChoice(message, whole.finish_reason or "stop", whole.index, self._logprobs(whole))

    def chunk_choice(self, piece: TextDelta, *, is_first: bool) -> ChatChunkChoice:
        calls = tuple(CallDelta(call.number, call.id, _function(call)) for call in piece.calls)
        delta = ChatDelta(
            role="assistant" if is_first else UNSET,
            content=piece.text if piece.text or (is_first and not calls) else UNSET,
            tool_calls=calls or UNSET,
        )
        return ChatChunkChoice(delta, piece.finish_reason, piece.index, self._logprobs(piece))

    def _logprobs(self, piece: TextDelta) -> Any:
        if not piece.records or self._name_of is None:
            return None
        return chat_logprobs(piece.records, self._name_of, self._num_top)


class CompletionFormat:
    """Choices of /v1/completions; arguments as of `ChatFormat`."""

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, name_of: NameOf | None = None, num_top: int = 0) -> None:
        self._name_of = name_of
        self._num_top = num_top

    def choice(self, whole: TextDelta) -> CompletionChoice:
        return self.chunk_choice(whole, is_first=True)

    def chunk_choice(self, piece: TextDelta, *, is_first: bool) -> CompletionChoice:
        del is_first  # Only chat has a role to announce.
        logprobs = None
        if piece.records and self._name_of is not None:
            logprobs = completion_logprobs(piece.records, self._name_of, self._num_top)
        return CompletionChoice(piece.text, piece.finish_reason, piece.index, logprobs)


def _function(call: FoundCall) -> CalledFunction:
    return CalledFunction(call.name, call.arguments)


def join(pieces: Sequence[TextDelta]) -> TextDelta:
    """All pieces of one finished choice as one."""
    last = pieces[-1]
    return TextDelta(
        text="".join(piece.text for piece in pieces),
        finish_reason=last.finish_reason,
        num_completion=last.num_completion,
        num_cached=last.num_cached,
        num_drafted=last.num_drafted,
        num_accepted=last.num_accepted,
        index=last.index,
        records=tuple(record for piece in pieces for record in piece.records),
        calls=tuple(call for piece in pieces for call in piece.calls),
    )


class AnswerWriter:
    """JSON of the answer to one request, whole or in chunks.

    Args:
        answer_format: which endpoint's choices.
        request_id: the engine's; the answer's id derives from it.
        created: unix seconds.
        num_prompt: tokens of all prompts, for usage.
        num_choices: answers of the request.
        choices_per_prompt: of which so many belong to each prompt, in order.
    """

    def __init__(
        self,
        answer_format: AnswerFormat,
        *,
        request_id: str,
        created: int,
        model: str,
        system_fingerprint: str | None,
        num_prompt: int,
        num_choices: int = 1,
        choices_per_prompt: int = 1,
    ) -> None:
        self.answer_id = answer_format.id_prefix + request_id
        self.num_choices = num_choices
        self._choices_per_prompt = choices_per_prompt
        self._format = answer_format
        self._created = created
        self._model = model
        self._system_fingerprint = system_fingerprint
        self._num_prompt = num_prompt
        self._encoder = msgspec.json.Encoder()
        self._templates: dict[tuple[int, bool], list[bytes]] = {}

    def whole(self, wholes: Sequence[TextDelta]) -> bytes:
        """The response.

        Args:
            wholes: each choice as one piece (`join`), in order.
        """
        return self._encode(self._format.object, tuple(map(self._format.choice, wholes)), self._usage(wholes))

    def chunk(self, piece: TextDelta, *, is_first: bool, includes_usage: bool) -> bytes:
        """One chunk; `usage` is null where the client will get it in a chunk of its own."""
        if piece.is_plain and not is_first:
            before, after = self._template(piece.index, includes_usage=includes_usage)
            return b"".join((before, self._encoder.encode(piece.text), after))
        return self._whole_chunk(piece, is_first=is_first, includes_usage=includes_usage)

    def _template(self, index: int, *, includes_usage: bool) -> list[bytes]:
        """What stands before and after the text in a chunk that holds nothing else, and is the same in all of them."""
        template = self._templates.get((index, includes_usage))
        if template is None:
            marked = TextDelta(TEXT_MARK, None, 0, 0, 0, 0, index=index)
            chunk = self._whole_chunk(marked, is_first=False, includes_usage=includes_usage)
            template = self._templates[index, includes_usage] = chunk.split(self._encoder.encode(TEXT_MARK))
        return template

    def _whole_chunk(self, piece: TextDelta, *, is_first: bool, includes_usage: bool) -> bytes:
        choice = self._format.chunk_choice(piece, is_first=is_first)
        usage = None if includes_usage else UNSET
        return self._encode(self._format.chunk_object, (choice,), usage, piece.trace or UNSET)

    def usage_chunk(self, lasts: Sequence[TextDelta]) -> bytes:
        """The chunk after all others.

        Args:
            lasts: the last piece of each choice.
        """
        return self._encode(self._format.chunk_object, (), self._usage(lasts))

    def _usage(self, lasts: Sequence[TextDelta]) -> Usage:
        """Sums; of the choices that share a prompt only the first says what of it was cached."""
        num_completion = sum(last.num_completion for last in lasts)
        num_drafted = sum(last.num_drafted for last in lasts)
        num_accepted = sum(last.num_accepted for last in lasts)
        num_cached = sum(last.num_cached for last in lasts if last.index % self._choices_per_prompt == 0)
        return Usage(
            prompt_tokens=self._num_prompt,
            completion_tokens=num_completion,
            total_tokens=self._num_prompt + num_completion,
            prompt_tokens_details=PromptTokensDetails(num_cached),
            completion_tokens_details=CompletionTokensDetails(num_accepted, num_drafted - num_accepted),
            speculative=SpeculativeUsage(num_drafted, num_accepted),
        )

    def _encode(
        self,
        object_name: str,
        choices: tuple[Any, ...],
        usage: Usage | UnsetType | None,
        trace: StepTrace | UnsetType = UNSET,
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
                paceline=trace,
            )
        )
