"""Runs one request through an engine that records timelines."""

from __future__ import annotations

import asyncio

from fake_engine import FakeEngine

from deployments.monitoring.request_log import count_request
from deployments.monitoring.timelines import TimedEngine, Timeline
from engine.messages import SamplingParams, Submit
from engine.metrics.counters import MetricCounters, MetricSnapshot


def submit(name: str = "r", max_tokens: int = 6) -> Submit:
    return Submit(request_id=name, prompt=(1, 2, 3, 4), sampling=SamplingParams(max_tokens=max_tokens))


def run(engine: FakeEngine, *, leave_after: int | None = None, keep: int = 8) -> tuple[Timeline, MetricSnapshot]:
    """Run one request. The client disconnects after `leave_after` deltas."""
    counters, ended, raised = MetricCounters(), [], []

    async def go() -> None:
        timed = TimedEngine(engine, [ended.append, lambda timeline: count_request(timeline, counters)], keep=keep)
        messages = timed.generate(submit())
        try:
            seen = 0
            async for _ in messages:
                seen += 1
                if seen == leave_after:
                    break
        except Exception as error:  # noqa: BLE001 - whatever the engine raises
            raised.append(error)
        await messages.aclose()

    asyncio.run(go())
    (timeline,) = ended
    assert [str(error) for error in raised] == ([timeline.error] if timeline.error is not None else [])
    return timeline, counters.read()
