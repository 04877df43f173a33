"""The routes of the Responses API: a whole response or a stream of typed events, and the stored responses.

Owns the order of events, errors in mid-stream, that the engine's generator is closed the moment the client leaves, and
when a response is stored. Does not know fields or what an event says (`responses_api`).
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from deployments.errors import PreviousResponseNotFound, ResponseNotFound
from deployments.http.admission import ANONYMOUS
from deployments.http.connection import read_body, while_connected
from deployments.http.dependencies import ApiDependencies
from deployments.http.generate import json_response, parse_body, start
from deployments.http.sse import EventStreamResponse
from deployments.openai.requests import ChatBody
from deployments.openai.responses import TextDelta
from deployments.responses_api.items import AnyItem, parse_items, shown_item
from deployments.responses_api.objects import DeletedResponse, ItemList, OutputMessage
from deployments.responses_api.requests import ResponsesBody, in_this_body
from deployments.responses_api.store import ResponseStore, StoredResponse
from deployments.responses_api.writer import ResponsesWriter
from engine.errors import InvalidRequest, PacelineError

logger = logging.getLogger(__name__)
NO_STORE = "this server stores no responses"


async def respond(request: Request, dependencies: ApiDependencies) -> Response:
    """The response to a POST of /v1/responses.

    Raises:
        PacelineError: what goes wrong before the first token; later errors are events of the stream.
        ClientGone: the client has left.
    """
    raw = await read_body(request, max_bytes=dependencies.limits.max_body_bytes)
    client = client_name(request)
    bodies: list[ResponsesBody] = []
    before: list[bytes] = []  # items of the responses that this one continues

    def parse(raw: bytes) -> ChatBody:
        body = parse_body(raw, ResponsesBody, dependencies)
        bodies.append(body)
        before.extend(_items_before(body, client, dependencies.responses))
        return body.to_chat(parse_items(before))

    held = ExitStack()
    try:
        started = await start(request, raw, parse, held, dependencies)
        store = dependencies.responses if bodies[0].store is not False else None
        writer = ResponsesWriter(
            bodies[0],
            suffix=uuid.uuid4().hex,
            created=int(time.time()),
            model=bodies[0].model,
            num_prompt=len(started.submits[0].prompt),
            name_of=dependencies.codec.name_of,
            is_stored=store is not None,
        )

        def at_end() -> None:
            if store is not None:
                store.put(client, _stored(writer, before, bodies[0].items))

        if not bodies[0].stream:
            text_deltas = await while_connected(request.receive, _collect(started.text_deltas))
            response = writer.whole(text_deltas)
            at_end()
            return json_response(response)
        # The first step decides the status line: what goes wrong before it is an ordinary error response.
        first = await while_connected(request.receive, _take(started.text_deltas))
    except InvalidRequest as error:
        held.close()
        raise in_this_body(error) from None
    except BaseException:
        held.close()
        raise
    return EventStreamResponse(_events(first, started.text_deltas, writer, at_end))


def client_name(request: Request) -> str:
    """The client whose responses a request may see."""
    name: str = getattr(request.state, "client", ANONYMOUS).name
    return name


def _items_before(body: ResponsesBody, client: str, store: ResponseStore | None) -> tuple[bytes, ...]:
    """Items of the response that a request continues, as JSON.

    Raises:
        InvalidRequest: it continues a response, but none are stored.
        PreviousResponseNotFound: that response is not stored.
    """
    if body.previous_response_id is None:
        return ()
    field = "previous_response_id"
    if store is None:
        raise InvalidRequest(f"{field} is not supported: {NO_STORE}; send the whole conversation as input", field=field)
    try:
        return store.get(client, body.previous_response_id).conversation
    except ResponseNotFound as error:
        raise PreviousResponseNotFound(f"{field}: {error}", field=field) from None


def _stored(writer: ResponsesWriter, before: list[bytes], items: list[AnyItem]) -> StoredResponse:
    """What is kept of a complete response. Log-probabilities are no part of the conversation."""
    output = []
    for item in writer.final.output if writer.final is not None else ():
        if isinstance(item, OutputMessage):
            parts = tuple(msgspec.structs.replace(part, logprobs=()) for part in item.content)
            item = msgspec.structs.replace(item, content=parts)
        output.append(msgspec.json.encode(item))
    suffix = writer.response_id.removeprefix("resp_")
    own = [msgspec.json.encode(shown_item(item, f"{suffix}_in{index}")) for index, item in enumerate(items)]
    return StoredResponse(
        response_id=writer.response_id,
        response=msgspec.json.encode(writer.final),
        input_items=(*before, *own),
        output_items=tuple(output),
    )


def read_response(client: str, response_id: str, store: ResponseStore | None) -> Response:
    """The response to a GET of a stored response. Raises ResponseNotFound."""
    return json_response(_required(store).get(client, response_id).response)


def delete_response(client: str, response_id: str, store: ResponseStore | None) -> Response:
    """The response to a DELETE of a stored response. Raises ResponseNotFound."""
    _required(store).delete(client, response_id)
    return json_response(msgspec.json.encode(DeletedResponse(response_id)))


def list_input_items(
    client: str,
    response_id: str,
    store: ResponseStore | None,
    *,
    limit: int,
    order: Literal["asc", "desc"],
    after: str | None,
) -> Response:
    """The response to a GET of the input items of a stored response.

    Args:
        limit: most items.
        order: from the first item on (`asc`) or from the last one.
        after: id of the item before the first one listed.

    Raises:
        ResponseNotFound: no such response.
        InvalidRequest: `after` is no item of it.
    """
    items = _required(store).get(client, response_id).input_items
    if order == "desc":
        items = items[::-1]
    ids: list[str] = [msgspec.json.decode(item)["id"] for item in items]
    if after is not None and after not in ids:
        raise InvalidRequest(f"after: {after[:100]!r} is no input item of this response", field="after")
    begin = ids.index(after) + 1 if after is not None else 0
    shown = ids[begin : begin + limit]
    return json_response(
        msgspec.json.encode(
            ItemList(
                data=tuple(msgspec.Raw(item) for item in items[begin : begin + limit]),
                first_id=shown[0] if shown else None,
                last_id=shown[-1] if shown else None,
                has_more=begin + limit < len(items),
            )
        )
    )


def _required(store: ResponseStore | None) -> ResponseStore:
    if store is None:
        raise ResponseNotFound(f"{NO_STORE[:1].upper()}{NO_STORE[1:]}; see the setting stored_responses")
    return store


async def _take(text_deltas: AsyncGenerator[TextDelta, None]) -> TextDelta:
    return await anext(text_deltas)


async def _collect(text_deltas: AsyncGenerator[TextDelta, None]) -> list[TextDelta]:
    try:
        return [text_delta async for text_delta in text_deltas]
    finally:
        await text_deltas.aclose()


async def _events(
    first: TextDelta,
    text_deltas: AsyncGenerator[TextDelta, None],
    writer: ResponsesWriter,
    at_end: Callable[[], None],
) -> AsyncGenerator[bytes, None]:
    """Bytes to send, one item per text delta that shows something. An error is the last event.

    Args:
        at_end: called before the last event of a complete response.
    """
    text_delta, events = first, writer.begin()
    try:
        while True:
            events += writer.push(text_delta)
            if text_delta.finish_reason is not None:
                break
            if events:
                yield events
            text_delta, events = await anext(text_deltas), b""
        events += writer.end(text_delta)
        at_end()
        yield events
    except PacelineError as error:
        yield writer.fail(error)
    except Exception as error:
        logger.exception("stream %s failed", writer.response_id)
        yield writer.fail(error)
    finally:
        await text_deltas.aclose()
