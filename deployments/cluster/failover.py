"""Failover: when an engine fails, its requests continue on the next engine after the tokens they have.

Owns the retry. Emitted tokens are never generated again, and counts add up over the engines. A request that ran on too
many failing engines ends with the error, because it may be the cause. Implements `EngineClient`. Does not know how
engines are started.

    engine 1    p p p | a b c X            a b c reach the client, then the engine fails
    engine 2    p p p a b c | d e f        prompt and tokens are prefilled; d is sampled from the same distribution

Greedy and seeded requests get the same tokens as without the failure, because each token is a function of the tokens
before it. Other requests get new samples from the same distribution.
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
"""Number of failing engines after which a request ends with the error."""
_log = logging.getLogger(__name__)


class Connection(Protocol):
    """The connection to one engine."""

    def generate(self, submit: Submit) -> AsyncGenerator[Delta, None]:
        """See `EngineClient.generate`."""
        ...


class EngineSource(Protocol):
    """Provides engines."""

    async def client(self, timeout_s: float) -> Connection:
        """The engine that serves now, or the next one within `timeout_s` seconds. Raises EngineUnavailable."""
        ...

    async def health(self) -> Health:
        """The state of the engine."""
        ...


class ContinuedEngine:
    """Successive engines as one.

    Args:
        source: provides the engines.
        patience_s: seconds that a request waits for the next engine.
    """

    def __init__(self, source: EngineSource, *, patience_s: float) -> None:
        self._source = source
        self._patience_s = patience_s
        self.num_continued = 0
        """Number of times a request continued on another engine."""

    async def health(self) -> Health:
        """See `EngineClient.health`."""
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
                _log.warning("request %s continues on another engine: %s", submit.request_id, error)
                progress.start_over()
            finally:
                await deltas.aclose()


class _Progress:
    """The progress of a request over all its engines."""

    def __init__(self, submit: Submit) -> None:
        self._submit = submit
        self._tokens: list[int] = list(submit.generated)
        self._last: Delta | None = None  # the latest delta, with totals over all engines
        self._before: Delta | None = None  # the last delta of the engines before this one

    def rest(self) -> Submit:
        """The request for the next engine: the rest of the work."""
        sampling = self._submit.sampling
        if self._last is not None:  # the first delta carried the log-probabilities of the prompt
            sampling = replace(sampling, num_prompt_logprobs=None)
        return replace(self._submit, sampling=sampling, generated=tuple(self._tokens))

    def start_over(self) -> None:
        """Add later deltas to the totals so far."""
        self._before = self._last

    def add(self, delta: Delta) -> Delta:
        """The same delta with totals over all engines."""
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
