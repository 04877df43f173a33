"""What is counted, by value."""

from __future__ import annotations

import pytest

from engine.metrics.counters import HistogramValue, MetricCounters, MetricSnapshot, merge
from engine.metrics.types import counter, gauge, histogram

METRICS = (
    counter("tokens_total", "serving", "Tokens."),
    counter("ends_total", "serving", "Ends.", labels=("reason",)),
    gauge("running", "serving", "Running."),
    histogram("step_seconds", "serving", "Steps.", (0.1, 1.0)),
)


def test_counters_add_up_and_gauges_are_replaced() -> None:
    counters = MetricCounters(METRICS)
    assert counters.read() == MetricSnapshot()
    counters.add("tokens_total")
    counters.add("tokens_total", 2.5)
    counters.add("ends_total", 1.0, "stop")
    counters.set("running", 3.0)
    counters.set("running", 2.0)
    read = counters.read()
    assert read.numbers == {"tokens_total": {(): 3.5}, "ends_total": {("stop",): 1.0}, "running": {(): 2.0}}
    assert (read.number("tokens_total"), read.number("ends_total", "stop")) == (3.5, 1.0)
    assert (read.number("ends_total", "length"), read.number("unknown")) == (0.0, 0.0)


def test_a_value_falls_into_the_first_bucket_whose_bound_it_does_not_exceed() -> None:
    counters = MetricCounters(METRICS)
    counters.observe("step_seconds", 0.1)
    counters.observe("step_seconds", 0.2, count=3)
    counters.observe_all("step_seconds", [0.5, 1.0, 2.0])
    counters.observe_all("step_seconds", [])
    value = counters.read().histograms["step_seconds"][()]
    assert value.counts == [1, 5, 1]
    assert value.num == 7
    assert value.total == pytest.approx(0.1 + 0.6 + 3.5)


def test_what_was_read_does_not_change_any_more() -> None:
    counters = MetricCounters(METRICS)
    counters.add("tokens_total")
    counters.observe("step_seconds", 0.1)
    before = counters.read()
    counters.add("tokens_total")
    counters.observe("step_seconds", 0.1)
    assert before.number("tokens_total") == 1.0
    assert before.histograms["step_seconds"][()] == HistogramValue([1, 0, 0], 0.1)


def test_snapshots_are_added_up_series_by_series() -> None:
    parts = []
    for reason, value in (("stop", 0.05), ("length", 5.0), ("stop", 0.5)):
        counters = MetricCounters(METRICS)
        counters.add("ends_total", 2.0, reason)
        counters.observe("step_seconds", value)
        parts.append(counters.read())
    merged = merge(parts)
    assert merged.numbers == {"ends_total": {("stop",): 4.0, ("length",): 2.0}}
    assert merged.histograms == {"step_seconds": {(): HistogramValue([1, 1, 1], 5.55)}}
    assert parts[0].histograms["step_seconds"][()].counts == [1, 0, 0], "the parts are left alone"
    assert merge([]) == MetricSnapshot()


def test_only_what_is_declared_can_be_counted() -> None:
    counters = MetricCounters(METRICS)
    with pytest.raises(KeyError):
        counters.add("unknown")
    for count in (
        lambda: counters.add("running"),
        lambda: counters.set("tokens_total", 1.0),
        lambda: counters.observe("tokens_total", 1.0),
        lambda: counters.observe_all("running", [1.0]),
        lambda: counters.add("ends_total"),
        lambda: counters.add("tokens_total", 1.0, "extra"),
    ):
        with pytest.raises(ValueError, match="counted as"):
            count()
    assert counters.read() == MetricSnapshot()
