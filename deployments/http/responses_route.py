"""The route of the Responses API: from its body to a whole response or a stream of typed events.

Owns the order of events, errors in mid-stream, and that the engine's generator is closed the moment the client leaves.
Does not know fields or what an event says (`responses_api`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack

from starlette.requests import Request
from starlette.responses import Response

from deployments.http.connection import read_body, while_connected
from deployments.http.dependencies import ApiDependencies
from deployments.http.generate import json_response, parse_body, start
from deployments.http.sse import EventStreamResponse
from deployments.openai.requests import ChatBody
from deployments.openai.responses import TextDelta
from deployments.responses_api.requests import ResponsesBody, in_this_body
from deployments.responses_api.writer import ResponsesWriter
from engine.errors import InvalidRequest, PacelineError

logger = logging.getLogger(__name__)


async def respond(request: Request, dependencies: ApiDependencies) -> Response:
    """The response to a POST of /v1/responses.

    Raises:
        PacelineError: what goes wrong before the first token; later errors are events of the stream.
        ClientGone: the client has left.
    """
    raw = await read_body(request, max_bytes=dependencies.limits.max_body_bytes)
    bodies: list[ResponsesBody] = []

    def parse(raw: bytes) -> ChatBody:
        body = parse_body(raw, ResponsesBody, dependencies)
        bodies.append(body)
        return body.to_chat()

    held = ExitStack()
    try:
        started = await start(request, raw, parse, held, dependencies)
        writer = ResponsesWriter(
            bodies[0],
            request_id=started.submits[0].request_id,
            created=int(time.time()),
            model=dependencies.model_name,
            num_prompt=len(started.submits[0].prompt),
            name_of=dependencies.codec.name_of,
        )
        if not bodies[0].stream:
            text_deltas = await while_connected(request.receive, _collect(started.text_deltas))
            return json_response(writer.whole(text_deltas))
        # The first step decides the status line: what goes wrong before it is an ordinary error response.
        first = await while_connected(request.receive, _take(started.text_deltas))
    except InvalidRequest as error:
        held.close()
        raise in_this_body(error) from None
    except BaseException:
        held.close()
        raise
    return EventStreamResponse(_events(first, started.text_deltas, writer))


async def _take(text_deltas: AsyncGenerator[TextDelta, None]) -> TextDelta:
    return await anext(text_deltas)


async def _collect(text_deltas: AsyncGenerator[TextDelta, None]) -> list[TextDelta]:
    try:
        return [text_delta async for text_delta in text_deltas]
    finally:
        await text_deltas.aclose()


async def _events(
    first: TextDelta, text_deltas: AsyncGenerator[TextDelta, None], writer: ResponsesWriter
) -> AsyncGenerator[bytes, None]:
    """Bytes to send, one item per text delta that shows something. An error is the last event."""
    text_delta, events = first, writer.begin()
    try:
        while True:
            events += writer.push(text_delta)
            if text_delta.finish_reason is not None:
                break
            if events:
                yield events
            text_delta, events = await anext(text_deltas), b""
        yield events + writer.end(text_delta)
    except PacelineError as error:
        yield writer.fail(error)
    except Exception as error:
        logger.exception("stream %s failed", writer.response_id)
        yield writer.fail(error)
    finally:
        await text_deltas.aclose()
