"""A live server scraped by a real Prometheus: data for every declared query and every panel, and correct values."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import prometheus_server
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_server import Prometheus
from serving import Server

from engine.metrics.definitions import METRICS

pytestmark = pytest.mark.ray

WINDOW = "30s"
OF_ADAPTERS = "paceline_adapter_"
"""Prefix of the metrics that have no series without adapters; `test_adapters.py` sees them."""
PROMPTS = ("Count from one to twenty in words.", "Say hello.", "Name five rivers.")


def ask(server: Server, prompt: str, max_tokens: int = 16) -> dict[str, Any]:
    body = {"model": "smollm2", "messages": [{"role": "user", "content": prompt}], "temperature": 0}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body | {"max_tokens": max_tokens}, timeout=60)
    document: dict[str, Any] = response.raise_for_status().json()
    return document


def address(targets: Path) -> str:
    (file,) = targets.glob("*.json")
    (entry,) = json.loads(file.read_text())
    return f"http://{entry['targets'][0]}/metrics"


def read(targets: Path) -> dict[str, float]:
    """Sum over labels of each sample, of the live replica."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(address(targets), timeout=10).text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


@pytest.fixture(scope="module")
def prometheus(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus, once it has scraped a load for some seconds."""
    if not prometheus_server.installed():
        pytest.skip("prometheus is not installed (Debian: apt-get install prometheus)")
    with prometheus_server.running(tmp_path_factory.mktemp("prometheus"), f"{server.url}/metrics/targets") as found:
        found.wait(lambda: set(found.values("up").values()) == {1.0})
        begin = time.monotonic()
        while time.monotonic() - begin < 8.0:
            with ThreadPoolExecutor(len(PROMPTS)) as pool:
                list(pool.map(lambda prompt: ask(server, prompt), PROMPTS))
        time.sleep(1.5)  # one more scrape, after the last request
        yield found


def test_every_declared_query_returns_data(prometheus: Prometheus) -> None:
    queries = {m.name: m.query(selector='app="paceline",model="smollm2"', window=WINDOW) for m in METRICS}
    empty = [name for name, query in queries.items() if prometheus_server.is_empty(prometheus.values(query))]
    assert [name for name in empty if not name.startswith(OF_ADAPTERS)] == []


def test_every_panel_returns_data(prometheus: Prometheus) -> None:
    assert [panel for panel, query in prometheus.empty_panels(WINDOW) if OF_ADAPTERS not in query] == []


def test_targets_and_series_carry_the_same_labels_once(prometheus: Prometheus) -> None:
    ((up, _),) = prometheus.values('up{job="paceline"}').items()
    ((steps, _),) = prometheus.values("paceline_steps_total").items()
    names = {name for name, _ in steps}
    assert {"app", "replica", "model"} <= names
    assert not [name for name in names if name.startswith(("exported_", "__paceline"))]
    assert {pair for pair in up if pair[0] in ("app", "replica", "model")} <= set(steps)


def test_numbers_agree_with_what_clients_were_told(server: Server, targets: Path) -> None:
    before = read(targets)
    usages = [ask(server, prompt, 24)["usage"] for prompt in PROMPTS]
    after = read(targets)
    told = {
        "paceline_requests_total": len(PROMPTS),
        "paceline_ttft_seconds_count": len(PROMPTS),
        "paceline_prompt_tokens_total": sum(usage["prompt_tokens"] for usage in usages),
        "paceline_generated_tokens_total": sum(usage["completion_tokens"] for usage in usages),
        "paceline_emitted_tokens_total": sum(usage["completion_tokens"] for usage in usages),
        "paceline_accepted_tokens_total": sum(
            u["completion_tokens_details"]["accepted_prediction_tokens"] for u in usages
        ),
        "paceline_drafted_tokens_total": sum(usage["speculative"]["drafted"] for usage in usages),
    }
    assert {name: after[name] - before[name] for name in told} == told
    assert 0 < after["paceline_draft_memory_bytes"] < after["paceline_draft_memory_cap_bytes"]


def test_a_client_that_leaves_is_counted(server: Server, targets: Path) -> None:
    before = read(targets)
    body = {"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 400, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        next(response.iter_lines())
    deadline = time.monotonic() + 10
    while (after := read(targets))["paceline_requests_total"] == before["paceline_requests_total"]:
        assert time.monotonic() < deadline
    text = httpx.get(address(targets)).text
    assert [line for line in text.splitlines() if 'reason="abort"' in line and not line.endswith(" 0.0")]
    assert after["paceline_requests_total"] == before["paceline_requests_total"] + 1


def test_the_pace_by_hand(server: Server, targets: Path, admin: dict[str, str]) -> None:
    url = f"{server.url}/admin/pace"
    usual = httpx.get(url, headers=admin).json()
    off = httpx.patch(url, headers=admin, json={"enabled": False}).json()
    told = ("version", "policy", "max_k", "max_batch", "enabled")  # without priors, which change without requests
    changed = usual | {"version": usual["version"] + 1, "enabled": False}
    assert {key: off[key] for key in told} == {key: changed[key] for key in told}
    try:
        deadline = time.monotonic() + 10
        while read(targets)["paceline_plan_version"] < off["version"]:
            assert time.monotonic() < deadline
        before = read(targets)
        ask(server, PROMPTS[0])
        after = read(targets)
        assert after["paceline_drafts_total"] == before["paceline_drafts_total"]
        assert after["paceline_steps_total"] > before["paceline_steps_total"]
        assert after["paceline_plan_max_k"] == 0
    finally:
        httpx.patch(url, headers=admin, json={"enabled": True})


def test_timeline_of_a_request(server: Server, admin: dict[str, str]) -> None:
    body = {"model": "smollm2", "prompt": "One, two, three,", "max_tokens": 12, "temperature": 0}
    answer = httpx.post(
        f"{server.url}/v1/completions", json=body, headers={"x-request-id": "traced"}, timeout=60
    ).json()
    timeline = httpx.get(f"{server.url}/debug/requests/traced", headers=admin).json()
    assert timeline["num_tokens"] == answer["usage"]["completion_tokens"] == 12
    assert 0 <= timeline["queue_s"] <= timeline["ttft_s"] <= timeline["e2e_s"]
    assert sum(step["num_tokens"] for step in timeline["steps"]) == 12
