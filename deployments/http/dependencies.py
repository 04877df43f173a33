"""What the HTTP application needs from outside, handed to every part of it that answers.

Owns the names only, so that routes and what they call share one definition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from deployments.engine_client import EngineClient
from deployments.http.admission import Admission
from deployments.openai.prompts import ApiLimits
from deployments.text.tokenizer import TextCodec

MAX_UNBOUNDED = 1 << 30
"""Answers in flight where nobody says how many may be."""


class RunningId:
    """An id in use until it is released; releasing it again changes nothing."""

    def __init__(self, request_id: str, ids: set[str]) -> None:
        self.request_id = request_id
        self._ids: set[str] | None = ids

    def release(self) -> None:
        if self._ids is not None:
            self._ids.discard(self.request_id)
            self._ids = None


class RunningIds:
    """Ids of the requests that run now; each is unique within the engine."""

    def __init__(self) -> None:
        self._ids: set[str] = set()

    def claim(self, wanted: str) -> RunningId:
        """The wanted id, or with a number appended where a request of that id still runs."""
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
    """All that the routes need from outside."""

    client_provider: Callable[[], EngineClient]
    """The engine now; may raise EngineUnavailable."""
    codec: TextCodec
    model_name: str
    created: int
    """When the model was made available, unix seconds."""
    limits: ApiLimits
    system_fingerprint: str | None = None
    running: RunningIds = field(default_factory=RunningIds)
    admission: Admission = field(default_factory=lambda: Admission(MAX_UNBOUNDED))
    timeout_s: float = 3600.0
    """Longest time that an answer may take; requests may ask for less."""
