"""Counters take only declared metrics; their snapshots are copies that add up."""

from __future__ import annotations

import pytest

from engine.metrics.counters import HistogramValue, MetricCounters, merge


def test_counters_refuse_what_is_not_declared() -> None:
    counters = MetricCounters()
    with pytest.raises(KeyError):
        counters.add("paceline_surprises_total")
    with pytest.raises(ValueError, match="is a histogram"):
        counters.add("paceline_k", 1)
    with pytest.raises(ValueError, match="labels"):
        counters.add("paceline_switches_total")


def test_snapshots_are_copies_and_merge_adds() -> None:
    counters = MetricCounters()
    counters.add("paceline_drafts_total", 2)
    counters.observe("paceline_k", 3, count=2)
    before = counters.read()
    counters.add("paceline_drafts_total")
    counters.observe("paceline_k", 1)
    merged = merge([before, counters.read()])
    assert before.number("paceline_drafts_total") == 2
    assert merged.number("paceline_drafts_total") == 5
    assert merged.histograms["paceline_k"][()].total == 6 + 7
    assert isinstance(before.histograms["paceline_k"][()], HistogramValue)
    assert before.histograms["paceline_k"][()].num == 2
