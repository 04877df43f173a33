"""How many replicas: the fewest that keep the time per token at its objective, without oscillating."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.replicas.decision import BATCHES, ReplicaDecision, ReplicaLoad, ScalingParams, decide
from engine.metrics.labels import ScalingReason

PARAMS = ScalingParams(tpot_s=0.025)
CURVE = tuple(0.010 + 0.0008 * batch for batch in BATCHES)
"""Meets 25 ms up to a batch of about 19."""


def load_of(running: float, *, waiting: float = 0.0, curve: tuple[float, ...] = CURVE) -> ReplicaLoad:
    """A replica whose batch is `running`, at the speed its own curve gives."""
    tpot_s = 0.010 + 0.0008 * running if curve is CURVE else curve[0]
    return ReplicaLoad(
        num_running=running, num_waiting=waiting, tokens_per_s=running / tpot_s, tpot_s=curve, max_running=64
    )


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
        loads = [load_of(min(each, 64.0), waiting=waiting)] * target
        target = decide(loads, target=target, minimum=1, maximum=maximum, params=PARAMS).replicas
        seen.append(target)
    return seen


@pytest.mark.parametrize("streams", [1, 10, 19, 40, 100, 200])
@pytest.mark.parametrize("start", [1, 4, 16])
def test_with_so_many_streams_it_settles_where_the_objective_is_met(streams: int, start: int) -> None:
    seen = settled(width=streams, start=start)
    assert len(set(seen[-4:])) == 1, "it does not oscillate"
    each = streams / seen[-1]
    assert 0.010 + 0.0008 * each <= 0.025 + 1e-9
    rate = streams / (0.010 + 0.0008 * each)
    comfortable = (0.85 * 0.025 - 0.010) / 0.0008 / (0.85 * 0.025)
    assert seen[-1] == 1 or rate / (seen[-1] - 1) > 0.95 * comfortable, "one less would leave no headroom"


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
    load = ReplicaLoad(num_running=32, num_waiting=0, tokens_per_s=960, tpot_s=plain, max_running=64)
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
    loads = [
        ReplicaLoad(
            num_running=r,
            num_waiting=w,
            tokens_per_s=r / t,
            tpot_s=tuple(t * (1 + 0.1 * b) for b in BATCHES),
            max_running=64,
        )
        for r, w, t in replicas
    ]
    bounds = {"minimum": minimum, "maximum": maximum, "params": PARAMS}
    decision = decide(loads, target=target, **bounds)  # type: ignore[arg-type]
    assert minimum <= decision.replicas <= maximum
    busier = [replace(r, num_waiting=r.num_waiting + 10) for r in loads]
    assert decide(busier, target=target, **bounds).replicas >= decision.replicas  # type: ignore[arg-type]


def test_without_reports_nothing_changes() -> None:
    decision = decide([], target=3, minimum=1, maximum=8, params=PARAMS)
    assert decision == ReplicaDecision(3, "no_data")


def load(
    *,
    running: float = 4.0,
    waiting: float = 0.0,
    tokens_per_s: float = 100.0,
    tpot_s: float = 0.02,
    max_running: float = 64,
) -> ReplicaLoad:
    """A replica with the same TPOT at every batch size."""
    return ReplicaLoad(
        num_running=running,
        num_waiting=waiting,
        tokens_per_s=tokens_per_s,
        tpot_s=(tpot_s,) * len(BATCHES),
        max_running=max_running,
    )


@pytest.mark.parametrize(
    ("loads", "target", "replicas", "reason"),
    [
        ([load()], 1, 1, "steady"),
        ([load(), load()], 2, 1, "spare"),
        ([load(running=64, waiting=1)], 1, 2, "queue"),
        ([load(running=65)], 1, 2, "slow"),
        ([load(tpot_s=0.03)], 1, 1, "unreachable"),
        ([load(running=65, tpot_s=0.03)], 1, 2, "unreachable"),
    ],
)
def test_each_decision_has_its_reason(
    loads: list[ReplicaLoad], target: int, replicas: int, reason: ScalingReason
) -> None:
    decision = decide(loads, target=target, minimum=1, maximum=8, params=PARAMS)
    assert (decision.replicas, decision.reason) == (replicas, reason)
    assert decision.tpot_s == pytest.approx(loads[0].tpot_s[0])


def test_by_rate_alone_the_replicas_are_those_that_serve_it_at_the_objective() -> None:
    """The curve meets 25 ms at a batch of 18.75, so a replica serves 750 tokens per second."""
    needed = [decide([load_at(rate)], target=1, minimum=1, maximum=9, params=PARAMS).replicas for rate in (749, 751)]
    assert needed == [1, 2]


def load_at(rate: float) -> ReplicaLoad:
    return ReplicaLoad(num_running=1, num_waiting=0, tokens_per_s=rate, tpot_s=CURVE, max_running=64)


def test_a_full_batch_needs_more_replicas_however_fast_its_steps_are() -> None:
    """Four requests run and eight wait. The steps meet the objective at any batch size, so only the bound counts."""
    busy = load(running=4, waiting=8, tokens_per_s=200.0, max_running=4)
    assert decide([busy], target=1, minimum=1, maximum=8, params=PARAMS).replicas == 3
    assert decide([replace(busy, max_running=64)], target=1, minimum=1, maximum=8, params=PARAMS).replicas == 1


def test_an_objective_that_every_batch_meets_asks_for_no_more_than_the_tokens_need() -> None:
    """A replica gives 4 / 0.02 = 200 tokens per second at its largest batch, whatever the objective allows."""
    lax = replace(PARAMS, tpot_s=1.0)
    rates = [
        decide([load(tokens_per_s=r, max_running=4)], target=1, minimum=1, maximum=9, params=lax) for r in (199, 201)
    ]
    assert [decision.replicas for decision in rates] == [1, 2]


def test_loads_travel_as_numbers() -> None:
    sent = load(running=3, waiting=2)
    numbers = sent.as_numbers()
    assert numbers == {"running": 3, "waiting": 2, "tokens_per_s": 100.0, "max_running": 64} | {
        f"tpot_s_{b}": 0.02 for b in BATCHES
    }
    assert ReplicaLoad.from_numbers(numbers) == sent
    for name in numbers:
        assert ReplicaLoad.from_numbers({key: value for key, value in numbers.items() if key != name}) is None
