"""Timelines of requests: recorded once, and used by metrics, traces, logs and the debug route.

Owns the record and the wrapper around an engine that fills it. The use of a finished record is injected.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from deployments.engine_client import EngineClient, Health
from engine.errors import EngineUnavailable, InvalidRequest, QueueFull
from engine.messages import Delta, Submit
from engine.metrics.labels import REJECT_CAUSES

MAX_STEPS = 1024
"""Number of steps of a request that are kept individually."""


class TimelineStep(Struct, frozen=True, gc=False):
    """One delta of a request."""

    at_s: float
    """Seconds from the request's arrival to the delta."""
    num_tokens: int
    """Number of tokens in the delta."""
    num_drafted: int
    """Number of draft tokens that the step verified."""
    num_accepted: int
    """Number of draft tokens that the step accepted."""


@dataclass(slots=True, kw_only=True)
class Timeline:
    """One request. Durations start at its arrival in this process."""

    request_id: str
    """Id of the request within the engine."""
    num_prompt: int
    """Number of prompt tokens."""
    adapter: str = ""
    """Name of the adapter that computes it; empty for the base model."""
    arrived_s: float
    """Unix time of its arrival, in seconds."""
    queue_s: float | None = None
    """Seconds to its first step; None before that."""
    ttft_s: float | None = None
    """Seconds to its first token; None before that."""
    e2e_s: float | None = None
    """Seconds to its end; None while it runs."""
    outcome: str = "running"
    """`running`, then a finish reason, or the cause if the engine refused the request."""
    error: str | None = None
    """Message of the exception that ended it; None without one."""
    num_tokens: int = 0
    """Number of generated tokens."""
    num_cached: int = 0
    """Number of prompt tokens found in the prefix cache."""
    num_drafted: int = 0
    """Number of draft tokens that were verified."""
    num_accepted: int = 0
    """Number of draft tokens that were accepted."""
    gaps_s: list[float] = field(default_factory=list)
    """Seconds between successive deltas, of the first MAX_STEPS deltas."""
    steps: list[TimelineStep] = field(default_factory=list)
    """The first MAX_STEPS deltas."""

    @property
    def is_refused(self) -> bool:
        """Whether the request ended before the engine accepted it."""
        return self.outcome in REJECT_CAUSES

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first delta; None if there are no such tokens."""
        if self.ttft_s is None or self.e2e_s is None or not self.steps or self.num_tokens <= self.steps[0].num_tokens:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_tokens - self.steps[0].num_tokens)


Sink = Callable[[Timeline], None]


class TimedEngine:
    """An engine whose requests are recorded. Implements `EngineClient`.

    Args:
        engine: runs the requests.
        sinks: called with the timeline of every finished request, in this event loop; must not block.
        keep: number of recent timelines that `find` returns.
    """

    def __init__(self, engine: EngineClient, sinks: Sequence[Sink], *, keep: int) -> None:
        self._engine = engine
        self._sinks = tuple(sinks)
        self._keep = keep
        self._timelines: OrderedDict[str, Timeline] = OrderedDict()

    def find(self, request_id: str) -> Timeline | None:
        """The timeline of a running or recent request; None for others."""
        return self._timelines.get(request_id)

    async def health(self) -> Health:
        """See `EngineClient.health`."""
        return await self._engine.health()

    async def generate(self, submit: Submit) -> AsyncGenerator[Delta, None]:
        """See `EngineClient.generate`."""
        begin = time.monotonic()
        timeline = Timeline(
            request_id=submit.request_id,
            num_prompt=len(submit.prompt),
            adapter="" if submit.adapter is None else submit.adapter.name,
            arrived_s=time.time(),
        )
        self._remember(timeline)
        outcome = "abort"
        try:
            deltas = self._engine.generate(submit)
            try:
                async for delta in deltas:
                    note(timeline, delta, time.monotonic() - begin)
                    outcome = delta.finish_reason or outcome
                    yield delta
            finally:
                await deltas.aclose()
        except Exception as error:
            timeline.error = str(error)
            outcome = _refusal(error) if timeline.ttft_s is None else "error"
            raise
        finally:
            timeline.outcome = outcome
            timeline.e2e_s = time.monotonic() - begin
            for sink in self._sinks:
                sink(timeline)

    def _remember(self, timeline: Timeline) -> None:
        self._timelines[timeline.request_id] = timeline
        self._timelines.move_to_end(timeline.request_id)
        while len(self._timelines) > self._keep:
            self._timelines.popitem(last=False)


def note(timeline: Timeline, delta: Delta, at_s: float) -> None:
    """Record a delta that came `at_s` seconds after the request's arrival."""
    timeline.queue_s = delta.queue_s
    if delta.token_ids:
        if timeline.ttft_s is None:
            timeline.ttft_s = at_s
        elif len(timeline.gaps_s) < MAX_STEPS:
            timeline.gaps_s.append(at_s - timeline.steps[-1].at_s)
        step = TimelineStep(
            at_s,
            len(delta.token_ids),
            delta.num_drafted - timeline.num_drafted,
            delta.num_accepted - timeline.num_accepted,
        )
        if len(timeline.steps) < MAX_STEPS:
            timeline.steps.append(step)
    timeline.num_tokens += len(delta.token_ids)
    timeline.num_cached = delta.num_cached
    timeline.num_drafted = delta.num_drafted
    timeline.num_accepted = delta.num_accepted


def _refusal(error: Exception) -> str:
    """The outcome of a request that failed before its first token: the cause if it was refused, else `error`."""
    causes = {EngineUnavailable: "unavailable", InvalidRequest: "invalid_request", QueueFull: "queue_full"}
    return next((cause for kind, cause in causes.items() if isinstance(error, kind)), "error")
