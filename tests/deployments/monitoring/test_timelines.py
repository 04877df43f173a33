"""The timeline of a request, and its metrics, log line and spans. Every request ends in exactly one way."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from api_harness import SCRIPT, make_engine
from fake_engine import FakeEngine
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from deployments.monitoring.request_log import OUR_LOGGERS, count_request, log_as_json, log_request
from deployments.monitoring.timelines import MAX_STEPS, TimedEngine, Timeline, note
from deployments.monitoring.tracing import Tracing, make_exporter, trace_request
from engine.errors import ConfigError, EngineUnavailable
from engine.messages import Delta, SamplingParams, Submit
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


@pytest.fixture
def json_log() -> Iterator[io.StringIO]:
    out = io.StringIO()
    states = {name: (logging.getLogger(name).propagate, logging.getLogger(name).level) for name in OUR_LOGGERS}
    handler = log_as_json(out)
    yield out
    for name, (propagate, level) in states.items():
        logger = logging.getLogger(name)
        logger.removeHandler(handler)
        logger.propagate = propagate
        logger.setLevel(level)


def test_one_json_line_per_request(json_log: io.StringIO) -> None:
    timeline, _ = run(make_engine())
    log_request(timeline)
    try:
        raise ValueError("naïve\nand on two lines")
    except ValueError:
        logging.getLogger("engine.x").exception("trouble")
    first, second = map(json.loads, json_log.getvalue().splitlines())
    assert first["request_id"] == "r"
    assert (first["outcome"], first["num_tokens"], first["level"]) == ("length", 6, "info")
    assert first["ttft_s"] == timeline.ttft_s
    assert "naïve\nand" in second["exception"]


def spans_of(timeline: Timeline) -> dict[str, ReadableSpan]:
    memory = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    trace_request(provider.get_tracer("test"), timeline)
    return {span.name: span for span in memory.get_finished_spans()}


def test_spans_follow_each_other() -> None:
    timeline, _ = run(make_engine(max_step=1, step_s=0.002))
    timeline.queue_s = 0.001
    spans = spans_of(timeline)
    assert set(spans) == {"request", "queue", "prefill", "decode"}
    root = spans["request"]
    assert all(s.parent is not None and s.parent.span_id == root.context.span_id for s in spans.values() if s != root)
    assert spans["queue"].end_time == spans["prefill"].start_time
    assert spans["prefill"].end_time == spans["decode"].start_time
    assert spans["decode"].end_time == root.end_time
    assert len(spans["decode"].events) == len(timeline.steps) - 1
    assert sum(e.attributes["tokens"] for e in spans["decode"].events) == timeline.num_tokens - 1  # type: ignore[index,misc]


def test_a_refused_request_is_one_failed_span() -> None:
    timeline, _ = run(make_engine(refusal=EngineUnavailable("starting")))
    spans = spans_of(timeline)
    assert set(spans) == {"request"}
    assert not spans["request"].status.is_ok


def test_trace_file_has_a_json_object_per_span(tmp_path: Path) -> None:
    exporter = make_exporter(str(tmp_path / "traces" / "spans.jsonl"), None)
    assert exporter is not None
    tracing = Tracing(exporter, {"app": "a"})
    timeline, _ = run(make_engine())
    tracing.record(timeline)
    tracing.close()
    spans = [json.loads(line) for line in (tmp_path / "traces" / "spans.jsonl").read_text().splitlines()]
    assert {span["name"] for span in spans} == {"request", "queue", "prefill", "decode"}
    assert {span["resource"]["attributes"]["app"] for span in spans} == {"a"}


def test_trace_settings_are_checked(tmp_path: Path) -> None:
    assert make_exporter(None, None) is None
    with pytest.raises(ConfigError, match="trace_file, trace_endpoint"):
        make_exporter("x", "http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="trace_file"):
        make_exporter(str(tmp_path), None)
