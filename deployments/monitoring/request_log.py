"""The timeline of a finished request as metrics of the replica, and as one structured log line.

Owns the mapping from timelines to metrics, and the JSON log format.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import IO

from deployments.monitoring.timelines import Timeline
from engine.metrics.counters import MetricCounters

_log = logging.getLogger(__name__)


MAX_ADAPTERS = 64
"""Adapters that metrics tell apart. Further ones count as OTHER."""
OTHER = "other"


class AdapterLabels:
    """Values of the label `adapter`: the names of the first MAX_ADAPTERS adapters that had a request."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def of(self, name: str) -> str:
        """The label of an adapter."""
        if name not in self._names and len(self._names) < MAX_ADAPTERS:
            self._names.add(name)
        return name if name in self._names else OTHER


def count_request(timeline: Timeline, counters: MetricCounters, labels: AdapterLabels) -> None:
    """Count a finished request."""
    if timeline.is_refused:
        counters.add("paceline_rejected_total", 1, timeline.outcome)
        return
    counters.add("paceline_requests_total", 1, timeline.outcome)
    counters.add("paceline_prompt_tokens_total", timeline.num_prompt)
    counters.add("paceline_generated_tokens_total", timeline.num_tokens)
    counters.add("paceline_prefix_cache_hit_tokens_total", timeline.num_cached)
    if timeline.adapter:
        adapter = labels.of(timeline.adapter)
        counters.add("paceline_adapter_requests_total", 1, adapter)
        counters.add("paceline_adapter_generated_tokens_total", timeline.num_tokens, adapter)
        counters.add("paceline_adapter_drafted_tokens_total", timeline.num_drafted, adapter)
        counters.add("paceline_adapter_accepted_tokens_total", timeline.num_accepted, adapter)
    if timeline.queue_s is not None:
        counters.observe("paceline_queue_seconds", timeline.queue_s)
    if timeline.ttft_s is not None:
        counters.observe("paceline_ttft_seconds", timeline.ttft_s)
    counters.observe_all("paceline_itl_seconds", timeline.gaps_s)
    if timeline.tpot_s is not None:
        counters.observe("paceline_tpot_seconds", timeline.tpot_s)
    if timeline.e2e_s is not None and timeline.outcome in ("stop", "length"):
        counters.observe("paceline_e2e_seconds", timeline.e2e_s)


def log_request(timeline: Timeline) -> None:
    """Write one log line for a finished request. Its figures are in `extra`, for `JsonFormatter`."""
    figures = {
        "request_id": timeline.request_id,
        "adapter": timeline.adapter,
        "outcome": timeline.outcome,
        "error": timeline.error,
        "num_prompt": timeline.num_prompt,
        "num_tokens": timeline.num_tokens,
        "num_cached": timeline.num_cached,
        "num_drafted": timeline.num_drafted,
        "num_accepted": timeline.num_accepted,
        "queue_s": timeline.queue_s,
        "ttft_s": timeline.ttft_s,
        "e2e_s": timeline.e2e_s,
    }
    _log.info("request %s: %s", timeline.request_id, timeline.outcome, extra={"figures": figures})


OUR_LOGGERS = ("paceline", "deployments", "engine", "autoscale")
"""Names of the top loggers of Paceline."""


class JsonFormatter(logging.Formatter):
    """A JSON object per line: `time`, `level`, `logger`, `message`, the record's `figures`, and `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "figures", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def log_as_json(stream: IO[str] | None = None) -> logging.Handler:
    """Write the log lines of Paceline in this process as JSON.

    Args:
        stream: receives the lines; None for stderr.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    for name in OUR_LOGGERS:
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.propagate = False
        logger.setLevel(logging.INFO)
    return handler
