"""Objects of the Responses API, as structs that encode to JSON.

Owns names and order of fields. `UNSET` fields are left out, `None` is null. Does not know how they are filled.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Raw, Struct, UnsetType

from deployments.text.logprobs import ChatTokenLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(Struct, frozen=True, tag_field="type", tag="output_text"):
    text: str
    annotations: tuple[()] = ()
    logprobs: tuple[ChatTokenLogprob, ...] = ()


class ReasoningText(Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    text: str


class OutputMessage(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    status: ItemStatus
    content: tuple[OutputText, ...]


class OutputReasoning(Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    summary: tuple[()] = ()
    content: tuple[ReasoningText, ...]
    status: ItemStatus


class OutputCall(Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


OutputItem = OutputMessage | OutputReasoning | OutputCall
Part = OutputText | ReasoningText


class InputDetails(Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(Struct, frozen=True):
    code: str
    message: str


class IncompleteDetails(Struct, frozen=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseObject(Struct, frozen=True, kw_only=True):
    """A response, whole or within an event of a stream."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: ResponseStatus
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: tuple[OutputItem, ...] = ()
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    reasoning: dict[str, Any]
    store: bool = False
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: tuple[dict[str, Any], ...]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None
    metadata: dict[str, Any] = {}


class DeletedResponse(Struct, frozen=True):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ItemList(Struct, frozen=True, kw_only=True):
    """A part of the input items of a response."""

    object: Literal["list"] = "list"
    data: tuple[Raw, ...]
    """Items as JSON."""
    first_id: str | None
    last_id: str | None
    has_more: bool


class Event(Struct, frozen=True, kw_only=True):
    """An event of a stream. Its type decides which fields are set."""

    type: str
    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: Part | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: tuple[ChatTokenLogprob, ...] | UnsetType = UNSET
