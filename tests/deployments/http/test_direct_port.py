"""The direct port: it streams without buffering, listens again after a restart, and closes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from deployments.http.direct_port import DirectHttp
from deployments.local import yaml_config
from deployments.local.ports import LOOPBACK, free_port
from engine.errors import ConfigError


async def _peer(request: Request) -> Response:
    assert request.client is not None
    return PlainTextResponse(request.client.host)


async def _stream(request: Request) -> Response:
    gate: asyncio.Event = request.app.state.gate

    async def parts() -> AsyncIterator[bytes]:
        yield b"first"
        await gate.wait()
        yield b"second"

    return StreamingResponse(parts())


def _app() -> Starlette:
    app = Starlette(routes=[Route("/peer", _peer), Route("/stream", _stream)])
    app.state.gate = asyncio.Event()
    return app


def test_a_chunk_leaves_before_the_next_one_is_made() -> None:
    async def run() -> None:
        app, port = _app(), free_port()
        server = DirectHttp(app, host=LOOPBACK, port=port)
        server.open()
        async with (
            httpx.AsyncClient(base_url=f"http://{LOOPBACK}:{port}") as client,
            client.stream("GET", "/stream") as r,
        ):
            parts = r.aiter_bytes()
            assert await anext(parts) == b"first"
            app.state.gate.set()
            assert await anext(parts) == b"second"
        await server.close()

    asyncio.run(run())


def test_a_header_cannot_pretend_another_address() -> None:
    async def run() -> None:
        port = free_port()
        server = DirectHttp(_app(), host=LOOPBACK, port=port)
        server.open()
        async with httpx.AsyncClient() as client:
            response = await client.get(f"http://{LOOPBACK}:{port}/peer", headers={"x-forwarded-for": "192.0.2.7"})
        assert response.text == LOOPBACK
        await server.close()

    asyncio.run(run())


def test_a_second_door_opens_where_one_was_closed() -> None:
    """Also while connections of the first are still in TIME_WAIT."""

    async def run() -> None:
        port = free_port()
        for _ in range(2):
            server = DirectHttp(_app(), host=LOOPBACK, port=port)
            server.open()
            async with httpx.AsyncClient() as client:
                assert (await client.get(f"http://{LOOPBACK}:{port}/peer")).status_code == 200
                await server.close()
        async with httpx.AsyncClient() as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(f"http://{LOOPBACK}:{port}/peer")

    asyncio.run(run())


def test_an_address_that_is_not_here_is_named() -> None:
    async def run() -> None:
        with pytest.raises(ConfigError, match=r"direct_port: cannot listen on 192\.0\.2\.1:9"):
            DirectHttp(_app(), host="192.0.2.1", port=9).open()

    asyncio.run(run())


def test_one_replica_listens_itself_and_more_do_not() -> None:
    values = yaml_config.load(yaml_config.DEFAULT_FILE)
    (settings,) = yaml_config.check(yaml_config.past_proxy(values, proxy_host=LOOPBACK, proxy_port=1234))
    assert (settings.direct_host, settings.direct_port) == yaml_config.http_address(values)
    values["applications"][0]["args"]["num_replicas"] = 2
    changed = yaml_config.past_proxy(values, proxy_host=LOOPBACK, proxy_port=1234)
    assert changed == values


def test_no_proxy_runs_where_nobody_would_ask_it() -> None:
    values = yaml_config.load(yaml_config.DEFAULT_FILE)
    assert yaml_config.past_proxy(values, proxy_host=LOOPBACK, proxy_port=1234)["proxy_location"] == "Disabled"
    assert values["proxy_location"] == "EveryNode"


def test_a_door_to_the_world_needs_keys() -> None:
    values = yaml_config.load(yaml_config.DEFAULT_FILE)
    values["applications"][0]["args"] |= {"direct_port": 9000, "direct_host": "0.0.0.0"}
    with pytest.raises(ConfigError, match=r"args\.direct_host: 0\.0\.0\.0 given"):
        yaml_config.check(values, environ={})
