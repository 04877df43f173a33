"""Input items of the Responses API: what each may hold, and the turns of a conversation that they are.

Owns the items' fields and how they join into turns. Does not know options or output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, PlainValidator, Tag, WithJsonSchema

from deployments.openai.fields import Body, value_error
from deployments.openai.messages import FunctionName

_PART_FIELDS = {"type", "text", "annotations", "logprobs"}
_TEXT_TYPES = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def _parse_text(value: Any) -> str:
    """A text, or text parts joined by newlines."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise value_error("must be a string or a list of text parts")
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXT_TYPES:
            raise value_error(f"part {index} has type {str(kind)[:40]!r}; only text is supported (no images or files)")
        unknown = {name for name, field in part.items() if field is not None} - _PART_FIELDS
        if unknown or not isinstance(part.get("text"), str):
            raise value_error(f"part {index} must have the fields 'type' and 'text' only, and 'text' must be a string")
        texts.append(part["text"])
    return "\n".join(texts)


_PART_SCHEMA = {
    "type": "object",
    "properties": {"type": {"enum": list(_TEXT_TYPES)}, "text": {"type": "string"}, "annotations": {}, "logprobs": {}},
    "required": ["type", "text"],
    "additionalProperties": {"type": "null"},
}
ItemText = Annotated[
    str,
    PlainValidator(_parse_text),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART_SCHEMA}]}),
]
ItemId = Annotated[str, Field(max_length=256)]
CallId = Annotated[str, Field(min_length=1, max_length=256)]
Status = Literal["in_progress", "completed", "incomplete"]


class MessageItem(Body):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: ItemText
    id: ItemId | None = None
    status: Status | None = None
    phase: str | None = None


class FunctionCallItem(Body):
    type: Literal["function_call"]
    call_id: CallId
    name: FunctionName
    arguments: str
    id: ItemId | None = None
    status: Status | None = None


class FunctionOutputItem(Body):
    type: Literal["function_call_output"]
    call_id: CallId
    output: ItemText
    id: ItemId | None = None
    status: Status | None = None


class ReasoningItem(Body):
    type: Literal["reasoning"]
    summary: ItemText = ""
    content: ItemText = ""
    encrypted_content: Annotated[Any, WithJsonSchema({"type": "null"})] = None
    id: ItemId | None = None
    status: Status | None = None


AnyItem = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem


def _item_type(value: Any) -> str | None:
    """`type` of an item. A message may leave it out."""
    kind = value.get("type", "message") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) else None


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_item_type),
]


def to_turns(items: Sequence[AnyItem]) -> list[dict[str, Any]]:
    """The turns of a conversation as chat bodies hold them.

    Thoughts, text and calls of one response are several items, but one turn.
    """
    turns: list[dict[str, Any]] = []
    own: dict[str, Any] | None = None  # the assistant's turn that is being joined

    def assistant() -> dict[str, Any]:
        nonlocal own
        if own is None:
            own = {"role": "assistant", "content": None}
            turns.append(own)
        return own

    for item in items:
        if isinstance(item, ReasoningItem):
            own = None
            if item.content:
                assistant()["reasoning_content"] = item.content
        elif isinstance(item, FunctionCallItem):
            function = {"name": item.name, "arguments": item.arguments}
            assistant().setdefault("tool_calls", []).append({"id": item.call_id, "function": function})
        elif isinstance(item, FunctionOutputItem):
            own = None
            turns.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
        elif item.role == "assistant":
            if own is not None and (own["content"] is not None or "tool_calls" in own):
                own = None
            assistant()["content"] = item.content
        else:
            own = None
            turns.append({"role": item.role, "content": item.content})
    return [turn for turn in turns if turn["content"] is not None or "tool_calls" in turn]
