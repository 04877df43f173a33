"""The timeline of a request as OpenTelemetry spans: request > queue, prefill, decode; each step is an event.

Owns the names and attributes of spans, and their destination. Spans are created after a request has ended, from the
recorded times, so tracing costs nothing while the request runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, Status, StatusCode, Tracer, set_span_in_context

from deployments.monitoring.timelines import Timeline
from engine.errors import ConfigError


class Tracing:
    """Sends the spans of finished requests.

    Args:
        exporter: sends or writes the spans.
        attributes: resource attributes of the process: app, replica, model.
    """

    def __init__(self, exporter: SpanExporter, attributes: dict[str, str]) -> None:
        self._provider = TracerProvider(resource=Resource({"service.name": "paceline", **attributes}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("paceline")

    def record(self, timeline: Timeline) -> None:
        """Send the spans of a finished request."""
        trace_request(self._tracer, timeline)

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()


class FileExporter(SpanExporter):
    """Appends spans to a file, one JSON object per line. Raises OSError if the file cannot be opened."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._out = path.open("a")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._out.writelines(f"{span.to_json(indent=None)}\n" for span in spans)
        self._out.flush()
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._out.close()


def make_exporter(file: str | None, endpoint: str | None) -> SpanExporter | None:
    """The exporter that the settings ask for; None without one.

    Args:
        file: path of a file for the spans.
        endpoint: URL of an OTLP/HTTP endpoint.

    Raises:
        ConfigError: both are given, the file cannot be opened, or the package for the endpoint is not installed.
    """
    if file is not None and endpoint is not None:
        raise ConfigError("trace_file, trace_endpoint: both given; allowed is one of them")
    if file is not None:
        try:
            return FileExporter(Path(file).expanduser())
        except OSError as error:
            raise ConfigError(f"trace_file: {file}: {error}") from None
    if endpoint is None:
        return None
    try:
        package = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ImportError:
        raise ConfigError(
            f"trace_endpoint: {endpoint} given; sending needs the package opentelemetry-exporter-otlp-proto-http"
        ) from None
    exporter: SpanExporter = package.OTLPSpanExporter(endpoint=endpoint)
    return exporter


def trace_request(tracer: Tracer, timeline: Timeline) -> None:
    """Create the spans of a finished request."""

    def at(seconds: float) -> int:
        return int((timeline.arrived_s + seconds) * 1e9)

    end_s = timeline.e2e_s or 0.0
    root = tracer.start_span("request", start_time=at(0.0), attributes=_attributes(timeline))
    context = set_span_in_context(root)

    def child(name: str, begin_s: float, stop_s: float) -> Span:
        span = tracer.start_span(name, context=context, start_time=at(begin_s))
        if name == "decode":
            for step in timeline.steps[1:]:
                counts = {"tokens": step.num_tokens, "drafted": step.num_drafted, "accepted": step.num_accepted}
                span.add_event("step", counts, timestamp=at(step.at_s))
        span.end(at(max(begin_s, stop_s)))
        return span

    if timeline.queue_s is not None:
        child("queue", 0.0, timeline.queue_s)
        child("prefill", timeline.queue_s, timeline.ttft_s if timeline.ttft_s is not None else end_s)
    if timeline.ttft_s is not None:
        child("decode", timeline.ttft_s, end_s)
    if timeline.error is not None:
        root.set_status(Status(StatusCode.ERROR, timeline.error))
    root.end(at(end_s))


def _attributes(timeline: Timeline) -> dict[str, str | int]:
    return {
        "request.id": timeline.request_id,
        "outcome": timeline.outcome,
        "tokens.prompt": timeline.num_prompt,
        "tokens.cached": timeline.num_cached,
        "tokens.generated": timeline.num_tokens,
        "tokens.drafted": timeline.num_drafted,
        "tokens.accepted": timeline.num_accepted,
    }
