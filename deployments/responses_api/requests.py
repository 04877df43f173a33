"""The body of /v1/responses, and the chat body that generates the same.

Owns its fields, which of them go together, and how names of chat fields in errors become names of this body. Does not
know output or where stored responses are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PlainValidator, ValidationError, WithJsonSchema, model_validator

from deployments.errors import from_validation
from deployments.openai.fields import (
    Absent,
    Body,
    Label,
    MaxTokens,
    Only,
    Seed,
    Temperature,
    TopP,
    field_error,
    value_error,
)
from deployments.openai.generation_body import ModelBody, RequestPriority, SpeculativeBody
from deployments.openai.messages import FunctionName
from deployments.openai.requests import MAX_TOP_LOGPROBS, ChatBody, Metadata, ReasoningEffort
from deployments.responses_api.items import AnyItem, Item, ItemId, MessageItem, to_turns
from engine.errors import InvalidRequest

LOGPROBS = "message.output_text.logprobs"
_CHAT_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Fields of a chat body whose name here is another one."""


class FunctionTool(Body):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FormatBody(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")] | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    description: str | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _schema_fits_the_type(self) -> Self:
        for field, value in (("name", self.name), ("schema", self.schema_)):
            if (value is not None) != (self.type == "json_schema"):
                needed = "is required with" if self.type == "json_schema" else "is only allowed with"
                raise field_error(field, f"{needed} type 'json_schema'")
        return self


class TextBody(Body):
    format: FormatBody | None = None
    verbosity: Annotated[Any, Only("medium")] = None


class ReasoningBody(Body):
    effort: ReasoningEffort | None = None
    summary: Annotated[Any, Only("auto")] = None
    generate_summary: Annotated[Any, Only("auto")] = None


class StreamBody(Body):
    include_obfuscation: Annotated[Any, Only(False)] = None


def _refuse_conversation(value: Any) -> None:
    if value is not None:
        raise value_error("is not supported: this server stores no conversations; send the whole conversation as input")


def _parse_choice(value: Any) -> Any:
    """A tool choice as chat bodies hold it."""
    if value is None or value in ("none", "auto", "required"):
        return value
    is_function = isinstance(value, dict) and value.get("type") == "function" and set(value) == {"type", "name"}
    if is_function and isinstance(value["name"], str):
        return {"type": "function", "function": {"name": value["name"]}}
    raise value_error('must be \'none\', \'auto\', \'required\' or an object like {"type": "function", "name": "..."}')


_CHOICE_SCHEMA = {
    "anyOf": [
        {"enum": ["none", "auto", "required", None]},
        {
            "type": "object",
            "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
            "required": ["type", "name"],
            "additionalProperties": False,
        },
    ]
}


class ResponsesBody(ModelBody):
    """/v1/responses."""

    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: MaxTokens | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningBody | None = None
    stream: bool | None = None
    stream_options: StreamBody | None = None
    temperature: Temperature | None = None
    text: TextBody | None = None
    tool_choice: Annotated[Any, PlainValidator(_parse_choice), WithJsonSchema(_CHOICE_SCHEMA)] = None
    tools: Annotated[list[FunctionTool], Field(max_length=128)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    top_p: TopP | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    """Additional output. Thoughts are never encrypted, so that value changes nothing."""

    background: Annotated[Any, Only(False)] = None
    access_programs: Absent = None
    background_options: Absent = None
    context_management: Absent = None
    image: Absent = None
    conversation: Annotated[Any, PlainValidator(_refuse_conversation), WithJsonSchema({"type": "null"})] = None
    max_tool_calls: Absent = None
    moderation: Absent = None
    previous_response_id: ItemId | None = None
    prompt: Absent = None
    truncation: Annotated[Any, Only("disabled")] = None

    store: bool | None = None
    """Whether the response may be fetched and continued later, if the server stores responses; default true."""

    # Labels of OpenAI's. They change nothing in the response.
    metadata: Metadata | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_options: Metadata | None = None
    prompt_cache_retention: Label | None = None
    safety_identifier: Label | None = None
    service_tier: Label | None = None
    user: Label | None = None

    # Beyond OpenAI's, as in /v1/chat/completions.
    enable_thinking: bool | None = None
    priority: RequestPriority | None = None
    seed: Seed | None = None
    speculative: SpeculativeBody | None = None
    timeout: Annotated[float, Field(ge=0.001, le=86_400)] | None = None

    @property
    def items(self) -> list[AnyItem]:
        """The input as items."""
        if isinstance(self.input, str):
            return [MessageItem(role="user", content=self.input)]
        return list(self.input)

    def to_chat(self, history: Sequence[AnyItem] = ()) -> ChatBody:
        """The chat body that generates the same.

        Args:
            history: items before the input.

        Raises:
            InvalidRequest: naming the field of this body.
        """
        chat = {name: value for name, value in self._chat_fields(history).items() if value is not None}
        try:
            return ChatBody.model_validate(chat)
        except ValidationError as error:
            raise in_this_body(from_validation(error.errors(include_url=False))) from None

    def _chat_fields(self, history: Sequence[AnyItem]) -> dict[str, Any]:
        turns = to_turns([*history, *self.items])
        if self.instructions is not None:
            turns.insert(0, {"role": "system", "content": self.instructions})
        has_logprobs = bool(self.include and LOGPROBS in self.include) or bool(self.top_logprobs)
        return {
            "model": self.model,
            "messages": turns,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "logprobs": has_logprobs or None,
            "top_logprobs": self.top_logprobs if has_logprobs else None,
            "response_format": self._response_format(),
            "tools": [_chat_tool(tool) for tool in self.tools] if self.tools else None,
            "tool_choice": self.tool_choice if self.tools or self.tool_choice not in ("auto", "none") else None,
            "parallel_tool_calls": self.parallel_tool_calls if self.tools else None,
            "reasoning_effort": self.reasoning.effort if self.reasoning is not None else None,
            "stream": self.stream,
            "seed": self.seed,
            "priority": self.priority,
            "timeout": self.timeout,
            "enable_thinking": self.enable_thinking,
            "speculative": None if self.speculative is None else self.speculative.model_dump(),
        }

    def _response_format(self) -> dict[str, Any] | None:
        given = self.text.format if self.text is not None else None
        if given is None or given.type != "json_schema":
            return None if given is None else {"type": given.type}
        return {"type": "json_schema", "json_schema": {"name": given.name, "schema": given.schema_}}


def _chat_tool(tool: FunctionTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def in_this_body(error: InvalidRequest) -> InvalidRequest:
    """An error of a chat body with the names of this body's fields."""
    for name, here in _CHAT_NAMES.items():
        if error.field is not None and error.field.startswith(name):
            return type(error)(str(error).replace(name, here), field=error.field.replace(name, here, 1))
    return error
