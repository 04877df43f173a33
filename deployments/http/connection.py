"""One HTTP request: its id, its body, and whether its client is still connected.

Owns `x-request-id`, the limits on bodies, and the watch for a client that disconnects before its response has begun.
Does not know the content of a body or the routes.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.errors import BodyTooLarge, BodyTooSlow, UnsupportedMediaType, to_http

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_REQUEST_ID_LEN = 128
BODY_TIMEOUT_S = 60.0
"""Seconds in which a body must be complete."""


class ClientGone(Exception):
    """The client closed its connection before its response."""


class RequestContext:
    """ASGI middleware: gives each request an id, in `request.state.request_id` and in the response's headers.

    It also turns an unhandled exception into HTTP 500 and logs it with the id. `request.state.send_body` sends parts of
    a body directly, because the middleware between here and the route only forwards them.
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


class BehindProxy:
    """An application for Serve, whose proxy adds `x-request-id` to every response: removes the one of `RequestContext`.

    Serve also reads `routes`, for the route labels of its metrics.
    """

    def __init__(self, app: Starlette) -> None:
        self._app = app

    @property
    def routes(self) -> list[BaseRoute]:
        """The routes of the application."""
        return self._app.routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                del MutableHeaders(scope=message)["x-request-id"]
            await send(message)

        await self._app(scope, receive, send_without_id)


def choose_request_id(given: str | None) -> str:
    """The client's id if it has 1 to 128 printable ASCII characters, else a new id."""
    if given and len(given) <= MAX_REQUEST_ID_LEN and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex


async def read_body(request: Request, *, max_bytes: int, timeout_s: float = BODY_TIMEOUT_S) -> bytes:
    """The complete body of a request.

    Raises:
        UnsupportedMediaType: the content type is not JSON.
        BodyTooLarge: the body, or its declared length, exceeds `max_bytes`.
        BodyTooSlow: the body was not complete within `timeout_s` seconds.
        starlette.requests.ClientDisconnect: the client disconnected before the end of the body.
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
    """Return when the client has disconnected. Call it after the body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Coroutine[object, object, T]) -> T:
    """The result of `work`. Cancels it when the client disconnects first, or when the caller is cancelled.

    Raises:
        ClientGone: the client disconnected first.
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
    """Cancel tasks and wait until all have ended. Their results and exceptions are dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
