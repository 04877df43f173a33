"""Serve's autoscaling policy: it reads what replicas record, and the settings choose one way to set their number."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from autoscale.replicas.decision import BATCHES, ReplicaLoad
from deployments.app import _replicas
from deployments.fleet.serve_autoscaling import TpotPolicy, readings_of
from deployments.settings import AppSettings
from engine.errors import ConfigError


def load(running: float) -> ReplicaLoad:
    """A replica with a batch of `running` that meets 25 ms up to a batch of about 19."""
    curve = tuple(0.010 + 0.0008 * batch for batch in BATCHES)
    rate = running / (0.010 + 0.0008 * running)
    return ReplicaLoad(num_running=running, num_waiting=0.0, tokens_per_s=rate, tpot_s=curve, max_running=64)


@dataclass
class RecordedContext:
    """The context that Serve passes to a policy, as recorded from a deployment of two replicas."""

    aggregated_metrics: dict[str, dict[Any, float]]
    app_name: str | None = "no-such-app"
    target_num_replicas: int = 2
    capacity_adjusted_min_replicas: int = 1
    capacity_adjusted_max_replicas: int = 4
    policy_state: dict[str, Any] = field(default_factory=dict)


def recorded(*loads: ReplicaLoad | None) -> RecordedContext:
    metrics: dict[str, dict[Any, float]] = {"running_requests": {"replica-0": 3.0}}  # Serve's own
    for index, one in enumerate(loads):
        for name, value in (one.as_numbers() if one is not None else {"running": 1.0}).items():
            metrics.setdefault(name, {})[f"replica-{index}"] = value
    return RecordedContext(metrics)


def test_the_policy_reads_what_replicas_record() -> None:
    busy = load(40)
    assert readings_of(recorded(busy, None, load(2)).aggregated_metrics) == [busy, load(2)]
    assert TpotPolicy(tpot_s=0.025)(recorded(busy, busy))[0] > 2
    assert TpotPolicy(tpot_s=0.025)(recorded(load(2), load(1)))[0] == 1
    assert TpotPolicy(tpot_s=0.025)(recorded())[0] == 2
    assert all(isinstance(value, int | float) for value in busy.as_numbers().values())


def settings(**values: Any) -> AppSettings:
    return AppSettings.parse({"engine": {"model": "smollm2"}, **values})


def test_settings_choose_one_way_to_count() -> None:
    assert _replicas(settings(num_replicas=3)) == {"num_replicas": 3}
    config = _replicas(settings(autoscaling={"max_replicas": 3, "tpot_s": 0.02}))["autoscaling_config"]
    assert config["policy"]["policy_kwargs"] == {"tpot_s": 0.02}
    assert json.dumps(config)
    with pytest.raises(ConfigError, match="num_replicas"):
        settings(num_replicas=2, autoscaling={})
    with pytest.raises(ConfigError, match="min_replicas"):
        settings(autoscaling={"min_replicas": 5, "max_replicas": 2})
