"""The dependencies of the HTTP application, passed to every route.

Owns `ApiDependencies` and the ids of running requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from deployments.engine_client import EngineClient, ServedAdapter
from deployments.http.admission import Admission
from deployments.openai.prompts import ApiLimits
from deployments.responses_api.store import ResponseStore
from deployments.text.tokenizer import TextCodec
from engine.messages import CheckGrammar

MAX_UNBOUNDED = 1 << 30
"""Capacity of the default admission: practically no bound."""


class RunningId:
    """An id in use until `release`. Releasing it twice has no effect."""

    def __init__(self, request_id: str, ids: set[str]) -> None:
        self.request_id = request_id
        self._ids: set[str] | None = ids

    def release(self) -> None:
        if self._ids is not None:
            self._ids.discard(self.request_id)
            self._ids = None


class RunningIds:
    """Ids of the requests that run now. Each id is unique within the engine."""

    def __init__(self) -> None:
        self._ids: set[str] = set()

    def claim(self, wanted: str) -> RunningId:
        """Reserve the wanted id, with a number appended if a request of that id still runs."""
        request_id, number = wanted, 1
        while request_id in self._ids:
            number += 1
            request_id = f"{wanted}-{number}"
        self._ids.add(request_id)
        return RunningId(request_id, self._ids)

    def __len__(self) -> int:
        return len(self._ids)


@dataclass(frozen=True, kw_only=True)
class ApiDependencies:
    """Everything that the routes need."""

    engine: EngineClient
    """The engine that runs the requests."""
    codec: TextCodec
    """Converts between text and token ids."""
    check_grammar: CheckGrammar
    """Checks the grammars of requests; called in threads."""
    model_name: str
    """Name of the base model, which requests send as `model`."""
    created: int
    """Unix time at which the server loaded the model, in seconds."""
    limits: ApiLimits
    """Bounds on bodies and prompts."""
    adapters: Mapping[str, ServedAdapter] = field(default_factory=dict)
    """Adapters that requests may send as `model` instead, by name; changes while the server runs."""
    system_fingerprint: str | None = None
    """Value of `system_fingerprint` in responses."""
    responses: ResponseStore | None = None
    """Stored responses; None stores none."""
    running: RunningIds = field(default_factory=RunningIds)
    """Ids of the requests that run now."""
    admission: Admission = field(default_factory=lambda: Admission(MAX_UNBOUNDED))
    """The only bound on choices in flight."""
    timeout_s: float = 3600.0
    """Longest time in seconds that a response may take. A request may ask for less."""
