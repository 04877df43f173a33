"""The interface between the HTTP layer and an engine, wherever the engine runs.

Owns the protocols `EngineClient` and `AdapterTarget`, and the health report. Knows no sockets, actors or text: token
ids go in, deltas come out.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from engine.messages import AdapterRef, Delta, Submit

HealthStatus = Literal["ok", "starting", "degraded", "restarting", "draining", "drained", "dead"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """State of an engine.

    ok           serves
    degraded     serves, but a part is missing, such as the draft
    restarting   accepts requests, which wait for the next engine
    draining     finishes the running requests and accepts no more
    drained      has finished them
    starting     accepts no requests yet
    dead         accepts no requests any more
    """

    status: HealthStatus
    reason: str = ""
    """Why the status is not `ok`, for a person."""
    draft: str = "none"
    """State of the draft: `none`, `up`, or `down` with the reason."""

    @property
    def is_serving(self) -> bool:
        """Whether the engine runs requests now."""
        return self.status in ("ok", "degraded")


class AdapterTarget(Protocol):
    """A target that adapters are loaded into."""

    async def load_adapter(self, adapter: AdapterRef, folder: Path) -> None:
        """Load an adapter, then accept requests for it. Loading it again changes nothing.

        Raises:
            ConfigError: it cannot be read or does not fit the target.
        """
        ...

    async def retire_adapter(self, number: int) -> None:
        """Accept no more requests for an adapter, wait until those that use it have ended, and free it."""
        ...


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """An adapter that clients may name as `model`."""

    ref: AdapterRef
    created: int
    """Unix time at which it was loaded, in seconds."""


class EngineClient(Protocol):
    """A running engine as seen by one HTTP process."""

    def generate(self, submit: Submit) -> AsyncGenerator[Delta, None]:
        """Run one request; an async generator function.

        Yields a Delta per step that emitted tokens for it. The last one has `finish_reason` `stop` or `length`; every
        other end is an exception. Closing the generator early, or cancelling the task that waits on it, aborts the
        request in the engine at once.

        Raises:
            InvalidRequest: the engine refuses a value that the HTTP layer cannot check, such as a grammar. `field` is
                the engine's name of it.
            EngineUnavailable: the engine is starting, draining or dead.
            EngineError: any other error that ended the request.
        """
        ...

    async def health(self) -> Health:
        """The state of the engine. Returns at once, even if the engine hangs."""
        ...
