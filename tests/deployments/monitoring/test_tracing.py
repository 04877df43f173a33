"""The timeline of a request as OpenTelemetry spans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from api_harness import make_engine
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from recorded import run

from deployments.monitoring.timelines import Timeline
from deployments.monitoring.tracing import Tracing, make_exporter, trace_request
from engine.errors import ConfigError, EngineUnavailable


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
