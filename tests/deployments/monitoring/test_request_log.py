"""The JSON log: one line per request, and exceptions of Paceline's loggers."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
from api_harness import make_engine
from recorded import run

from deployments.monitoring.request_log import OUR_LOGGERS, log_as_json, log_request


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
