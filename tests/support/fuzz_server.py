"""The HTTP application for fuzzing: the routes with a body, and one application for all cases of a test."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import httpx
from api_harness import CHAT, COMPLETION, dependencies, make_engine
from prometheus_client import CollectorRegistry, generate_latest

from autoscale.control.controller import Controller
from autoscale.control.history import History, HistoryView
from autoscale.control.metric_targets import MetricTarget
from deployments.http.access import Access
from deployments.http.admin import AdminDependencies, add_admin_routes
from deployments.http.app import build_api
from deployments.http.ui_routes import add_ui_routes
from deployments.monitoring.exporter import SnapshotCollector
from deployments.monitoring.metrics_route import add_metrics_route, add_targets_route
from deployments.responses_api.store import ResponseStore
from deployments.settings import StoredResponsesSettings
from engine.core.pacing import SpeculationPlan
from engine.metrics.counters import MetricCounters
from engine.metrics.labels import COMMON_LABELS

URLS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/responses": {"model": "tiny", "input": "go"},
    "/tokenize": {"model": "tiny", "prompt": "go"},
    "/detokenize": {"model": "tiny", "tokens": [1, 2]},
}
JSON_TYPE = [(b"content-type", b"application/json")]


class Server:
    """One application for all cases of a test."""

    def __init__(self, access: Access | None = None) -> None:
        self.engine = make_engine(max_step=50)
        self._loop = asyncio.new_event_loop()
        needed = replace(dependencies(self.engine), responses=ResponseStore(StoredResponsesSettings(max_responses=20)))
        self.app = build_api(needed, access)
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    def post(self, url: str, content: bytes, headers: list[tuple[bytes, bytes]]) -> httpx.Response:
        return self.send("POST", url, content=content, headers=headers)

    def send(self, method: str, url: str, **options: Any) -> httpx.Response:
        begin = time.monotonic()
        response = self._loop.run_until_complete(self._client.request(method, url, **options))
        assert time.monotonic() - begin < 20, "a hang"
        assert self.engine.running == set(), "a request was left running"
        return response

    def check(self, response: httpx.Response) -> None:
        """A response, or an error of the shape that OpenAI uses, with a 4xx status."""
        assert response.status_code == 200 or 400 <= response.status_code < 500, response.text
        if response.status_code != 200:
            assert response.json()["error"].keys() == {"message", "type", "param", "code"}
            assert len(response.content) < 4000, "an error does not send a whole body back"


class OperatedServer(Server):
    """A server with the routes of operators and of the page."""

    key = "a key of the operator"

    def __init__(self) -> None:
        super().__init__()
        controller = Controller(SpeculationPlan(version=1, policy="goodput", max_k=4, max_batch=16))
        counters = MetricCounters()
        registry = CollectorRegistry()
        registry.register(SnapshotCollector(counters.read, dict.fromkeys(COMMON_LABELS, "x")))

        async def plan() -> SpeculationPlan:
            return controller.plan()

        async def override(changes: dict[str, Any]) -> SpeculationPlan:
            return controller.override(**changes)

        async def history(since_s: float) -> HistoryView:
            return History().view(since_s, controller.plan(), 1e9)

        async def targets() -> tuple[MetricTarget, ...]:
            return controller.targets()

        admin = AdminDependencies(key=self.key, plan=plan, override=override, max_k=4, find=lambda name: None)
        add_admin_routes(self.app, admin)
        add_ui_routes(self.app, model_name="tiny", history=history, health=self.engine.health)
        add_metrics_route(self.app, lambda: generate_latest(registry))
        add_targets_route(self.app, targets)
