"""Runs one request through an engine that records timelines."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from fake_engine import FakeEngine

from deployments.monitoring.request_log import AdapterLabels, count_request
from deployments.monitoring.timelines import TimedEngine, Timeline
from engine.messages import AdapterRef, SamplingParams, Submit
from engine.metrics.counters import MetricCounters, MetricSnapshot


def submit(name: str = "r", max_tokens: int = 6) -> Submit:
    return Submit(request_id=name, prompt=(1, 2, 3, 4), sampling=SamplingParams(max_tokens=max_tokens))


def run(
    engine: FakeEngine, *, leave_after: int | None = None, keep: int = 8, adapter: AdapterRef | None = None
) -> tuple[Timeline, MetricSnapshot]:
    """Run one request. The client disconnects after `leave_after` deltas."""
    counters, labels, ended, raised = MetricCounters(), AdapterLabels(), [], []

    async def go() -> None:
        timed = TimedEngine(
            engine, [ended.append, lambda timeline: count_request(timeline, counters, labels)], keep=keep
        )
        messages = timed.generate(replace(submit(), adapter=adapter))
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
