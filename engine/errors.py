"""The exceptions that the engine raises on purpose, as one tree.

    PacelineError
    ├── ConfigError              a setting is wrong; raised at start
    ├── RequestError             the request cannot be served
    │   ├── InvalidRequest       a field has a bad value
    │   └── QueueFull            admission control refused it; retry later
    └── EngineError              the engine cannot do its work
        ├── EngineUnavailable    starting, draining or dead
        ├── DraftDown            the draft died or hung; requests go on without drafts
        └── ShardDown            a target shard died or hung; the engine ends

`deployments` maps these to HTTP in one table. This file knows no HTTP.
"""

from __future__ import annotations


class PacelineError(Exception):
    """Root of the tree."""


class ConfigError(PacelineError):
    """A setting is wrong. The message names the field, what was given and what is allowed."""


class RequestError(PacelineError):
    """The request cannot be served. Sending it again unchanged helps only after QueueFull."""


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
        retry_after_s: seconds after which the client should retry.
    """

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineError(PacelineError):
    """The engine cannot do its work."""


class EngineUnavailable(EngineError):
    """The engine is starting, draining or dead."""


class DraftDown(EngineError):
    """The draft is dead, missed its deadline, or sent a response of another epoch."""


class ShardDown(EngineError):
    """A target shard is dead or missed its deadline."""
