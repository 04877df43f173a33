"""From text deltas to the output items, the events and the object of one response.

Owns which item is open, the order of events, and what of the request the response repeats. Does not know HTTP or where
text deltas come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from deployments.errors import to_http
from deployments.openai.responses import TextDelta
from deployments.responses_api.objects import (
    Event,
    IncompleteDetails,
    InputDetails,
    ItemStatus,
    OutputCall,
    OutputDetails,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    Part,
    ReasoningText,
    ResponseError,
    ResponseObject,
    ResponseStatus,
    ResponseUsage,
)
from deployments.responses_api.requests import ResponsesBody
from deployments.text.logprobs import ChatTokenLogprob, NameOf, chat_logprobs
from deployments.text.tool_calls import ToolCallDelta


class ResponsesWriter:
    """The response to one request, whole or as events.

    Args:
        body: the request.
        suffix: of the ids of the response and of its items; unique.
        created: unix seconds.
        num_prompt: tokens of the prompt.
        name_of: how a token is spelt; for log-probabilities.
        is_stored: whether the response will be stored.
    """

    def __init__(
        self,
        body: ResponsesBody,
        *,
        suffix: str,
        created: int,
        model: str,
        num_prompt: int,
        name_of: NameOf,
        is_stored: bool = False,
    ) -> None:
        self.response_id = f"resp_{suffix}"
        self.final: ResponseObject | None = None
        """The complete response; None before its end."""
        self._body = body
        self._suffix = suffix
        self._is_stored = is_stored
        self._created = created
        self._model = model
        self._num_prompt = num_prompt
        self._name_of = name_of
        self._num_events = 0
        self._items: list[OutputItem] = []
        """Finished items."""
        self._open: OutputItem | None = None
        self._texts: list[str] = []
        """Text or arguments of the open item."""
        self._logprobs: list[ChatTokenLogprob] = []
        """Log-probabilities of the open message that were reported."""
        self._waiting: list[ChatTokenLogprob] = []
        """Log-probabilities of tokens that have shown no text yet."""

    def whole(self, text_deltas: Sequence[TextDelta]) -> bytes:
        """The whole response.

        Args:
            text_deltas: all of them, in order.
        """
        for text_delta in text_deltas:
            self.push(text_delta)
        self._close(_status(text_deltas[-1]))
        self.final = self._response(_status(text_deltas[-1]), text_deltas[-1])
        return msgspec.json.encode(self.final)

    def begin(self) -> bytes:
        """The events before the first item."""
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def push(self, text_delta: TextDelta) -> bytes:
        """The events of a text delta."""
        events = b""
        if text_delta.reasoning:
            events += self._show_reasoning(text_delta.reasoning)
            self._waiting = []
        if text_delta.records and not text_delta.reasoning:
            self._waiting += chat_logprobs(text_delta.records, self._name_of, self._body.top_logprobs or 0).content
        if text_delta.text:
            events += self._show_text(text_delta.text)
        for call in text_delta.calls:
            events += self._show_call(call)
        return events

    def end(self, last: TextDelta) -> bytes:
        """The events after the last text delta."""
        status = _status(last)
        events = self._close(status)
        self.final = self._response(status, last)
        return events + self._event(f"response.{status}", response=self.final)

    def fail(self, error: Exception) -> bytes:
        """The event of an error that ends the stream."""
        details = msgspec.json.decode(to_http(error).body)["error"]
        failure = ResponseError("server_error", details["message"])
        return self._event("response.failed", response=self._response("failed", error=failure))

    def _show_reasoning(self, text: str) -> bytes:
        events = b""
        if not isinstance(self._open, OutputReasoning):
            events = self._begin_item(OutputReasoning(id=self._item_id("rs"), content=(), status="in_progress"))
            events += self._part("response.content_part.added", ReasoningText(""))
        self._texts.append(text)
        return events + self._of_item("response.reasoning_text.delta", content_index=0, delta=text)

    def _show_text(self, text: str) -> bytes:
        events = b""
        logprobs, self._waiting = tuple(self._waiting), []
        if not isinstance(self._open, OutputMessage):
            events = self._begin_item(OutputMessage(id=self._item_id("msg"), status="in_progress", content=()))
            events += self._part("response.content_part.added", OutputText(""))
        self._texts.append(text)
        self._logprobs += logprobs
        return events + self._of_item("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _show_call(self, call: ToolCallDelta) -> bytes:
        events = b""
        if call.id is not None:
            events = self._begin_item(
                OutputCall(
                    id=self._item_id("fc"),
                    call_id=call.id,
                    name=call.name or "",
                    arguments="",
                    status="in_progress",
                )
            )
        if not call.arguments:
            return events
        self._texts.append(call.arguments)
        return events + self._of_item("response.function_call_arguments.delta", delta=call.arguments)

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self._suffix}_{len(self._items) + (self._open is not None)}"

    def _begin_item(self, item: OutputItem) -> bytes:
        """Close the open item and open another one."""
        events = self._close("completed")
        self._open = item
        return events + self._event("response.output_item.added", output_index=len(self._items), item=item)

    def _close(self, status: ResponseStatus) -> bytes:
        """Finish the open item, if there is one."""
        item, text, logprobs = self._open, "".join(self._texts), (*self._logprobs, *self._waiting)
        if item is None:
            return b""
        ended: ItemStatus = "completed" if status == "completed" else "incomplete"
        if isinstance(item, OutputCall):
            events = self._of_item("response.function_call_arguments.done", name=item.name, arguments=text)
            item = msgspec.structs.replace(item, arguments=text, status=ended)
        elif isinstance(item, OutputMessage):
            part = OutputText(text, logprobs=logprobs)
            events = self._of_item("response.output_text.done", content_index=0, text=text, logprobs=logprobs)
            events += self._part("response.content_part.done", part)
            item = msgspec.structs.replace(item, content=(part,), status=ended)
        else:
            events = self._of_item("response.reasoning_text.done", content_index=0, text=text)
            events += self._part("response.content_part.done", ReasoningText(text))
            item = msgspec.structs.replace(item, content=(ReasoningText(text),), status=ended)
        events += self._event("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        self._open, self._texts, self._logprobs, self._waiting = None, [], [], []
        return events

    def _part(self, kind: str, part: Part) -> bytes:
        return self._of_item(kind, content_index=0, part=part)

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        """An event of the open item."""
        item_id = self._open.id if self._open is not None else ""
        return self._event(kind, item_id=item_id, output_index=len(self._items), **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        """One framed event. JSON holds no raw line breaks, so one `data:` line carries it."""
        data = msgspec.json.encode(Event(type=kind, sequence_number=self._num_events, **fields))
        self._num_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    def _response(
        self, status: ResponseStatus, last: TextDelta | None = None, error: ResponseError | None = None
    ) -> ResponseObject:
        body = self._body
        return ResponseObject(
            id=self.response_id,
            created_at=self._created,
            status=status,
            error=error,
            incomplete_details=IncompleteDetails() if status == "incomplete" else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            model=self._model,
            output=tuple(self._items),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            store=self._is_stored,
            reasoning={"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
            temperature=1.0 if body.temperature is None else body.temperature,
            text={"format": _format(body)},
            tool_choice=_tool_choice(body),
            tools=tuple(_tool(tool.model_dump(exclude_unset=True)) for tool in body.tools or ()),
            top_p=1.0 if body.top_p is None else body.top_p,
            usage=None if last is None else self._usage(last),
            user=body.user,
            metadata=dict(body.metadata or {}),
        )

    def _usage(self, last: TextDelta) -> ResponseUsage:
        return ResponseUsage(
            input_tokens=self._num_prompt,
            input_tokens_details=InputDetails(last.num_cached),
            output_tokens=last.num_completion,
            output_tokens_details=OutputDetails(last.num_reasoning),
            total_tokens=self._num_prompt + last.num_completion,
        )


def _status(last: TextDelta) -> ResponseStatus:
    return "incomplete" if last.finish_reason == "length" else "completed"


def _format(body: ResponsesBody) -> dict[str, Any]:
    given = body.text.format if body.text is not None else None
    return {"type": "text"} if given is None else given.model_dump(by_alias=True, exclude_unset=True)


def _tool(given: dict[str, Any]) -> dict[str, Any]:
    return {"strict": None, "parameters": None} | given


def _tool_choice(body: ResponsesBody) -> Any:
    """The tool choice in this interface's shape."""
    if isinstance(body.tool_choice, dict):
        return {"type": "function", "name": body.tool_choice["function"]["name"]}
    return body.tool_choice or "auto"
