"""The HTTP application for fuzzing: the routes with a body, and one application for all cases of a test."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import httpx
from api_harness import CHAT, COMPLETION, dependencies, make_engine

from deployments.http.access import Access
from deployments.http.app import build_api
from deployments.responses_api.store import ResponseStore
from deployments.settings import StoredResponsesSettings

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
        transport = httpx.ASGITransport(build_api(needed, access), raise_app_exceptions=False)
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
