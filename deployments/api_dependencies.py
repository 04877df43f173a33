"""What the HTTP application needs from outside, handed to every part of it that answers.

Owns the names only, so that routes and what they call share one definition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from deployments.admission import Admission
from deployments.engine_client import EngineClient
from deployments.generation import RunningIds
from deployments.prompts import ApiLimits
from deployments.text import TextCodec

MAX_UNBOUNDED = 1 << 30
"""Answers in flight where nobody says how many may be."""


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
