"""Every way in which the engine refuses or fails, as one tree.

    PacelineError
    ├── ConfigError              a setting is wrong; raised at start
    ├── RequestError             the client's fault
    │   ├── InvalidRequest       a field has a bad value
    │   └── QueueFull            admission control refused it; retry later
    └── EngineError              our fault
        ├── EngineUnavailable    starting, draining or dead
        ├── DraftDown            the draft died, hung or answered for another epoch; costs speculation only
        └── ShardDown            a target shard died or hung; ends the engine

`deployments` maps these to HTTP in one table. This file knows no HTTP.
"""

from __future__ import annotations


class PacelineError(Exception):
    """Root of all errors raised on purpose."""


class ConfigError(PacelineError):
    """A setting is wrong. The message names the field, what was given and what is allowed."""


class RequestError(PacelineError):
    """The request cannot be served as it was sent."""


class InvalidRequest(RequestError):
    """A field of the request has a bad value.

    Args:
        message: what is wrong and what is allowed.
        field: name of the offending field, as the client wrote it.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class QueueFull(RequestError):
    """The waiting queue is full.

    Args:
        retry_after_s: seconds after which a retry has a fair chance.
    """

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineError(PacelineError):
    """The engine cannot do its work."""


class EngineUnavailable(EngineError):
    """The engine is starting, draining or dead."""


class DraftDown(EngineError):
    """The draft is dead, hung past its deadline, or answered for another epoch."""


class ShardDown(EngineError):
    """A target shard is dead or hung past its deadline."""
