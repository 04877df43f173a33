"""The JSON log: one line per request, and exceptions of Paceline's loggers."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
from api_harness import make_engine
from recorded import run

from deployments.monitoring.request_log import (
    MAX_ADAPTERS,
    OTHER,
    OUR_LOGGERS,
    AdapterLabels,
    log_as_json,
    log_request,
)
from engine.messages import AdapterRef


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


def test_requests_of_adapters_are_counted_by_name() -> None:
    timeline, counted = run(make_engine(), adapter=AdapterRef(number=3, name="sql"))
    assert timeline.adapter == "sql"
    assert counted.number("paceline_adapter_requests_total", "sql") == 1
    assert counted.number("paceline_adapter_generated_tokens_total", "sql") == timeline.num_tokens == 6
    _, plain = run(make_engine())
    assert "paceline_adapter_requests_total" not in plain.numbers


def test_the_label_of_adapters_is_bounded() -> None:
    labels = AdapterLabels()
    names = [f"a{number}" for number in range(MAX_ADAPTERS + 3)]
    assert [labels.of(name) for name in names] == [*names[:MAX_ADAPTERS], OTHER, OTHER, OTHER]
    assert labels.of("a0") == "a0"
