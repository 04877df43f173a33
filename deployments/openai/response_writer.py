"""From text deltas to the JSON of a response, whole or in chunks.

Owns how each endpoint writes a choice, and usage summed over the choices of a request. Does not know HTTP, framing or
where text deltas come from.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from deployments.openai.responses import (
    CalledFunction,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    CompletedCall,
    CompletionChoice,
    CompletionTokensDetails,
    FunctionDelta,
    GenerationResponse,
    PromptTokensDetails,
    SpeculativeUsage,
    StepTrace,
    TextDelta,
    ToolCallChunk,
    Usage,
)
from deployments.text.logprobs import NameOf, chat_logprobs, completion_logprobs
from deployments.text.tool_calls import ToolCallDelta

TEXT_PLACEHOLDER = secrets.token_hex(16)
"""Marks the place of the text in a template. It is random, so no client can send it."""


class ChoiceFormat(Protocol):
    """How one endpoint writes a choice."""

    id_prefix: str
    object: str
    chunk_object: str

    def choice(self, text_delta: TextDelta) -> Any:
        """A finished choice, from one text delta that holds all of it."""
        ...

    def chunk_choice(self, text_delta: TextDelta, *, is_first: bool) -> Any:
        """What a text delta adds to a choice."""
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

    def choice(self, text_delta: TextDelta) -> ChatChoice:
        calls = tuple(
            CompletedCall(call.id or "", CalledFunction(call.name or "", call.arguments)) for call in text_delta.calls
        )
        message = ChatMessage(
            text_delta.text or None if calls else text_delta.text,
            reasoning_content=text_delta.reasoning or UNSET,
            tool_calls=calls or UNSET,
        )
        return ChatChoice(message, text_delta.finish_reason or "stop", text_delta.index, self._logprobs(text_delta))

    def chunk_choice(self, text_delta: TextDelta, *, is_first: bool) -> ChatChunkChoice:
        is_empty = not (text_delta.calls or text_delta.reasoning)
        delta = ChatDelta(
            role="assistant" if is_first else UNSET,
            content=text_delta.text if text_delta.text or (is_first and is_empty) else UNSET,
            reasoning_content=text_delta.reasoning or UNSET,
            tool_calls=tuple(map(_call_chunk, text_delta.calls)) or UNSET,
        )
        return ChatChunkChoice(delta, text_delta.finish_reason, text_delta.index, self._logprobs(text_delta))

    def _logprobs(self, text_delta: TextDelta) -> Any:
        if not text_delta.records or self._name_of is None:
            return None
        return chat_logprobs(text_delta.records, self._name_of, self._num_top)


class CompletionFormat:
    """Choices of /v1/completions; arguments as of `ChatFormat`."""

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, name_of: NameOf | None = None, num_top: int = 0) -> None:
        self._name_of = name_of
        self._num_top = num_top

    def choice(self, text_delta: TextDelta) -> CompletionChoice:
        return self.chunk_choice(text_delta, is_first=True)

    def chunk_choice(self, text_delta: TextDelta, *, is_first: bool) -> CompletionChoice:
        del is_first  # Only a chat choice begins with a role.
        logprobs = None
        if text_delta.records and self._name_of is not None:
            logprobs = completion_logprobs(text_delta.records, self._name_of, self._num_top)
        return CompletionChoice(text_delta.text, text_delta.finish_reason, text_delta.index, logprobs)


def _call_chunk(call: ToolCallDelta) -> ToolCallChunk:
    return ToolCallChunk(
        call.number,
        FunctionDelta(UNSET if call.name is None else call.name, call.arguments),
        id=UNSET if call.id is None else call.id,
        type=UNSET if call.id is None else "function",
    )


def join_deltas(text_deltas: Sequence[TextDelta]) -> TextDelta:
    """All text deltas of one finished choice as one. Each of its tool calls is one delta."""
    last = text_deltas[-1]
    calls: dict[int, ToolCallDelta] = {}
    for call in (call for text_delta in text_deltas for call in text_delta.calls):
        first = calls.get(call.number)
        if first is not None:
            call = ToolCallDelta(call.number, first.arguments + call.arguments, first.id, first.name)
        calls[call.number] = call
    return TextDelta(
        text="".join(text_delta.text for text_delta in text_deltas),
        finish_reason=last.finish_reason,
        num_completion=last.num_completion,
        num_cached=last.num_cached,
        num_drafted=last.num_drafted,
        num_accepted=last.num_accepted,
        index=last.index,
        reasoning="".join(text_delta.reasoning for text_delta in text_deltas),
        num_reasoning=last.num_reasoning,
        records=tuple(record for text_delta in text_deltas for record in text_delta.records),
        calls=tuple(calls.values()),
    )


class ResponseWriter:
    """JSON of the response to one request, whole or in chunks.

    Args:
        choice_format: which endpoint's choices.
        request_id: the engine's id; the response's id derives from it.
        created: unix seconds.
        num_prompt: tokens of all prompts, for usage.
        num_choices: choices of the request.
        choices_per_prompt: choices of each prompt; those of one prompt follow one another.
        has_continuous_usage: each chunk holds the usage so far.
    """

    def __init__(
        self,
        choice_format: ChoiceFormat,
        *,
        request_id: str,
        created: int,
        model: str,
        system_fingerprint: str | None,
        num_prompt: int,
        num_choices: int = 1,
        choices_per_prompt: int = 1,
        has_continuous_usage: bool = False,
    ) -> None:
        self.response_id = choice_format.id_prefix + request_id
        self.num_choices = num_choices
        self._choices_per_prompt = choices_per_prompt
        self._format = choice_format
        self._created = created
        self._model = model
        self._system_fingerprint = system_fingerprint
        self._num_prompt = num_prompt
        self._has_continuous_usage = has_continuous_usage
        self._latest: dict[int, TextDelta] = {}
        self._encoder = msgspec.json.Encoder()
        self._templates: dict[tuple[int, bool], list[bytes]] = {}

    def response(self, text_deltas: Sequence[TextDelta]) -> bytes:
        """The whole response.

        Args:
            text_deltas: each choice as one text delta (`join_deltas`), in order.
        """
        choices = tuple(map(self._format.choice, text_deltas))
        return self._encode(
            self._format.object, choices, usage_of(text_deltas, self._num_prompt, self._choices_per_prompt)
        )

    def chunk(self, text_delta: TextDelta, *, is_first: bool, includes_usage: bool) -> bytes:
        """One chunk. Its `usage` is null if the client requested usage in a chunk at the end."""
        if text_delta.is_plain and not is_first and not self._has_continuous_usage:
            before, after = self._template(text_delta.index, includes_usage=includes_usage)
            return b"".join((before, self._encoder.encode(text_delta.text), after))
        return self._full_chunk(text_delta, is_first=is_first, includes_usage=includes_usage)

    def _template(self, index: int, *, includes_usage: bool) -> list[bytes]:
        """The bytes before and after the text in a chunk that holds only text. They are the same in all such chunks."""
        template = self._templates.get((index, includes_usage))
        if template is None:
            marked = TextDelta(TEXT_PLACEHOLDER, None, 0, 0, 0, 0, index=index)
            chunk = self._full_chunk(marked, is_first=False, includes_usage=includes_usage)
            template = self._templates[index, includes_usage] = chunk.split(self._encoder.encode(TEXT_PLACEHOLDER))
        return template

    def _full_chunk(self, text_delta: TextDelta, *, is_first: bool, includes_usage: bool) -> bytes:
        choice = self._format.chunk_choice(text_delta, is_first=is_first)
        usage: Usage | UnsetType | None = None if includes_usage else UNSET
        if self._has_continuous_usage:
            self._latest[text_delta.index] = text_delta
            usage = usage_of(list(self._latest.values()), self._num_prompt, self._choices_per_prompt)
        return self._encode(self._format.chunk_object, (choice,), usage, text_delta.trace or UNSET)

    def usage_chunk(self, lasts: Sequence[TextDelta]) -> bytes:
        """The chunk after all others.

        Args:
            lasts: the last text delta of each choice.
        """
        return self._encode(self._format.chunk_object, (), usage_of(lasts, self._num_prompt, self._choices_per_prompt))

    def _encode(
        self,
        object_name: str,
        choices: tuple[Any, ...],
        usage: Usage | UnsetType | None,
        trace: StepTrace | UnsetType = UNSET,
    ) -> bytes:
        return self._encoder.encode(
            GenerationResponse(
                id=self.response_id,
                object=object_name,
                created=self._created,
                model=self._model,
                choices=choices,
                usage=usage,
                system_fingerprint=self._system_fingerprint,
                paceline=trace,
            )
        )


def usage_of(lasts: Sequence[TextDelta], num_prompt: int, choices_per_prompt: int = 1) -> Usage:
    """Usage summed over choices. Cached tokens of a prompt are counted once, from its first choice.

    Args:
        lasts: the last text delta of each choice.
        num_prompt: tokens of all prompts.
    """
    num_completion = sum(last.num_completion for last in lasts)
    num_drafted = sum(last.num_drafted for last in lasts)
    num_accepted = sum(last.num_accepted for last in lasts)
    num_cached = sum(last.num_cached for last in lasts if last.index % choices_per_prompt == 0)
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_completion,
        total_tokens=num_prompt + num_completion,
        prompt_tokens_details=PromptTokensDetails(num_cached),
        completion_tokens_details=CompletionTokensDetails(
            num_accepted, num_drafted - num_accepted, sum(last.num_reasoning for last in lasts)
        ),
        speculative=SpeculativeUsage(num_drafted, num_accepted),
    )
