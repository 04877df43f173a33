"""How many replicas: the fewest that keep the time per token at its objective, without going back and forth."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_stats import make_step

from autoscale.control.controller import Controller
from autoscale.policy.goodput import make_goodput
from autoscale.replicas.decision import BATCHES, ReplicaDecision, ReplicaLoad, ScalingParams, decide
from autoscale.replicas.tpot_estimate import TpotEstimate
from autoscale.simulation.hardware import cpu_table
from deployments.app import _replicas
from deployments.cluster.serve_autoscaling import TpotPolicy, readings_of
from deployments.settings import AppSettings
from engine.core.pacing import SpeculationPlan
from engine.errors import ConfigError

PARAMS = ScalingParams(tpot_s=0.025)
CURVE = tuple(0.010 + 0.0008 * batch for batch in BATCHES)
"""Meets 25 ms up to a batch of about 19."""


def reading(running: float, *, waiting: float = 0.0, curve: tuple[float, ...] = CURVE) -> ReplicaLoad:
    """A replica whose batch is `running`, at the speed its own curve gives."""
    tpot_s = 0.010 + 0.0008 * running if curve is CURVE else curve[0]
    return ReplicaLoad(num_running=running, num_waiting=waiting, tokens_per_s=running / tpot_s, tpot_s=curve)


def settled(width: float | None = None, rate: float | None = None, *, start: int = 1, maximum: int = 16) -> list[int]:
    """Numbers of replicas over time under so many streams, or so many tokens asked for per second."""
    target, seen = start, []
    for _ in range(12):
        if width is not None:
            each = width / target
        else:
            assert rate is not None
            share = rate / target
            each = 0.010 * share / (1 - 0.0008 * share) if share < 900 else 64.0
        waiting = max(0.0, each - 64)
        snapshot = [reading(min(each, 64.0), waiting=waiting)] * target
        target = decide(snapshot, target=target, minimum=1, maximum=maximum, params=PARAMS).replicas
        seen.append(target)
    return seen


@pytest.mark.parametrize("streams", [1, 10, 19, 40, 100, 200])
@pytest.mark.parametrize("start", [1, 4, 16])
def test_with_so_many_streams_it_settles_where_the_objective_holds(streams: int, start: int) -> None:
    seen = settled(width=streams, start=start)
    assert len(set(seen[-4:])) == 1, "it does not go back and forth"
    each = streams / seen[-1]
    assert 0.010 + 0.0008 * each <= 0.025 + 1e-9
    rate = streams / (0.010 + 0.0008 * each)
    comfortable = (0.85 * 0.025 - 0.010) / 0.0008 / (0.85 * 0.025)
    assert seen[-1] == 1 or rate / (seen[-1] - 1) > 0.95 * comfortable, "one less would not keep up with ease"


@pytest.mark.parametrize("rate", [50.0, 700.0, 1500.0, 5000.0])
@pytest.mark.parametrize("start", [1, 16])
def test_at_a_rate_of_arrival_it_settles_too(rate: float, start: int) -> None:
    seen = settled(rate=rate, start=start)
    assert len(set(seen[-4:])) == 1
    assert rate / seen[-1] <= 18.75 / 0.025 + 1e-6, "each replica stays within what it can do at the objective"


def test_drafting_that_pays_in_small_batches_asks_for_more_replicas_only_where_it_meets_the_objective() -> None:
    """Two engines of equal speed at a batch of 32; one drafts, and is twice as fast at 8 and below."""
    plain = tuple(0.030 + 0.0001 * batch for batch in BATCHES)
    drafting = tuple(value * (0.5 if batch <= 8 else 1.0) for batch, value in zip(BATCHES, plain, strict=True))
    load = ReplicaLoad(num_running=32, num_waiting=0, tokens_per_s=960, tpot_s=plain)
    without = decide([load], target=1, minimum=1, maximum=8, params=PARAMS)
    with_drafts = decide([replace(load, tpot_s=drafting)], target=1, minimum=1, maximum=8, params=PARAMS)
    assert without.reason == "unreachable"
    assert with_drafts.reason == "slow"
    assert with_drafts.replicas >= 3
    assert with_drafts.tpot_s <= 0.025


@given(
    st.lists(st.tuples(st.floats(0, 64), st.floats(0, 300), st.floats(1e-4, 0.2)), max_size=5),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(4, 9),
)
def test_the_number_is_within_bounds_and_grows_with_the_load(
    replicas: list[tuple[float, float, float]], target: int, minimum: int, maximum: int
) -> None:
    snapshot = [
        ReplicaLoad(num_running=r, num_waiting=w, tokens_per_s=r / t, tpot_s=tuple(t * (1 + 0.1 * b) for b in BATCHES))
        for r, w, t in replicas
    ]
    bounds = {"minimum": minimum, "maximum": maximum, "params": PARAMS}
    decision = decide(snapshot, target=target, **bounds)  # type: ignore[arg-type]
    assert minimum <= decision.replicas <= maximum
    busier = [replace(r, num_waiting=r.num_waiting + 10) for r in snapshot]
    assert decide(busier, target=target, **bounds).replicas >= decision.replicas  # type: ignore[arg-type]


def test_without_a_word_from_replicas_nothing_changes() -> None:
    decision = decide([], target=3, minimum=1, maximum=8, params=PARAMS)
    assert decision == ReplicaDecision(3, "no_data")


@dataclass
class RecordedContext:
    """What Serve hands to a policy, as recorded from a deployment of two replicas."""

    aggregated_metrics: dict[str, dict[Any, float]]
    app_name: str | None = "no-such-app"
    target_num_replicas: int = 2
    capacity_adjusted_min_replicas: int = 1
    capacity_adjusted_max_replicas: int = 4
    policy_state: dict[str, Any] = field(default_factory=dict)


def recorded(*snapshot: ReplicaLoad | None) -> RecordedContext:
    metrics: dict[str, dict[Any, float]] = {"running_requests": {"replica-0": 3.0}}  # Serve's own
    for index, one in enumerate(snapshot):
        for name, value in (one.as_numbers() if one is not None else {"running": 1.0}).items():
            metrics.setdefault(name, {})[f"replica-{index}"] = value
    return RecordedContext(metrics)


def test_the_policy_reads_what_replicas_record() -> None:
    busy = reading(40)
    assert readings_of(recorded(busy, None, reading(2)).aggregated_metrics) == [busy, reading(2)]
    assert TpotPolicy(tpot_s=0.025)(recorded(busy, busy))[0] > 2
    assert TpotPolicy(tpot_s=0.025)(recorded(reading(2), reading(1)))[0] == 1
    assert TpotPolicy(tpot_s=0.025)(recorded())[0] == 2
    assert all(isinstance(value, int | float) for value in busy.as_numbers().values())


def test_the_outlook_is_what_the_pace_would_do_there() -> None:
    goodput = make_goodput("draft_model", 8, cpu_table())
    tpot_estimate = TpotEstimate(goodput)
    drafting, plain = (
        tpot_estimate.tpot_s(SpeculationPlan(max_k=8)),
        tpot_estimate.tpot_s(SpeculationPlan(policy="off")),
    )
    assert list(plain) == sorted(plain)
    assert drafting[0] < 0.7 * plain[0], "drafting pays for one request"
    assert all(a <= b * 1.001 for a, b in zip(drafting, plain, strict=True))
    assert plain[0] == pytest.approx(goodput.cost.step_s(1, 0))


def test_the_outlook_follows_what_tokens_really_took() -> None:
    goodput = make_goodput("draft_model", 8, cpu_table())
    tpot_estimate = TpotEstimate(goodput)
    before = tpot_estimate.tpot_s(SpeculationPlan(policy="off"))
    for _ in range(50):
        tpot_estimate.observe(make_step([], 4, step_s=0.03))
    assert tpot_estimate.tpot_s(SpeculationPlan(policy="off"))[2] == pytest.approx(0.03, rel=0.1)
    assert tpot_estimate.tpot_s(SpeculationPlan(policy="off"))[2] > 2 * before[2]


def test_the_controller_keeps_the_last_decision() -> None:
    controller = Controller(SpeculationPlan())
    assert controller.replicas() is None
    controller.scaled(ReplicaDecision(3, "slow"))
    assert controller.replicas() == ReplicaDecision(3, "slow")


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
