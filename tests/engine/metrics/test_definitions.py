"""The declarations obey Prometheus' rules and their own, and the page made of them is current."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dashboards.metrics_page import metrics_markdown
from engine.metrics.definitions import METRICS, by_name
from engine.metrics.labels import COMMON_LABELS
from engine.metrics.types import Metric
from paceline.cli import main

ROOT = Path(__file__).parents[3]
NAMES = by_name()


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
class TestEachMetric:
    def test_name_says_kind_and_unit(self, metric: Metric) -> None:
        if metric.alias_of is None:
            assert re.fullmatch(r"paceline_[a-z0-9_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        if metric.unit in ("seconds", "bytes", "ratio"):
            assert metric.name.removesuffix("_total").endswith(f"_{metric.unit}")

    def test_labels_and_buckets(self, metric: Metric) -> None:
        assert not set(metric.labels) & {*COMMON_LABELS, "le", "quantile"}
        assert len(metric.labels) <= 1 or not metric.values  # `values` are those of the only label
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert bool(metric.buckets) == (metric.kind == "histogram")

    def test_query_names_declared_series_only(self, metric: Metric) -> None:
        query = metric.query(selector='app="a"', window="7m")
        assert "$" not in query
        for name, braces in re.findall(r"((?:paceline_|vllm:)\w+)(\{[^}]*\})?", query):
            declared = NAMES.get(name) or NAMES.get(re.sub(r"_(bucket|sum|count)$", "", name))
            assert declared is not None, name
            assert braces == '{app="a"}'
        assert metric.name in query
        assert "{" not in metric.query()

    def test_alias_repeats_a_metric_of_its_shape(self, metric: Metric) -> None:
        if metric.alias_of is not None:
            original = NAMES[metric.alias_of]
            assert (original.kind, original.labels, original.alias_of) == (metric.kind, metric.labels, None)


def test_names_are_unique() -> None:
    assert len(NAMES) == len(METRICS)


def test_the_page_is_current() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == metrics_markdown(), "run: paceline metrics --markdown"


def test_command_lists_every_metric(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics"]) == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} == set(NAMES)
