"""Turns of a conversation and the tools a model may call, as clients send them.

Owns which fields go with which role, and what a tool definition looks like. Does not know templates or how calls are
written in a model's text (`deployments.text`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from deployments.openai.fields import Absent, Body, field_error, value_error
from deployments.openai.text_parts import TextParts

MAX_TOOLS = 128
FUNCTION_NAME = "^[a-zA-Z0-9_-]{1,64}$"

Role = Literal["system", "developer", "user", "assistant", "tool"]
FunctionName = Annotated[str, Field(pattern=FUNCTION_NAME)]
_PARTS = TextParts(("text",), is_optional=True)
Content = Annotated[str | None, PlainValidator(_PARTS.parse), WithJsonSchema(_PARTS.schema())]

Label = Annotated[Any, WithJsonSchema({})]
"""A field of other servers and gateways that changes nothing. Clients replay it with the history."""


class FunctionCall(Body):
    name: FunctionName
    arguments: str
    """A JSON object as text. An empty text is an empty object: some servers write calls without arguments so."""

    @model_validator(mode="after")
    def _arguments_are_an_object(self) -> Self:
        try:
            self.parsed_arguments()
        except (msgspec.MsgspecError, RecursionError):
            raise field_error("arguments", "must be the text of a JSON object") from None
        return self

    def parsed_arguments(self) -> dict[str, Any]:
        return msgspec.json.decode(self.arguments.strip() or "{}", type=dict[str, Any])


class ToolCall(Body):
    """A call of an earlier response."""

    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None
    """Index within a stream. Clients that collect chunks keep it; it changes nothing."""
    cache_control: Label = None


class Message(Body):
    """One turn. Clients replay earlier responses as they were, so their fields are accepted."""

    role: Role
    content: Content = None
    tool_calls: list[ToolCall] | None = None
    """Calls of an assistant."""
    tool_call_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Which call a tool's result belongs to."""
    name: Annotated[str, Field(max_length=256)] | None = None
    """Name of the participant or of the tool. The chat template decides whether the model sees it."""
    reasoning_content: str | None = None
    """Thoughts of an earlier response. The chat template decides whether the model sees them."""
    reasoning: str | None = None
    """Another name of `reasoning_content`."""
    refusal: Absent = None
    audio: Absent = None
    annotations: Label = None
    cache_control: Label = None
    provider_specific_fields: Label = None
    function_call: Absent = None

    @model_validator(mode="after")
    def _fields_fit_the_role(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise field_error("tool_calls", f"is only allowed with role 'assistant', not {self.role!r}")
        for field in ("reasoning_content", "reasoning"):
            if getattr(self, field) and self.role != "assistant":
                raise field_error(field, f"is only allowed with role 'assistant', not {self.role!r}")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            needed = "is required with role 'tool'" if self.role == "tool" else "is only allowed with role 'tool'"
            raise field_error("tool_call_id", needed)
        if self.content is None and not self.tool_calls:
            raise field_error("content", "must be a string or a list of text parts")
        return self

    @property
    def uses_tools(self) -> bool:
        return self.role == "tool" or bool(self.tool_calls)

    def for_template(self) -> dict[str, Any]:
        """The turn as chat templates expect it: arguments as an object, and `developer` under its older name."""
        turn: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content or "",
        }
        if self.tool_calls:
            turn["tool_calls"] = [
                {
                    "id": call.id,
                    "type": call.type,
                    "function": {"name": call.function.name, "arguments": call.function.parsed_arguments()},
                }
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            turn["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            turn["name"] = self.name
        thoughts = self.reasoning_content or self.reasoning
        if thoughts:
            turn["reasoning_content"] = thoughts
        return turn


class FunctionDefinition(Body):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON Schema of the arguments. Without it the function has no arguments."""
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition
    cache_control: Label = None

    def for_template(self) -> dict[str, Any]:
        definition = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": "function", "function": {"parameters": {"type": "object", "properties": {}}} | definition}


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model may call a tool, or must."""

    mode: Literal["none", "auto", "required", "named"]
    name: str | None = None


def _parse_tool_choice(value: Any) -> ToolChoice | None:
    if value is None:
        return None
    if value in ("none", "auto", "required"):
        return ToolChoice(value)
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if not isinstance(function, dict) or set(function) != {"name"} or set(value) != {"type", "function"}:
        raise value_error(
            "must be 'none', 'auto', 'required' or an object like "
            '{"type": "function", "function": {"name": "..."}}'
        )
    if not isinstance(function["name"], str):
        raise value_error("must name a function by a string")
    return ToolChoice("named", function["name"])


ToolChoiceField = Annotated[
    ToolChoice | None,
    PlainValidator(_parse_tool_choice),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["none", "auto", "required", None]},
                {
                    "type": "object",
                    "properties": {
                        "type": {"const": "function"},
                        "function": {
                            "type": "object",
                            "properties": {"name": {"type": "string"}},
                            "required": ["name"],
                            "additionalProperties": False,
                        },
                    },
                    "required": ["type", "function"],
                    "additionalProperties": False,
                },
            ]
        }
    ),
]


def check_tools(tools: Sequence[Tool], choice: ToolChoice | None) -> None:
    """Refuse two tools of one name, and a choice that names an unknown tool.

    Raises:
        PydanticCustomError: naming `tools` or `tool_choice`.
    """
    names = [tool.function.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise field_error("tools", f"define the function {twice!r} twice")
    if choice is None or choice.mode == "none":
        return
    if not tools:
        raise field_error("tool_choice", "is only allowed when 'tools' are given")
    if choice.mode == "named" and choice.name not in names:
        known = ", ".join(names[:8])
        raise field_error("tool_choice", f"names the function {str(choice.name)[:64]!r}, but tools have {known}")
