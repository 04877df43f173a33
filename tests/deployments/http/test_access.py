"""Access control: keys, their limits, origins, and servers without keys.

Promise: nothing of a request is read before its key is known to be right, and no message or log repeats a key.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from api_harness import CHAT, COMPLETION, dependencies, error_of, make_engine, post
from fake_engine import FakeEngine

from deployments.http.access import Access, is_loopback
from deployments.http.admission import Admission
from deployments.http.app import build_api
from deployments.http.keys import KEYS_ENV, KeyEntry, KeyRing, add_key, hash_key
from deployments.local.yaml_config import DEFAULT_FILE, check
from engine.errors import ConfigError

KEY, OTHER = "pl-" + "k" * 43, "pl-" + "m" * 43
AUTH = {"authorization": f"Bearer {KEY}"}
CLOSED = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/ui/data"),
    ("GET", "/no/such/route"),
]


def ring(**limits: Any) -> KeyRing:
    return KeyRing(
        [
            KeyEntry(name="one", sha256=hash_key(KEY), **limits),
            KeyEntry(name="two", sha256=hash_key(OTHER), max_priority="high"),
        ]
    )


def talk(
    work: Callable[[httpx.AsyncClient], Awaitable[Any]],
    access: Access,
    *,
    engine: FakeEngine | None = None,
    admission: Admission | None = None,
    peer: str = "127.0.0.1",
    base: str = "http://localhost:8000",
) -> Any:
    needed = replace(dependencies(engine or make_engine()), admission=admission or Admission(1000))

    async def run() -> Any:
        transport = httpx.ASGITransport(build_api(needed, access), client=(peer, 5000))
        async with httpx.AsyncClient(transport=transport, base_url=base) as client:
            return await work(client)

    return asyncio.run(run())


def ask(method: str, url: str, access: Access, **options: Any) -> httpx.Response:
    where = {name: options.pop(name) for name in ("peer", "base") if name in options}
    response: httpx.Response = talk(lambda client: client.request(method, url, **options), access, **where)
    return response


@pytest.mark.parametrize(("method", "url"), CLOSED)
@pytest.mark.parametrize(
    "given", [None, "", "Bearer", "Bearer ", f"Basic {KEY}", KEY, f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", "Bearer ü"]
)
def test_without_a_valid_key_nothing_is_answered(method: str, url: str, given: str | None) -> None:
    headers = {} if given is None else {"authorization": given.encode()}
    response = ask(method, url, Access(keys=ring()), headers=headers, json=CHAT)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = error_of(response)
    assert error["code"] == "invalid_api_key"
    assert KEY[:-1] not in response.text


@pytest.mark.parametrize("key", [KEY, OTHER])
def test_every_valid_key_opens(key: str) -> None:
    access = Access(keys=ring())
    headers = {"authorization": f"bearer {key}"}
    assert ask("POST", "/v1/chat/completions", access, headers=headers, json=CHAT).status_code == 200
    assert ask("GET", "/v1/models", access, headers=headers).status_code == 200


def test_health_and_the_document_need_no_key() -> None:
    for url in ("/health", "/openapi.json"):
        assert ask("GET", url, Access(keys=ring())).status_code == 200


@pytest.mark.parametrize(("url", "status"), [("/llm/health", 200), ("/llm/v1/models", 401), ("/llm/ui/data", 401)])
def test_the_door_is_the_same_below_a_prefix(url: str, status: int) -> None:
    app = build_api(dependencies(make_engine()), Access(keys=ring()))

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app, root_path="/llm")
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get(url)

    assert asyncio.run(run()).status_code == status


@pytest.mark.parametrize(
    ("peer", "base", "status"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000", 200),
        ("::1", "http://[::1]:8000", 200),
        ("127.0.0.1", "http://localhost", 200),
        ("10.0.0.7", "http://10.0.0.1:8000", 403),
        ("10.0.0.7", "http://localhost", 403),
        ("127.0.0.1", "http://rebound.example:8000", 403),
        ("", "http://localhost", 403),
    ],
)
def test_a_server_without_keys_answers_on_loopback_only(peer: str, base: str, status: int) -> None:
    response = ask("POST", "/v1/completions", Access(), json=COMPLETION, peer=peer, base=base)
    assert response.status_code == status
    if status == 403:
        assert error_of(response)["code"] == "api_keys_required"


def test_with_keys_it_answers_from_anywhere() -> None:
    response = ask("GET", "/v1/models", Access(keys=ring()), headers=AUTH, peer="10.0.0.7", base="http://host:1")
    assert response.status_code == 200


def test_other_origins_are_refused_by_default() -> None:
    """Also without a content type, because browsers send such requests across origins without a preflight."""
    headers = {"origin": "http://evil.example", "content-type": ""}
    response = ask("POST", "/v1/completions", Access(), headers=headers, json=COMPLETION)
    assert response.status_code == 403
    assert error_of(response)["code"] == "bad_origin"
    assert "access-control-allow-origin" not in response.headers
    preflight = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in ask("OPTIONS", "/v1/completions", Access(), headers=preflight).headers


def test_its_own_page_and_configured_origins_may_call() -> None:
    own = {"origin": "http://localhost:8000"}
    assert ask("POST", "/v1/completions", Access(), headers=own, json=COMPLETION).status_code == 200
    access = Access(keys=ring(), origins=("https://app.example",))
    there = {"origin": "https://app.example"}
    preflight = there | {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang,x-stainless-retry-count",
    }
    allowed = ask("OPTIONS", "/v1/completions", access, headers=preflight)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://app.example"
    assert "x-stainless-retry-count" in allowed.headers["access-control-allow-headers"]
    response = ask("POST", "/v1/completions", access, headers=there | AUTH, json=COMPLETION)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://app.example"
    assert "access-control-allow-credentials" not in response.headers


def test_a_key_has_its_own_rate() -> None:
    now = [0.0]
    admission = Admission(1000, clock=lambda: now[0])

    async def work(client: httpx.AsyncClient) -> list[int]:
        statuses = []
        for key in (KEY, KEY, KEY, OTHER):
            headers = {"authorization": f"Bearer {key}"}
            statuses.append(await client.post("/v1/completions", json=COMPLETION, headers=headers))
        now[0] = 31.0  # half of the two a minute
        statuses.append(await client.post("/v1/completions", json=COMPLETION, headers=AUTH))
        return statuses

    responses = talk(work, Access(keys=ring(requests_per_minute=2)), admission=admission)
    assert [response.status_code for response in responses] == [200, 200, 429, 200, 200]
    assert error_of(responses[2])["code"] == "rate_limit_exceeded"
    assert responses[2].headers["retry-after"] == "30"


def test_a_key_has_its_own_concurrency_and_answers_count() -> None:
    engine = make_engine(step_s=0.02)
    admission = Admission(1000)

    async def work(client: httpx.AsyncClient) -> list[int]:
        body = COMPLETION | {"n": 2}
        asked = [client.post("/v1/completions", json=body, headers=AUTH) for _ in range(3)]
        return [response.status_code for response in await asyncio.gather(*asked)]

    statuses = talk(work, Access(keys=ring(max_concurrent=5)), engine=engine, admission=admission)
    assert sorted(statuses) == [200, 200, 429]
    assert admission.num_in_flight == 0
    assert {submit.client for submit in engine.submitted} == {"one"}


def test_priority_is_capped_by_the_key() -> None:
    engine = make_engine()

    async def work(client: httpx.AsyncClient) -> list[httpx.Response]:
        def post(**body: Any) -> Awaitable[httpx.Response]:
            return client.post("/v1/completions", json=COMPLETION | body, headers=AUTH)

        return [await post(), await post(priority="low"), await post(priority="normal")]

    responses = talk(work, Access(keys=ring(max_priority="low")), engine=engine)
    assert [response.status_code for response in responses] == [200, 200, 400]
    assert error_of(responses[2])["param"] == "priority"
    assert [submit.priority for submit in engine.submitted] == ["low", "low"]


def test_keys_and_prompts_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "a very private prompt"
    body = {"model": "tiny", "prompt": secret, "max_tokens": 5}
    for engine in (make_engine(), make_engine(fail_after=1, failure=ValueError(secret[:0] or "x"))):
        talk(lambda client: client.post("/v1/completions", json=body, headers=AUTH), Access(keys=ring()), engine=engine)
    talk(lambda client: client.get("/v1/models", headers={"authorization": f"Bearer {KEY}x"}), Access(keys=ring()))
    logged = "\n".join(record.getMessage() + str(record.exc_text) for record in caplog.records)
    assert logged
    assert KEY not in logged
    assert hashlib.sha256(KEY.encode()).hexdigest() not in logged
    assert secret not in logged


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "server.example", None])
def test_a_deployment_that_others_can_reach_needs_keys(host: str | None, tmp_path: Path) -> None:
    values = yaml.safe_load(DEFAULT_FILE.read_text())
    values["http_options"] = {"port": 8000} if host is None else {"host": host, "port": 8000}
    with pytest.raises(ConfigError, match="API keys"):
        check(values, {})
    assert check(values, {KEYS_ENV: KEY})
    add_key(tmp_path / "keys.yaml", "a")
    values["applications"][0]["args"]["api_keys_file"] = str(tmp_path / "keys.yaml")
    assert check(values, {})


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_loopback(host: str, local: bool) -> None:
    assert is_loopback(host) == local


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_at_its_deadline(stream: bool) -> None:
    engine = make_engine(step_s=0.1, max_step=1)
    begin = time.monotonic()
    body = COMPLETION | {"timeout": 0.5, "stream": stream, "ignore_eos": True}
    response = post(engine, "/v1/completions", body)
    assert time.monotonic() - begin < 8.0, "all 100 tokens take ten seconds"
    if stream:
        assert response.status_code == 200
        assert '"deadline_exceeded"' in response.text.split("\n\n")[-2], "one clear error event, and the end"
        assert "[DONE]" not in response.text
    else:
        assert response.status_code == 408
        assert error_of(response)["code"] == "deadline_exceeded"
    assert engine.running == set()
    assert len(engine.aborted) == 1


@pytest.mark.parametrize("host", ["[::1", "[", "]", "a:b", "localhost:99999", "\u00ff", ""])
@pytest.mark.parametrize(("path", "status"), [("/v1/models", 200), ("/no/such/route", 404)])
def test_a_host_that_is_no_address_is_refused_or_ignored(host: str, path: str, status: int) -> None:
    """Without keys such a host is not loopback; with a key it does not matter."""
    headers = {"host": host.encode("latin-1")}
    open_server = ask("GET", path, Access(), headers=headers)
    assert open_server.status_code == (status if host == "localhost:99999" else 403)
    assert ask("GET", path, Access(keys=ring()), headers=AUTH | headers).status_code == status


@pytest.mark.parametrize("origin", ["http://[::1", "http://[", "//[", "null", "\u00ff"])
def test_an_origin_that_is_no_address_is_refused(origin: str) -> None:
    response = ask("POST", "/v1/completions", Access(), headers={"origin": origin.encode("latin-1")}, json=COMPLETION)
    assert (response.status_code, error_of(response)["code"]) == (403, "bad_origin")
