"""A request outlives its engine: when one goes away, the request goes on with the next from the tokens it has.

Owns the retry: what was emitted is never asked for again, counts add up over the engines, and a request that was aboard
of too many failing engines ends with the error, because it may be their cause. Implements `EngineClient`. Does not know
how engines are made.

    engine 1    p p p | a b c X            a b c reach the client, then the engine dies
    engine 2    p p p a b c | d e f        prompt and tokens are computed again; d is the next token of the same law

Greedy and seeded requests get exactly the tokens they would have got, because both are functions of what precedes;
others get fresh draws from the same law.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Protocol

import msgspec

from deployments.engine_client import Health
from engine.errors import EngineUnavailable
from engine.messages import Delta, Submit

MAX_ENGINES = 3
"""A request that was aboard of this many engines when they failed is not given to another one."""
_log = logging.getLogger(__name__)


class Connection(Protocol):
    """One engine, as long as it lives."""

    def generate(self, submit: Submit) -> AsyncGenerator[Delta, None]:
        """See `EngineClient.generate`."""
        ...


class EngineSource(Protocol):
    """Where engines come from."""

    async def client(self, timeout_s: float) -> Connection:
        """The engine that serves now, or the next one within `timeout_s`. Raises EngineUnavailable."""
        ...

    async def health(self) -> Health:
        """How the engine is now."""
        ...


class ContinuedEngine:
    """Engines in succession, as one.

    Args:
        source: of engines.
        patience_s: how long a request waits for the next engine.
    """

    def __init__(self, source: EngineSource, *, patience_s: float) -> None:
        self._source = source
        self._patience_s = patience_s
        self.num_continued = 0
        """Requests that were handed to another engine so far."""

    async def health(self) -> Health:
        return await self._source.health()

    async def generate(self, submit: Submit) -> AsyncGenerator[Delta, None]:
        """See `EngineClient.generate`."""
        progress = _Progress(submit)
        for attempt in range(1, MAX_ENGINES + 1):
            engine = await self._source.client(self._patience_s)
            deltas = engine.generate(progress.rest())
            try:
                async for delta in deltas:
                    yield progress.add(delta)
                return
            except EngineUnavailable as error:
                if attempt == MAX_ENGINES:
                    raise
                self.num_continued += 1
                _log.warning("request %s goes on elsewhere: %s", submit.request_id, error)
                progress.start_over()
            finally:
                await deltas.aclose()


class _Progress:
    """How far a request has come, over all its engines."""

    def __init__(self, submit: Submit) -> None:
        self._submit = submit
        self._tokens: list[int] = list(submit.generated)
        self._last: Delta | None = None  # with totals over all engines
        self._before: Delta | None = None  # the last one of the engines before this one

    def rest(self) -> Submit:
        """What is left to do."""
        sampling = self._submit.sampling
        if self._last is not None:  # the prompt's own log-probabilities went with the first tokens
            sampling = replace(sampling, num_prompt_logprobs=None)
        return replace(self._submit, sampling=sampling, generated=tuple(self._tokens))

    def start_over(self) -> None:
        self._before = self._last

    def add(self, delta: Delta) -> Delta:
        """The same with totals over all engines."""
        self._tokens += delta.token_ids
        before = self._before
        if before is not None:
            delta = msgspec.structs.replace(
                delta,
                num_cached=before.num_cached,
                num_drafted=before.num_drafted + delta.num_drafted,
                num_accepted=before.num_accepted + delta.num_accepted,
                queue_s=before.queue_s,
            )
        self._last = delta
        return delta
