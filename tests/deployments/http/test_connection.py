"""One HTTP request: its id, its body, and the watch over its client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from api_harness import dependencies, make_engine
from ray.serve._private.http_util import RequestIdMiddleware
from ray.serve._private.thirdparty.get_asgi_route_name import extract_route_patterns
from starlette.requests import ClientDisconnect, Request

from deployments.errors import BodyTooLarge, BodyTooSlow, UnsupportedMediaType
from deployments.http.app import build_api
from deployments.http.connection import BehindProxy, ClientGone, cancel, choose_request_id, read_body, while_connected

Receive = Callable[[], Awaitable[dict[str, Any]]]


def receiving(*messages: dict[str, Any]) -> Receive:
    """The messages of a client, which then stays silent."""
    waiting = list(messages)

    async def receive() -> dict[str, Any]:
        if waiting:
            return waiting.pop(0)
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    return receive


def part(body: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def read(receive: Receive, *, max_bytes: int = 10, timeout_s: float = 5.0, **headers: str) -> bytes:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    request = Request({"type": "http", "method": "POST", "headers": pairs}, receive)
    return asyncio.run(read_body(request, max_bytes=max_bytes, timeout_s=timeout_s))


@pytest.mark.parametrize("given", ["a", "x" * 128, "req 7/"])
def test_a_printable_id_of_the_client_is_kept(given: str) -> None:
    assert choose_request_id(given) == given


@pytest.mark.parametrize("given", [None, "", "x" * 129, "a\nb", "é", "\x7f"])
def test_any_other_id_is_replaced(given: str | None) -> None:
    first, second = choose_request_id(given), choose_request_id(given)
    assert first != second
    assert given not in (first, second)
    assert len(first) == 32


def test_a_body_in_parts() -> None:
    assert read(receiving(part(b"12345", more=True), part(b"67890"))) == b"1234567890"


@pytest.mark.parametrize(
    ("messages", "headers"),
    [([part(b"123456", more=True), part(b"78901")], {}), ([], {"content_length": "11"})],
    ids=["found", "declared"],
)
def test_a_body_over_the_limit(messages: list[dict[str, Any]], headers: dict[str, str]) -> None:
    with pytest.raises(BodyTooLarge, match="10 bytes"):
        read(receiving(*messages), **headers)


def test_a_slow_body() -> None:
    with pytest.raises(BodyTooSlow, match=r"0\.05 s"):
        read(receiving(part(b"1", more=True)), timeout_s=0.05)


def test_a_client_that_disconnects_in_its_body() -> None:
    with pytest.raises(ClientDisconnect):
        read(receiving(part(b"1", more=True), {"type": "http.disconnect"}))


@pytest.mark.parametrize("media_type", ["application/json", "application/json; charset=utf-8", "application/x+json"])
def test_json_media_types(media_type: str) -> None:
    assert read(receiving(part(b"{}")), content_type=media_type) == b"{}"


def test_another_media_type() -> None:
    with pytest.raises(UnsupportedMediaType, match="text/plain"):
        read(receiving(part(b"{}")), content_type="text/plain")


def through_proxy(app: Any, path: str) -> httpx.Response:
    """A GET through the middleware of Serve's HTTP proxy."""

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(RequestIdMiddleware(app))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get(path, headers={"x-request-id": "mine"})

    return asyncio.run(run())


@pytest.mark.parametrize("path", ["/v1/models", "/no/such/route"])
def test_one_request_id_behind_the_proxy(path: str) -> None:
    app = build_api(dependencies(make_engine()))
    response = through_proxy(BehindProxy(app), path)
    assert response.headers.get_list("x-request-id") == ["mine"]


def test_serve_finds_the_routes_of_the_application() -> None:
    app = build_api(dependencies(make_engine()))
    assert extract_route_patterns(BehindProxy(app)) == extract_route_patterns(app)
    assert "/v1/models" in {pattern.path for pattern in extract_route_patterns(BehindProxy(app))}


def test_work_ends_before_the_client() -> None:
    async def work() -> int:
        await asyncio.sleep(0)
        return 7

    assert asyncio.run(while_connected(receiving(), work())) == 7


def test_work_is_cancelled_when_the_client_disconnects() -> None:
    cancelled: list[bool] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(True)

    with pytest.raises(ClientGone):
        asyncio.run(while_connected(receiving({"type": "http.disconnect"}), work()))
    assert cancelled == [True]


def test_an_error_of_the_work_is_raised() -> None:
    async def work() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        asyncio.run(while_connected(receiving(), work()))


def test_cancel_waits_for_tasks_and_drops_their_errors() -> None:
    async def run() -> None:
        async def stubborn() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.01)
                raise ValueError("late")

        task = asyncio.ensure_future(stubborn())
        await asyncio.sleep(0)
        await cancel(task)
        assert task.done()

    asyncio.run(run())
