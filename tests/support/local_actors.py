"""Plain objects behind the calling convention of a Ray actor handle, in this process and its event loop."""

from __future__ import annotations

import asyncio
from typing import Any


class LocalActor:
    """`handle.method.remote(...)` starts a coroutine method of `target` and returns its awaitable result.

    Args:
        target: object whose methods are coroutines.
    """

    def __init__(self, target: Any) -> None:
        self.target = target

    def __getattr__(self, name: str) -> _Method:
        return _Method(getattr(self.target, name))


class _Method:
    def __init__(self, method: Any) -> None:
        self._method = method

    def remote(self, *values: Any, **arguments: Any) -> asyncio.Task[Any]:
        return asyncio.ensure_future(self._method(*values, **arguments))
