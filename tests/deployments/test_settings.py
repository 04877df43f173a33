"""The settings of an application: defaults that depend on each other, and combinations that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.settings import AppSettings, LiveSettings
from engine.errors import ConfigError


def parse(**changes: Any) -> AppSettings:
    return AppSettings.parse({"engine": {"model": "smollm2"}} | changes)


@pytest.mark.parametrize(
    ("model", "model_name", "served"),
    [
        ("smollm2", None, "smollm2"),
        ("/models/tiny/", None, "tiny"),
        ("meta-llama/Llama-3.2-1B", None, "Llama-3.2-1B"),
        ("smollm2", "small", "small"),
    ],
)
def test_the_name_that_clients_send(model: str, model_name: str | None, served: str) -> None:
    assert parse(engine={"model": model}, model_name=model_name).served_name == served


def test_the_capacity_is_what_runs_and_waits() -> None:
    assert parse(engine={"model": "smollm2", "max_num_requests": 3, "max_num_waiting": 5}).capacity == 8


def test_the_largest_number_of_replicas() -> None:
    assert parse(num_replicas=3).most_replicas == 3
    assert parse(autoscaling={"max_replicas": 7}).most_replicas == 7


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_replicas": 2, "autoscaling": {}}, "num_replicas"),
        ({"autoscaling": {"min_replicas": 3, "max_replicas": 2}}, "min_replicas"),
        ({"cors_origins": ["app.example"]}, "cors_origins"),
        ({"direct_port": 0}, "direct_port"),
        ({"replicas": 2}, "replicas"),
    ],
)
def test_a_bad_setting_is_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        parse(**changes)


def test_live_settings_of_the_pace_are_only_those_given() -> None:
    assert LiveSettings.parse({"max_in_flight": 3}).pace() == {}
    assert LiveSettings.parse({"enabled": False, "max_k": 0}).pace() == {"enabled": False, "max_k": 0}
