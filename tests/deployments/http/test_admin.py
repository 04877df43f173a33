"""The admin routes: 404 without a key, 401 with a wrong key, and an error that names a bad field."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from api_harness import COMPLETION, dependencies, error_of, make_engine

from autoscale.control.controller import Controller
from autoscale.control.report import Observation
from deployments.http.admin import AdminDependencies, add_admin_routes, admin_key
from deployments.http.app import build_api
from deployments.monitoring.timelines import TimedEngine
from engine.core.pacing import SpeculationPlan

KEY = "a key of the operator"
AUTH = {"Authorization": f"Bearer {KEY}"}
FIRST = SpeculationPlan(version=1, policy="goodput", max_k=4, max_batch=16)
ROUTES = [("GET", "/admin/pace"), ("PATCH", "/admin/pace"), ("GET", "/debug/requests/x")]


def talk(work: Callable[[httpx.AsyncClient], Awaitable[Any]], key: str | None = KEY) -> tuple[Any, Controller]:
    controller = Controller(FIRST)
    timed = TimedEngine(make_engine(), [], keep=4)

    async def plan() -> SpeculationPlan:
        return controller.plan()

    async def override(changes: dict[str, Any]) -> SpeculationPlan:
        return controller.override(**changes)

    async def run() -> Any:
        app = build_api(dependencies(timed))  # type: ignore[arg-type]
        add_admin_routes(app, AdminDependencies(key=key, plan=plan, override=override, max_k=4, find=timed.find))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await work(client)

    return asyncio.run(run()), controller


@pytest.mark.parametrize(("method", "url"), ROUTES)
def test_no_key_configured_no_route(method: str, url: str) -> None:
    response, _ = talk(lambda client: client.request(method, url, headers=AUTH), key=None)
    assert response.status_code == 404
    assert error_of(response)["code"] == "unknown_route"


@pytest.mark.parametrize(("method", "url"), ROUTES)
@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer no", f"Basic {KEY}", KEY, f"Bearer {KEY}x", "Bearer ü"])
def test_wrong_key(method: str, url: str, given: str | None) -> None:
    headers = {} if given is None else {"Authorization": given.encode()}
    response, controller = talk(lambda client: client.request(method, url, headers=headers, json={"max_k": 1}))
    assert response.status_code == 401
    assert error_of(response)["code"] == "invalid_admin_key"
    assert controller.plan() == FIRST


def test_pace_is_read_and_changed() -> None:
    async def work(client: httpx.AsyncClient) -> list[Any]:
        before = await client.get("/admin/pace", headers=AUTH)
        after = await client.patch("/admin/pace", headers=AUTH, json={"policy": "fixed", "max_k": 2, "enabled": False})
        again = await client.patch("/admin/pace", headers=AUTH, json={"max_batch": 3})
        return [before.json(), after.json(), again.json()]

    (before, after, again), controller = talk(work)
    assert [plan.pop("priors") for plan in (before, after, again)] == [[]] * 3
    assert before == {"version": 1, "policy": "goodput", "max_k": 4, "max_batch": 16, "enabled": True}
    assert after == {"version": 2, "policy": "fixed", "max_k": 2, "max_batch": 16, "enabled": False}
    assert again == after | {"version": 3, "max_batch": 3}
    assert controller.report("engine", Observation()) == SpeculationPlan(**again)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"max_k": 5}, "max_k"),
        ({"max_k": -1}, "max_k"),
        ({"max_k": "2"}, "max_k"),
        ({"max_k": True}, "max_k"),
        ({"max_batch": 0}, "max_batch"),
        ({"max_batch": 2**31}, "max_batch"),
        ({"max_batch": 10**400}, "max_batch"),
        ({"policy": "fastest"}, "policy"),
        ({"enabled": 1}, "enabled"),
        ({"k": 2}, "k"),
        ({"version": 9}, "version"),
        ({}, None),
        ([], None),
    ],
)
def test_bad_changes_change_nothing(body: Any, field: str | None) -> None:
    response, controller = talk(lambda client: client.patch("/admin/pace", headers=AUTH, json=body))
    assert response.status_code == 400
    assert error_of(response)["param"] == field
    assert controller.plan() == FIRST


def test_timeline_of_a_request() -> None:
    async def work(client: httpx.AsyncClient) -> list[httpx.Response]:
        await client.post("/v1/completions", json=COMPLETION, headers={"x-request-id": "mine"})
        urls = ("/debug/requests/mine", "/debug/requests/other")
        return [await client.get(url, headers=AUTH) for url in urls]

    (found, missing), _ = talk(work)
    timeline = found.json()
    assert (timeline["request_id"], timeline["outcome"]) == ("mine", "stop")
    assert sum(step["num_tokens"] for step in timeline["steps"]) == timeline["num_tokens"] > 0
    assert missing.status_code == 404
    assert error_of(missing)["code"] == "request_not_found"


def test_a_new_controller_learns_the_plan_from_the_engines() -> None:
    old = Controller(FIRST)
    changed = old.override(policy="off")
    new = Controller(FIRST)
    assert new.report("engine", Observation(), changed) == changed
    assert new.report("engine that slept", Observation(), FIRST) == changed
    assert new.override(enabled=False).version == changed.version + 1


def test_key_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_ADMIN_KEY", KEY)
    assert admin_key() == KEY
    monkeypatch.setenv("PACELINE_ADMIN_KEY", "")
    assert admin_key() is None
