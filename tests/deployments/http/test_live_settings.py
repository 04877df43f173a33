"""Settings that change while a server runs, and draining."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import pytest
import yaml
from api_harness import COMPLETION, dependencies, error_of, make_engine

from deployments.http.admission import Admission
from deployments.http.app import attach, build_api
from deployments.local.yaml_config import DEFAULT_FILE, DEPLOYMENT, check, with_user_config
from deployments.settings import AppSettings, LiveSettings, check_live
from engine.errors import ConfigError

VALUES = yaml.safe_load(DEFAULT_FILE.read_text())
SETTINGS = AppSettings.parse({"engine": {"model": "smollm2", "speculative": {"k": 4}}})


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"max_k": 5}, "max_k"),
        ({"max_k": -1}, "max_k"),
        ({"max_in_flight": SETTINGS.capacity + 1}, "max_in_flight"),
        ({"policy": "fastest"}, "policy"),
        ({"request_timeout_s": 0}, "request_timeout_s"),
        ({"max_kk": 1}, "max_kk"),
    ],
)
def test_live_settings_are_checked_before_anything_changes(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        check_live(LiveSettings.parse(changes), SETTINGS)


def test_a_file_with_bad_live_settings_is_refused_with_the_place() -> None:
    app = VALUES["applications"][0]["name"]
    with pytest.raises(ConfigError, match=rf"applications\[{app}\]\.deployments\.{DEPLOYMENT}\.user_config\.max_k"):
        with_user_config(VALUES, max_k=99)
    values = yaml.safe_load(DEFAULT_FILE.read_text())
    values["applications"][0]["deployments"] = [{"name": "Other"}]
    with pytest.raises(ConfigError, match="Other given; there is Replica"):
        check(values)


@pytest.mark.parametrize(
    ("field", "value", "setting"),
    [("num_replicas", 2, "num_replicas"), ("autoscaling_config", {"max_replicas": 2}, "autoscaling")],
)
def test_the_number_of_replicas_has_one_place(field: str, value: Any, setting: str) -> None:
    """Serve would accept it in both places; checks and metrics know only the one in `args`."""
    values = yaml.safe_load(DEFAULT_FILE.read_text())
    values["applications"][0]["deployments"] = [{"name": DEPLOYMENT, field: value}]
    with pytest.raises(ConfigError, match=rf"{DEPLOYMENT}\.{field}.*args\.{setting}"):
        check(values)


def test_changes_add_up_and_the_file_stays_as_it_was() -> None:
    once = with_user_config(VALUES, max_k=2)
    twice = with_user_config(once, accepts_requests=False)
    assert twice["applications"][0]["deployments"] == [
        {"name": DEPLOYMENT, "user_config": {"max_k": 2, "accepts_requests": False}}
    ]
    assert once["applications"][0]["deployments"][0]["user_config"] == {"max_k": 2}
    assert "deployments" not in VALUES["applications"][0]


def test_only_what_was_given_changes_the_pace() -> None:
    assert LiveSettings().pace() == {}
    assert LiveSettings(max_k=0, enabled=False).pace() == {"max_k": 0, "enabled": False}


def test_a_draining_server_finishes_what_runs_and_says_when_it_has() -> None:
    admission = Admission(10)
    engine = make_engine(step_s=0.05, max_step=1)
    needed = replace(dependencies(engine), admission=admission)

    async def run() -> None:
        transport = httpx.ASGITransport(build_api(needed))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            running = asyncio.create_task(client.post("/v1/completions", json=COMPLETION))
            while not engine.running:
                await asyncio.sleep(0.01)
            admission.accepts = False
            health = await client.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "draining")
            assert health.json()["reason"] == "1 requests in flight"
            late = await client.post("/v1/completions", json=COMPLETION)
            assert late.status_code == 503
            assert late.headers["retry-after"]
            assert "draining" in error_of(late)["message"]
            assert (await running).status_code == 200
            assert (await client.get("/health")).json()["status"] == "drained"
            admission.accepts = True
            assert (await client.get("/health")).json()["status"] == "ok"

    asyncio.run(run())


def test_a_shorter_time_limit_holds_from_the_next_request_on() -> None:
    needed = dependencies(make_engine(step_s=5.0))
    app = build_api(needed)

    async def run() -> httpx.Response:
        attach(app, replace(needed, timeout_s=0.1))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.post("/v1/completions", json=COMPLETION)

    response = asyncio.run(run())
    assert response.status_code == 408
    assert error_of(response)["code"] == "deadline_exceeded"
