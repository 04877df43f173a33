"""One HTTP exchange: its id, its body, and whether the client is still there.

Owns `x-request-id`, the limit on bodies, and the watch for a client that leaves before its answer has begun. Does not
know what a body says or who answers it.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.errors import BodyTooLarge, BodyTooSlow, UnsupportedMediaType, to_http

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_REQUEST_ID_LEN = 128
BODY_TIMEOUT_S = 60.0
"""A client that sends more slowly holds a connection for nothing."""


class ClientGone(Exception):
    """The client closed its connection before it had its answer. Nobody is left to read a response."""


class RequestContext:
    """ASGI middleware: gives each exchange an id, in `request.state.request_id` and in the response's headers.

    It also turns an exception that nothing else handles into a plain 500, logged here with the id. Once a response has
    started, what lies between here and the route only hands its parts on: `request.state.send_body` takes them at once.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = choose_request_id(Headers(scope=scope).get("x-request-id"))
        scope.setdefault("state", {}).update({"request_id": request_id, "send_body": send})
        is_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal is_started
            if message["type"] == "http.response.start":
                is_started = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            logger.exception("request %s failed", request_id)
            if is_started:
                raise
            await to_http(error).response()(scope, receive, send_with_id)


def choose_request_id(given: str | None) -> str:
    """The client's own id where it is 1 to 128 printable ASCII characters, otherwise a new one."""
    if given and len(given) <= MAX_REQUEST_ID_LEN and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex


async def read_body(request: Request, *, max_bytes: int, timeout_s: float = BODY_TIMEOUT_S) -> bytes:
    """The whole body.

    Raises:
        UnsupportedMediaType: it is declared to be something other than JSON.
        BodyTooLarge: it is declared or found to be over `max_bytes`.
        BodyTooSlow: it was not complete within `timeout_s`.
        starlette.requests.ClientDisconnect: the client left before its end.
    """
    media_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise UnsupportedMediaType(f"content-type is {media_type!r}; send application/json")
    too_large = BodyTooLarge(f"The body is larger than the {max_bytes} bytes that are allowed")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise too_large
    chunks, size = [], 0
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                size += len(chunk)
                if size > max_bytes:
                    raise too_large
                chunks.append(chunk)
    except TimeoutError:
        raise BodyTooSlow(f"The body was not complete within {timeout_s:g} s") from None
    return b"".join(chunks)


async def until_disconnect(receive: Receive) -> None:
    """Return when the client has gone; only after the body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Coroutine[object, object, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves first, or when the caller is cancelled.

    Raises:
        ClientGone: it left.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(until_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        await cancel(working, watching)


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel what still runs and wait until all have ended; their results and errors are dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
