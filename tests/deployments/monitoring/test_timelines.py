"""The timeline of a request and its metrics. Every request ends in exactly one way."""

from __future__ import annotations

import asyncio

import pytest
from api_harness import SCRIPT, make_engine
from fake_engine import FakeEngine
from recorded import run, submit

from deployments.monitoring.timelines import MAX_STEPS, TimedEngine, Timeline, note
from engine.errors import EngineError, EngineUnavailable, InvalidRequest, QueueFull
from engine.messages import Delta


def test_a_request_that_ends_well() -> None:
    timeline, snapshot = run(make_engine(max_step=2, step_s=0.002))
    assert timeline.outcome == "length"
    assert timeline.num_tokens == sum(step.num_tokens for step in timeline.steps) == 6
    assert timeline.num_drafted == sum(step.num_drafted for step in timeline.steps)
    assert timeline.num_accepted == sum(step.num_accepted for step in timeline.steps)
    assert len(timeline.gaps_s) == len(timeline.steps) - 1
    assert timeline.ttft_s is not None
    assert timeline.e2e_s is not None
    assert timeline.ttft_s + sum(timeline.gaps_s) == pytest.approx(timeline.steps[-1].at_s)
    assert 0 < timeline.ttft_s <= timeline.steps[-1].at_s <= timeline.e2e_s
    assert snapshot.number("paceline_requests_total", "length") == 1
    assert snapshot.number("paceline_prompt_tokens_total") == 4
    assert snapshot.number("paceline_generated_tokens_total") == 6
    assert snapshot.number("paceline_prefix_cache_hit_tokens_total") == 2
    assert snapshot.histograms["paceline_itl_seconds"][()].num == len(timeline.gaps_s)
    for name in ("ttft", "e2e", "queue", "tpot"):
        assert snapshot.histograms[f"paceline_{name}_seconds"][()].num == 1


@pytest.mark.parametrize(
    ("engine", "leave_after", "outcome"),
    [
        (make_engine(script=SCRIPT[:3]), None, "length"),
        (make_engine(max_step=1), 2, "abort"),
        (make_engine(max_step=1, fail_after=3, failure=EngineUnavailable("gone")), None, "error"),
        (make_engine(max_step=1, fail_after=3, failure=RuntimeError("a bug")), None, "error"),
        (make_engine(refusal=EngineUnavailable("starting")), None, "unavailable"),
        (make_engine(refusal=InvalidRequest("no such rule", field="grammar")), None, "invalid_request"),
        (make_engine(refusal=QueueFull("full", retry_after_s=1)), None, "queue_full"),
        (make_engine(refusal=EngineError("a fault")), None, "error"),
    ],
)
def test_every_end_is_counted_once(engine: FakeEngine, leave_after: int | None, outcome: str) -> None:
    timeline, snapshot = run(engine, leave_after=leave_after)
    assert timeline.outcome == outcome
    ended = sum(snapshot.numbers.get("paceline_requests_total", {}).values())
    refused = sum(snapshot.numbers.get("paceline_rejected_total", {}).values())
    assert (ended, refused) == ((0, 1) if timeline.is_refused else (1, 0))
    assert (timeline.error is None) == (outcome in ("length", "abort"))


def test_only_the_last_timelines_are_kept() -> None:
    async def go() -> None:
        timed = TimedEngine(make_engine(), [], keep=2)
        for name in ("a", "b", "c"):
            async for _ in timed.generate(submit(name)):
                pass
        assert timed.find("a") is None
        assert [timed.find(name).request_id for name in ("b", "c")] == ["b", "c"]  # type: ignore[union-attr]

    asyncio.run(go())


def test_a_long_answer_keeps_a_bounded_number_of_steps() -> None:
    timeline = Timeline(request_id="r", num_prompt=1, arrived_s=0.0)
    for index in range(2 * MAX_STEPS):
        note(timeline, Delta(request_id="r", token_ids=(1,)), float(index))
    assert (len(timeline.steps), timeline.num_tokens) == (MAX_STEPS, 2 * MAX_STEPS)
    assert set(timeline.gaps_s) == {1.0}
