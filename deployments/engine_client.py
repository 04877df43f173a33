"""What the HTTP layer asks of an engine, wherever the engine runs.

Owns the protocol between a replica's HTTP side and its engine, and the shape of a health report. Does not know
sockets, actors or text: token ids go in, deltas come out.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Literal, Protocol

from engine.messages import Delta, Submit

HealthStatus = Literal["ok", "starting", "degraded", "restarting", "draining", "drained", "dead"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """How the engine is.

    `degraded` still serves (say, without its draft); `restarting` accepts requests, which wait until a new engine is
    there; `draining` finishes what runs, and `drained` has; `starting` and `dead` do neither.
    """

    status: HealthStatus
    reason: str = ""
    """Why it is not `ok`, for a person."""
    draft: str = "none"
    """State of the draft, in the engine's own words."""

    @property
    def is_serving(self) -> bool:
        return self.status in ("ok", "degraded")


class EngineClient(Protocol):
    """A running engine as seen by one HTTP process."""

    def generate(self, submit: Submit) -> AsyncGenerator[Delta, None]:
        """Run one request; an async generator function.

        Yields a Delta per step that emitted tokens for it, the last with `finish_reason`. Closing the generator
        early, or cancelling the task that waits on it, aborts the request in the engine at once.

        Raises:
            QueueFull: admission control refused it.
            InvalidRequest: the engine found a bad value that the HTTP layer cannot see.
            EngineUnavailable: starting, draining or dead.
            EngineError: anything else that ended it.
        """
        ...

    async def health(self) -> Health:
        """How the engine is now. Answers at once, also when the engine hangs."""
        ...
