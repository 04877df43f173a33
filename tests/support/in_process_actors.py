"""Ray actors in this process: objects whose methods have `.remote()`, and which can die or stop responding.

No Ray runs. A call starts a task of the running event loop and returns it, so callers await it as they await a Ray
object reference. Errors are Ray's own.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from ray.exceptions import ActorDiedError


class InProcessActor:
    """An actor around an object.

    Args:
        instance: its methods are the actor's; each may be a plain function or a coroutine function.
    """

    def __init__(self, instance: Any) -> None:
        self.instance = instance
        self.is_dead = False
        self.is_stopped = False
        """A stopped process neither responds nor ends."""
        self._calls: set[asyncio.Future[Any]] = set()

    def __getattr__(self, name: str) -> _Method:
        return _Method(self, getattr(self.instance, name))

    def die(self) -> None:
        """End the process: calls in progress and later ones raise ActorDiedError."""
        self.is_dead = True
        for call in tuple(self._calls):
            if not call.done():
                call.set_exception(ActorDiedError())

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self.is_dead:
            result.set_exception(ActorDiedError())
            return result
        self._calls.add(result)
        result.add_done_callback(self._calls.discard)
        if not self.is_stopped:
            task = asyncio.ensure_future(_run(method, *args, **kwargs))
            result.add_done_callback(lambda _: task.cancel())
            task.add_done_callback(lambda done: _settle(result, done))
        return result


class _Method:
    def __init__(self, owner: InProcessActor, method: Callable[..., Any]) -> None:
        self._owner = owner
        self._method = method

    def remote(self, *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        return self._owner.call(self._method, *args, **kwargs)


async def _run(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = method(*args, **kwargs)
    return await result if inspect.isawaitable(result) else result


def _settle(result: asyncio.Future[Any], done: asyncio.Task[Any]) -> None:
    if result.done() or done.cancelled():
        return
    error = done.exception()
    if error is not None:
        result.set_exception(error)
    else:
        result.set_result(done.result())


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Return once `condition` holds. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.001)
