"""When what happened to a request: recorded once, as it passes, and read by metrics, traces, logs and the debug page.

Owns the record and the wrapper around an engine that fills it. What is done with a finished record is injected.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from deployments.engine_client import EngineClient, Health
from engine.errors import EngineUnavailable, QueueFull
from engine.messages import Delta, Submit

MAX_STEPS = 1024
"""Steps of a request that are kept one by one."""


class TimelineStep(Struct, frozen=True, gc=False):
    """One message of a request."""

    at_s: float
    """Seconds after arrival."""
    num_tokens: int
    num_drafted: int
    """Draft tokens verified in it."""
    num_accepted: int


@dataclass(slots=True, kw_only=True)
class Timeline:
    """One request. Durations count from its arrival in this process."""

    request_id: str
    num_prompt: int
    arrived_s: float
    """Unix time."""
    queue_s: float | None = None
    """Until its first step; None while that is not known."""
    ttft_s: float | None = None
    e2e_s: float | None = None
    """Until its end; None while it runs."""
    outcome: str = "running"
    """Then a finish reason, or `queue_full` or `unavailable` when it was refused."""
    error: str | None = None
    num_tokens: int = 0
    num_cached: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    gaps_s: list[float] = field(default_factory=list)
    """Between messages, of the first MAX_STEPS."""
    steps: list[TimelineStep] = field(default_factory=list)
    """The first MAX_STEPS."""

    @property
    def is_refused(self) -> bool:
        return self.outcome in ("queue_full", "unavailable")

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first message's, where there are any."""
        if self.ttft_s is None or self.e2e_s is None or not self.steps or self.num_tokens <= self.steps[0].num_tokens:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_tokens - self.steps[0].num_tokens)


Sink = Callable[[Timeline], None]


class TimedEngine:
    """An engine whose requests are recorded. Implements `EngineClient`.

    Args:
        engine: does the work.
        sinks: told of every request that ended, in this event loop; must be quick.
        keep: timelines that `find` knows, the last ones.
    """

    def __init__(self, engine: EngineClient, sinks: Sequence[Sink], *, keep: int) -> None:
        self._engine = engine
        self._sinks = tuple(sinks)
        self._keep = keep
        self._timelines: OrderedDict[str, Timeline] = OrderedDict()

    def find(self, request_id: str) -> Timeline | None:
        """The timeline of a request that runs or was among the last."""
        return self._timelines.get(request_id)

    async def health(self) -> Health:
        return await self._engine.health()

    async def generate(self, submit: Submit) -> AsyncGenerator[Delta, None]:
        """See `EngineClient.generate`."""
        begin = time.monotonic()
        timeline = Timeline(request_id=submit.request_id, num_prompt=len(submit.prompt), arrived_s=time.time())
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
    """Enter a message that came `at_s` seconds after arrival."""
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
    if isinstance(error, QueueFull):
        return "queue_full"
    return "unavailable" if isinstance(error, EngineUnavailable) else "error"
