"""The adapters of a replica over a small target: names, numbers, limits, and new targets after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_harness import COMPLETION, dependencies, error_of, make_engine
from tiny_adapters import write_adapter
from tiny_models import write_model

from deployments.engine_client import AdapterTarget
from deployments.http.access import Access
from deployments.http.app import build_api
from deployments.lora.adapters import Adapters
from deployments.lora.routes import AdapterRoutes, add_adapter_routes
from engine.config import LoraConfig
from engine.errors import ConfigError, EngineUnavailable
from engine.messages import AdapterRef

KEY = "a key of the operator"
AUTH = {"Authorization": f"Bearer {KEY}"}
BASE = dependencies(make_engine()).model_name
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class FakeTarget:
    """Holds adapters; retiring one takes until `unused` is set."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[str, Path]] = {}
        self.failure: Exception | None = None
        self.unused = asyncio.Event()

    async def load_adapter(self, adapter: AdapterRef, folder: Path) -> None:
        if self.failure is not None:
            raise self.failure
        self.held[adapter.number] = (adapter.name, folder)

    async def retire_adapter(self, number: int) -> None:
        await self.unused.wait()
        del self.held[number]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapter"), model)


class Server:
    """A server whose target holds adapters."""

    def __init__(self, model: Path, settings: dict[str, Any], *, key: str | None, is_alone: bool) -> None:
        self.engine = make_engine()
        self.target = FakeTarget()
        self.adapters = Adapters(LoraConfig.parse(settings), model, BASE)
        self.is_up = True
        self._key, self._is_alone = key, is_alone

    async def find(self, patience_s: float) -> AdapterTarget:
        if not self.is_up:
            raise EngineUnavailable("restarting")
        return self.target

    async def client(self) -> httpx.AsyncClient:
        await self.adapters.bring_up(self.target)
        app = build_api(replace(dependencies(self.engine), adapters=self.adapters.served), Access())
        routes = AdapterRoutes(key=self._key, adapters=self.adapters, find=self.find, is_alone=self._is_alone)
        add_adapter_routes(app, routes)
        transport = httpx.ASGITransport(app, client=("127.0.0.1", 5))
        return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=AUTH)


def talk(
    model: Path,
    work: Callable[[Server, httpx.AsyncClient], Awaitable[None]],
    *,
    key: str | None = KEY,
    is_alone: bool = True,
    **settings: Any,
) -> None:
    async def run() -> None:
        server = Server(model, settings, key=key, is_alone=is_alone)
        async with await server.client() as client:
            await work(server, client)
        await server.adapters.close()

    asyncio.run(run())


async def models(client: httpx.AsyncClient) -> list[tuple[str, str | None]]:
    listed = (await client.get("/v1/models")).json()["data"]
    return [(card["id"], card["parent"]) for card in listed]


async def complete(client: httpx.AsyncClient, name: str) -> httpx.Response:
    return await client.post("/v1/completions", json=COMPLETION | {"model": name})


def test_the_model_field_chooses_the_adapter(model: Path, folder: Path) -> None:
    async def work(server: Server, client: httpx.AsyncClient) -> None:
        assert await models(client) == [(BASE, None), ("one", BASE), ("two", BASE)]
        card = (await client.get("/v1/models/two")).json()
        assert (card["id"], card["root"], card["parent"]) == ("two", "two", BASE)
        for name, expected in ((BASE, None), ("one", 1), ("two", 2)):
            response = await complete(client, name)
            assert response.json()["model"] == name
            chosen = server.engine.submitted[-1].adapter
            assert (None if chosen is None else chosen.number) == expected
        chat = {"model": "two", "messages": [{"role": "user", "content": "hi"}]}
        assert (await client.post("/v1/chat/completions", json=chat)).json()["model"] == "two"
        assert server.engine.submitted[-1].adapter == AdapterRef(number=2, name="two")
        answer = await client.post("/v1/responses", json={"model": "one", "input": "hi"})
        assert answer.json()["model"] == "one"
        assert server.engine.submitted[-1].adapter == AdapterRef(number=1, name="one")
        response = await complete(client, "three")
        assert response.status_code == 404
        assert error_of(response)["message"].endswith(f"this server has {BASE!r}, 'one', 'two'")
        document = (await client.get("/openapi.json")).json()
        assert document["components"]["schemas"]["CompletionBody"]["properties"]["model"]["enum"] == [
            BASE,
            "one",
            "two",
        ]

    talk(model, work, adapters={"one": str(folder), "two": str(folder)})


def test_adapters_are_loaded_and_dropped_while_serving(model: Path, folder: Path) -> None:
    async def work(server: Server, client: httpx.AsyncClient) -> None:
        body = {"lora_name": "new", "lora_path": str(folder)}
        response = await client.post(LOAD, json=body)
        assert response.status_code == 200
        assert (response.json()["id"], response.json()["parent"]) == ("new", BASE)
        assert server.target.held == {1: ("new", folder)}
        assert (await complete(client, "new")).status_code == 200
        taken = await client.post(LOAD, json=body)
        assert (taken.status_code, error_of(taken)["param"]) == (400, "lora_name")
        dropped = await client.post(UNLOAD, json={"lora_name": "new"})
        assert dropped.json() == {"id": "new", "object": "model", "deleted": True}
        assert await models(client) == [(BASE, None)]
        assert (await complete(client, "new")).status_code == 404
        assert (await client.post(UNLOAD, json={"lora_name": "new"})).status_code == 404
        # Its last request still runs, so it counts, and the same name gets another number.
        assert server.target.held == {1: ("new", folder)}
        assert (await client.post(LOAD, json=body)).status_code == 200
        assert sorted(server.target.held) == [1, 2]
        full = await client.post(LOAD, json=body | {"lora_name": "third"})
        assert full.status_code == 400
        assert "2 adapters are held" in error_of(full)["message"]
        server.target.unused.set()
        while 1 in server.target.held:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (await client.post(LOAD, json=body | {"lora_name": "third"})).status_code == 200
        assert await models(client) == [(BASE, None), ("new", BASE), ("third", BASE)]

    talk(model, work, max_loras=2)


def test_the_place_of_an_unused_adapter_is_free_at_once(model: Path, folder: Path) -> None:
    async def work(server: Server, client: httpx.AsyncClient) -> None:
        server.target.unused.set()
        for name in ("one", "two", "three"):
            loaded = await client.post(LOAD, json={"lora_name": name, "lora_path": str(folder)}, headers=AUTH)
            assert loaded.status_code == 200, loaded.text
            assert (await client.post(UNLOAD, json={"lora_name": name}, headers=AUTH)).status_code == 200

    talk(model, work, max_loras=1)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"lora_name": BASE, "lora_path": "FOLDER"}, "lora_name"),
        ({"lora_name": "a b", "lora_path": "FOLDER"}, "lora_name"),
        ({"lora_name": "a"}, "lora_path"),
        ({"lora_name": "a", "lora_path": "/no/such/folder"}, "lora_path"),
        ({"lora_name": "a", "lora_path": "MODEL"}, "lora_path"),
        ({"lora_name": "a", "lora_path": "~nobody/x"}, "lora_path"),
        ({"lora_name": "a", "lora_path": "x\0y"}, "lora_path"),
        ({"lora_name": "a", "lora_path": 4000 * "x"}, "lora_path"),
        ({"lora_name": "a", "lora_path": "FOLDER", "more": 1}, "more"),
    ],
)
def test_a_bad_body_is_refused_by_field(model: Path, folder: Path, body: dict[str, Any], param: str) -> None:
    async def work(server: Server, client: httpx.AsyncClient) -> None:
        places = {"FOLDER": str(folder), "MODEL": str(model)}
        sent = {name: places.get(value, value) for name, value in body.items()}
        response = await client.post(LOAD, json=sent)
        assert (response.status_code, error_of(response)["param"]) == (400, param)
        assert server.target.held == {}
        assert await models(client) == [(BASE, None)]

    talk(model, work)


def test_a_failed_load_leaves_nothing(model: Path, folder: Path) -> None:
    async def work(server: Server, client: httpx.AsyncClient) -> None:
        body = {"lora_name": "a", "lora_path": str(folder)}
        server.target.failure = ConfigError("lora: tensor x holds numbers that are not finite")
        response = await client.post(LOAD, json=body)
        assert (response.status_code, error_of(response)["param"]) == (400, "lora_path")
        assert "not finite" in error_of(response)["message"]
        server.target.failure = None
        server.is_up = False
        assert (await client.post(LOAD, json=body)).status_code == 503
        server.is_up = True
        assert await models(client) == [(BASE, None)]
        assert (await client.post(LOAD, json=body)).status_code == 200

    talk(model, work, max_loras=1)


@pytest.mark.parametrize("url", [LOAD, UNLOAD])
def test_the_routes_need_the_admin_key(model: Path, url: str) -> None:
    async def wrong(server: Server, client: httpx.AsyncClient) -> None:
        for header in ("", "Bearer no", f"Basic {KEY}"):
            assert (await client.post(url, json={}, headers={"Authorization": header})).status_code == 401

    async def absent(server: Server, client: httpx.AsyncClient) -> None:
        assert (await client.post(url, json={})).status_code == 404

    talk(model, wrong)
    talk(model, absent, key=None)


def test_an_app_of_several_replicas_takes_adapters_from_its_settings_only(model: Path, folder: Path) -> None:
    async def work(server: Server, client: httpx.AsyncClient) -> None:
        response = await client.post(LOAD, json={"lora_name": "a", "lora_path": str(folder)})
        assert response.status_code == 400
        assert "engine.lora.adapters" in error_of(response)["message"]

    talk(model, work, is_alone=False)


def test_a_new_target_gets_what_is_served_now(model: Path, folder: Path, tmp_path: Path) -> None:
    async def work(server: Server, client: httpx.AsyncClient) -> None:
        own = write_adapter(tmp_path / "own", model)
        for name in ("two", "three"):
            assert (await client.post(LOAD, json={"lora_name": name, "lora_path": str(own)})).status_code == 200
        server.target.unused.set()
        await client.post(UNLOAD, json={"lora_name": "two"})
        server.target = FakeTarget()
        await server.adapters.bring_up(server.target)
        assert server.target.held == {1: ("one", folder), 3: ("three", own)}
        # A folder that can no longer be read costs its own adapter only.
        failing = FakeTarget()
        failing.failure = ConfigError("lora: gone")
        await server.adapters.bring_up(failing)
        assert await models(client) == [(BASE, None)]

    talk(model, work, adapters={"one": str(folder)})


def test_an_adapter_of_the_settings_that_does_not_fit_stops_the_start(model: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.lora\.adapters\.bad: lora: .* is no folder"):
        Adapters(LoraConfig.parse({"adapters": {"bad": "/no/such/folder"}}), model, BASE)
    with pytest.raises(ConfigError, match="max_lora_rank allows up to 2"):
        Adapters(LoraConfig.parse({"adapters": {"bad": str(folder)}, "max_lora_rank": 2}), model, BASE)

    async def fail() -> None:
        adapters = Adapters(LoraConfig.parse({"adapters": {"bad": str(folder)}}), model, BASE)
        target = FakeTarget()
        target.failure = ConfigError("lora: not finite")
        await adapters.bring_up(target)

    with pytest.raises(ConfigError, match=r"engine\.lora\.adapters\.bad: lora: not finite"):
        asyncio.run(fail())
