"""A new configuration under load: live settings without a restart, the rest replica by replica, nothing dropped."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
import yaml

from deployments.local.ports import free_port
from deployments.local.ray_head import LocalRay
from deployments.local.yaml_config import DEFAULT_FILE, with_user_config

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ADMIN_KEY = "operator-upgrade"
TIMEOUT_S = 300.0


class Deployment:
    """Two replicas behind Serve's proxy."""

    def __init__(self, ray: LocalRay) -> None:
        self.ray = ray
        self.values: dict[str, Any] = yaml.safe_load(DEFAULT_FILE.read_text())
        self.values["http_options"]["port"] = free_port()
        args = self.values["applications"][0]["args"]
        args |= {"num_replicas": 2, "drain_timeout_s": 60.0}
        args["engine"] |= {"num_threads": 1, "kv_cache_tokens": 8192, "speculative": {"method": "ngram", "k": 4}}
        self.url = f"http://127.0.0.1:{self.values['http_options']['port']}"

    def put(self, values: dict[str, Any]) -> None:
        self.values = values
        self.ray.put_applications(values)

    def wait(self, reached: Any) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                if reached():
                    return
            except (httpx.HTTPError, KeyError):
                pass
            assert time.monotonic() < deadline
            time.sleep(0.5)

    def is_running(self) -> bool:
        url = f"{self.ray.dashboard_url}/api/serve/applications/"
        answer = self.ray.http.get(url, timeout=10).json()
        status: str = answer["applications"]["paceline"]["status"]
        return status == "RUNNING"

    def plan(self) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        plan: dict[str, Any] = httpx.get(f"{self.url}/admin/pace", headers=headers, timeout=30).json()
        return plan

    def replicas(self) -> set[int]:
        found = psutil.Process().children(recursive=True)
        return {p.pid for p in found if p.cmdline() and "ServeReplica" in p.cmdline()[0]}


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_ADMIN_KEY", ADMIN_KEY)
        with LocalRay(num_cpus=8) as ray:
            made = Deployment(ray)
            made.put(made.values)
            made.wait(lambda: httpx.get(f"{made.url}/health", timeout=5).is_success and made.is_running())
            yield made


class Load:
    """Clients that send requests without a pause until they are stopped. Every response is checked."""

    def __init__(self, url: str, clients: int) -> None:
        self._url = url
        self._stop = threading.Event()
        self.answers: list[str] = []
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), "a request hangs"

    def _ask(self) -> None:
        body = {"model": "smollm2", "prompt": "One, two, three,", "temperature": 0, "max_tokens": 24}
        while not self._stop.is_set():
            try:
                answer = httpx.post(f"{self._url}/v1/completions", json=body, timeout=120)
                (self.answers if answer.is_success else self.failures).append(answer.text)
            except httpx.HTTPError as error:
                self.failures.append(repr(error))


def test_live_settings_change_without_a_restart(deployment: Deployment) -> None:
    before = deployment.replicas()
    assert deployment.plan()["max_k"] == 4
    with Load(deployment.url, clients=2) as load:
        deployment.put(with_user_config(deployment.values, max_k=2, max_in_flight=50))
        deployment.wait(lambda: deployment.plan()["max_k"] == 2)
    assert load.failures == []
    assert deployment.replicas() == before


def test_other_settings_roll_and_nothing_is_dropped(deployment: Deployment) -> None:
    before = deployment.replicas()
    changed: dict[str, Any] = yaml.safe_load(yaml.safe_dump(deployment.values))
    changed["applications"][0]["args"]["engine"]["max_num_waiting"] = 100
    with Load(deployment.url, clients=3) as load:
        time.sleep(1.0)
        deployment.put(changed)
        deployment.wait(lambda: deployment.is_running() and not deployment.replicas() & before)
        time.sleep(1.0)
    assert load.failures == []
    assert len({answer.split('"text":')[1][:80] for answer in load.answers}) == 1
    assert len(deployment.replicas()) == 2
