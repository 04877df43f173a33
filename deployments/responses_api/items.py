"""Input items of the Responses API: what each may hold, and the turns of a conversation that they are.

Owns the items' fields and how they join into turns. Does not know options or output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, PlainValidator, Tag, TypeAdapter, WithJsonSchema

from deployments.openai.fields import Body
from deployments.openai.messages import FunctionName
from deployments.openai.text_parts import TextParts

_PARTS = TextParts(("input_text", "output_text", "text", "reasoning_text", "summary_text"), may_be_empty=True)
ItemText = Annotated[str, PlainValidator(_PARTS.parse), WithJsonSchema(_PARTS.schema())]
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


_ITEMS: TypeAdapter[list[AnyItem]] = TypeAdapter(list[Item])
_ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def parse_items(items: Sequence[bytes]) -> list[AnyItem]:
    """Items from their JSON, as `shown_item` and responses have it."""
    return _ITEMS.validate_json(b"[" + b",".join(items) + b"]")


def shown_item(item: AnyItem, suffix: str) -> dict[str, Any]:
    """An input item as the interface lists it. Several text parts are one.

    Args:
        suffix: of its id, if the client gave none.
    """
    shown: dict[str, Any] = {"id": item.id or f"{_ID_PREFIXES[item.type]}_{suffix}", "type": item.type}
    if isinstance(item, MessageItem):
        part: dict[str, Any] = {"type": "input_text", "text": item.content}
        if item.role == "assistant":
            part = {"type": "output_text", "text": item.content, "annotations": []}
        shown |= {"role": item.role, "content": [part]}
    elif isinstance(item, FunctionCallItem):
        shown |= {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
    elif isinstance(item, FunctionOutputItem):
        shown |= {"call_id": item.call_id, "output": item.output}
    else:
        summary = [{"type": "summary_text", "text": item.summary}] if item.summary else []
        content = [{"type": "reasoning_text", "text": item.content}] if item.content else []
        shown |= {"summary": summary, "content": content}
    return shown | {"status": item.status or "completed"}


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
