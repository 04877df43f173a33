"""The policy `goodput` and its parts: the best allocation, honest estimates, a switch that neither flaps nor sticks."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from fakes import ToyEngine, ToyModel, toy_drafter
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscale.policy.acceptance_rate import Acceptance
from autoscale.policy.allocation import allocate
from autoscale.policy.cost_model import BATCH_KNOTS, ROW_KNOTS, CostTable
from autoscale.policy.goodput import make_goodput
from autoscale.policy.policies import Fixed
from autoscale.policy.switch import HysteresisSwitch, SwitchParams
from autoscale.simulation.hardware import cpu_table, h100_llama_70b
from autoscale.simulation.simulator import WORKLOADS, Oracle, Simulation, Workload
from engine.core.pacing import Pacer, SpeculationPlan
from engine.core.request import Request
from engine.core.stats import RowOutcome
from engine.messages import SamplingParams, SpeculativeOptions, Submit

MAX_K = 8


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**32), st.booleans())
def test_the_allocation_is_the_best_of_all(batch: int, width: int, seed: int, kinked: bool) -> None:
    rng = np.random.default_rng(seed)
    cumulative_acceptance = np.cumprod(rng.uniform(0.05, 0.99, (batch, width)), axis=1)
    base_s, fixed_s, pass_s = rng.uniform(5, 40), rng.uniform(0, 2), rng.uniform(0, 5)
    steps = rng.uniform(0, 3, batch * width + 1) * (rng.random(batch * width + 1) > 0.5 if kinked else 1)
    added_s = np.concatenate([[0.0], np.cumsum(steps)])[: batch * width + 1]
    found = allocate(
        cumulative_acceptance,
        base_s=base_s,
        fixed_s=fixed_s,
        pass_s=pass_s,
        added_s=added_s,
        depths=range(1, width + 1),
    )

    def goodput(ks: tuple[int, ...]) -> float:
        tokens = batch + sum(cumulative_acceptance[i, :k].sum() for i, k in enumerate(ks))
        drafting = fixed_s + pass_s * max(ks) + added_s[sum(ks)] if max(ks) else 0.0
        return float(tokens / (base_s + drafting))

    best = max(goodput(ks) for ks in itertools.product(range(width + 1), repeat=batch))
    assert goodput(tuple(found.ks.tolist())) == pytest.approx(best, rel=1e-9)
    assert found.goodput == pytest.approx(best, rel=1e-9)


def test_positions_behind_a_rejection_count_as_nothing() -> None:
    deep, shallow = Acceptance(4, prior=(0.5,)), Acceptance(4, prior=(0.5,))
    for _ in range(200):  # the second was rejected, of four and of two
        deep.observe([RowOutcome(1, 4, 1, 10)])
        shallow.observe([RowOutcome(1, 2, 1, 10)])
    assert deep.by_position()[0] > 0.9
    assert deep.by_position()[1] < 0.1
    assert np.array_equal(deep.by_position(), shallow.by_position())


def test_a_position_not_reached_for_long_is_told_by_those_before_it() -> None:
    """Else a load whose drafts were bad once would never be given deep drafts again."""
    acceptance = Acceptance(4, prior=(0.8,))
    for _ in range(300):
        acceptance.observe([RowOutcome(1, 4, 1, 10)])
    assert acceptance.by_position()[1] < 0.1
    for _ in range(6000):  # only the first is drafted, and it stands
        acceptance.observe([RowOutcome(1, 1, 1, 10)])
    assert acceptance.by_position()[1] > 0.5


def test_a_request_that_does_better_than_the_others_is_believed() -> None:
    acceptance = Acceptance(3, prior=(0.5,))
    for _ in range(40):
        acceptance.observe([RowOutcome(1, 3, 3, 10), RowOutcome(2, 3, 0, 10)])
    good, bad, unknown = acceptance.cumulative_acceptance([1, 2, 3])
    assert good[0] > unknown[0] > bad[0]
    acceptance.forget([1, 2])
    again = acceptance.cumulative_acceptance([1, 2])
    assert np.array_equal(again[0], again[1])


def test_the_switch_waits_and_does_not_flap() -> None:
    switch = HysteresisSwitch(SwitchParams(dwell_s=0.5, first_look_s=math.inf))
    rng = np.random.default_rng(0)
    for step in range(2000):  # a gain that hovers between both thresholds
        switch.decide(1.0 + 0.03 * rng.random(), step * 0.02, worth_probing=False)
    assert switch.num_switches == 0
    assert [switch.decide(0.9, 40 + t, worth_probing=False) for t in (0.0, 0.4, 0.6)] == ["on", "on", "off"]
    assert [switch.decide(1.5, 41 + t, worth_probing=False) for t in (0.0, 0.4, 0.6)] == ["off", "off", "on"]


def test_nothing_is_off_for_good_and_probes_get_rarer() -> None:
    switch = HysteresisSwitch(SwitchParams(first_probe_s=1.0, longest_probe_s=8.0, probe_steps=2))
    starts, now_s, probing = [], 0.0, False
    while now_s < 60.0:
        mode = switch.decide(0.8, now_s)
        if mode == "probe":
            if not probing:
                starts.append(now_s)
            switch.drafted(now_s)
        probing = mode == "probe"
        now_s += 0.05
    gaps = np.diff(starts)
    assert len(starts) >= 6
    assert gaps[0] < gaps[1] < gaps[2]
    assert gaps.max() <= 8.5


def simulated(table, workload, streams, seconds=20.0, seed=0):  # type: ignore[no-untyped-def]
    pacer = make_goodput("draft_model", MAX_K, table)
    return pacer, Simulation(table, workload, streams, seed=seed).run(pacer, SpeculationPlan(max_k=MAX_K), seconds)


@pytest.mark.parametrize("hardware", [cpu_table, h100_llama_70b], ids=["cpu", "h100"])
@pytest.mark.parametrize("name", ["summarization", "chat", "high temperature", "adversarial"])
@pytest.mark.parametrize("streams", [4, 32])
def test_default_parameters_keep_their_regret(hardware, name: str, streams: int) -> None:  # type: ignore[no-untyped-def]
    """At least 0.95 of the best fixed K of this cell, in hindsight, and of not drafting; simulated, so repeatable."""
    table, workload = hardware(), WORKLOADS[name]

    def fixed(k: int) -> float:
        plan = SpeculationPlan(policy="fixed", max_k=k)
        return Simulation(table, workload, lambda _: streams).run(Fixed(), plan, 20.0).goodput

    _, outcome = simulated(table, workload, lambda _: streams)
    assert outcome.goodput >= 0.95 * max(fixed(k) for k in (0, 1, 2, 3, 4, 6, 8))


FAULTS = {
    "a table twice too slow": (2.0, {}),
    "a table twice too fast": (0.5, {}),
    "noise": (1.0, {"noise": 0.25}),
    "a neighbour in turns": (1.0, {"slowdown": lambda now_s: 2.5 if now_s % 7 < 2 else 1.0}),
    "a machine that slows down": (1.0, {"slowdown": lambda now_s: 1 + now_s / 20}),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("name", "streams"), [("code", 1), ("chat", 8), ("adversarial", 32)])
def test_wrong_costs_and_a_busy_machine_cost_little(fault: str, name: str, streams: int) -> None:
    """At least 0.9 of the best fixed K in hindsight under the same fault; simulated, so repeatable."""
    factor, disturbed = FAULTS[fault]
    table, workload = cpu_table(), WORKLOADS[name]
    believed = replace(table, verify_s=tuple(factor * seconds for seconds in table.verify_s))

    def run(pacer: Pacer, plan: SpeculationPlan) -> float:
        return Simulation(table, workload, lambda _: streams, **disturbed).run(pacer, plan, 20.0).goodput

    best = max(run(Fixed(), SpeculationPlan(policy="fixed", max_k=k)) for k in (0, 2, 4))
    assert run(make_goodput("draft_model", MAX_K, believed), SpeculationPlan(max_k=MAX_K)) >= 0.9 * best


def test_where_costs_say_that_nothing_pays_it_is_tried_all_the_same() -> None:
    switch = HysteresisSwitch(SwitchParams(doubtful_probe_s=5.0))
    modes = [switch.decide(0.5, step * 0.1, worth_probing=False) for step in range(200)]
    assert "probe" in modes
    assert modes.index("probe") > 50


def test_while_drafting_it_looks_now_and_then_what_a_plain_step_costs() -> None:
    switch = HysteresisSwitch(SwitchParams())
    modes = [switch.decide(2.0, step * 0.02) for step in range(5000)]
    looks = [step for step, mode in enumerate(modes) if mode == "baseline"]
    assert set(modes) == {"on", "baseline"}
    assert 6 <= len(looks) <= 40
    assert looks[0] < 60


def test_it_looks_more_often_where_the_gain_is_in_doubt_and_also_beside_free_drafts() -> None:
    def looks(gain: float, has_lookup_drafts: bool) -> int:
        switch = HysteresisSwitch(SwitchParams())
        count = 0
        for step in range(5000):
            mode = switch.decide(gain, step * 0.02, has_lookup_drafts=has_lookup_drafts)
            count += mode == "baseline"
            if mode == "probe":
                switch.drafted(step * 0.02)
        return count

    assert looks(1.1, has_lookup_drafts=True) > 1.5 * looks(2.0, has_lookup_drafts=True)
    assert looks(0.9, has_lookup_drafts=True) > 1.5 * looks(2.0, has_lookup_drafts=True)
    assert looks(0.9, has_lookup_drafts=False) == 0


def test_a_ramp_up_and_down_switches_little_and_comes_back_soon() -> None:
    """Compute-bound in the middle: 1 stream, then 64, then 1 again. Drafting must be back within 2 s."""
    phases = ((20.0, 1), (40.0, 64), (1e9, 1))
    workload = Workload("ramp", 0.35, spread=0.05)
    table = cpu_table()
    drafted: list[tuple[float, bool]] = []
    pacer = make_goodput("draft_model", MAX_K, table)
    observe, now_s = pacer.observe, 0.0

    def spy(stats):  # type: ignore[no-untyped-def]
        nonlocal now_s
        now_s += stats.step_s
        drafted.append((now_s, stats.num_drafted > 0))
        observe(stats)

    pacer.observe = spy  # type: ignore[method-assign]
    streams = lambda t: next(count for until, count in phases if t < until)  # noqa: E731
    Simulation(table, workload, streams).run(pacer, SpeculationPlan(max_k=MAX_K), 60.0)

    def share(begin: float, end: float) -> float:
        inside = [flag for at, flag in drafted if begin < at <= end]
        return sum(inside) / len(inside)

    assert share(10, 20) > 0.7
    assert share(30, 40) < 0.3
    assert share(42, 44) > 0.5, "back within 2 s of the load falling"
    assert pacer.switch.num_switches <= 6


def test_a_request_s_own_say_is_honoured_and_its_neighbours_are_not_affected() -> None:
    pacer = make_goodput("draft_model", MAX_K, cpu_table())

    def request(key: int, **options: object) -> Request:
        submit = Submit(
            request_id=str(key),
            prompt=(1,),
            sampling=SamplingParams(max_tokens=100),
            speculative=SpeculativeOptions(**options),  # type: ignore[arg-type]
        )
        return Request(submit=submit, key=key, stream_key=0, tokens=[1])

    lookup = [request(1), request(2)]
    alone = [choice.k for choice in pacer.choose(SpeculationPlan(max_k=MAX_K), lookup, 0)]
    mixed = pacer.choose(
        SpeculationPlan(max_k=MAX_K), [lookup[0], request(3, enabled=False), lookup[1], request(4, max_k=1)], 0
    )
    assert mixed[1].k == 0
    assert mixed[3].k <= 1
    assert min(alone) > 0
    assert mixed[0].k > 0
    assert mixed[2].k > 0


def test_nothing_is_remembered_of_requests_that_are_gone() -> None:
    pacer = make_goodput("draft_model", 4, cpu_table())
    target = ToyModel(vocab_size=7)
    engine = ToyEngine(target, toy_drafter(ToyModel(vocab_size=7)), pacer, max_model_len=100)  # type: ignore[arg-type]
    sampling = SamplingParams(temperature=0.0, max_tokens=60)
    for name in ("finishes", "leaves"):
        engine.engine.submit(Submit(request_id=name, prompt=(1, 2, 3), sampling=sampling))
    for _ in range(4):
        engine.step()
    assert pacer.num_tracked == 2
    engine.engine.abort("leaves")
    engine.run([])
    assert engine.deltas["leaves"][-1].finish_reason == "abort"
    assert pacer.num_tracked == 0


def test_the_oracle_is_not_beaten_by_much() -> None:
    table, workload = cpu_table(), WORKLOADS["chat"]
    _, outcome = simulated(table, workload, lambda _: 8, seconds=40.0)
    oracle = Simulation(table, workload, lambda _: 8).run(Oracle(table, MAX_K), SpeculationPlan(max_k=MAX_K), 40.0)
    assert 0.93 * oracle.goodput < outcome.goodput < 1.05 * oracle.goodput


def test_prompts_in_a_step_do_not_make_drafts_look_cheap() -> None:
    """Where every row has its price, a drafted row yields less than a plain one, however long the step is already."""
    table = CostTable(verify_s=tuple(max(5e-3, 4e-4 * rows) for rows in ROW_KNOTS), pass_s=(1e-4,) * len(BATCH_KNOTS))
    submit = Submit(request_id="r", prompt=(1,), sampling=SamplingParams(max_tokens=100))
    decodes = [Request(submit=submit, key=key, stream_key=0, tokens=[1]) for key in range(24)]
    for num_prefill_rows in (0, 480):
        pacer = make_goodput("draft_model", MAX_K, table)
        pacer.choose(SpeculationPlan(max_k=MAX_K), decodes, num_prefill_rows)
        assert pacer.predicted is not None
        assert pacer.predicted.tokens == len(decodes)
        assert pacer.predicted.seconds == pytest.approx(4e-4 * (len(decodes) + num_prefill_rows), rel=0.05)


def request_of(key: int, *, num_prompt: int = 1, temperature: float = 1.0) -> Request:
    sampling = SamplingParams(max_tokens=100, temperature=temperature)
    submit = Submit(request_id=str(key), prompt=(1,) * num_prompt, sampling=sampling)
    return Request(submit=submit, key=key, stream_key=0, tokens=[1] * num_prompt)


def test_prompts_that_the_draft_has_to_read_are_part_of_its_price() -> None:
    """An answer of some hundred tokens does not pay for reading ten thousand of a prompt."""
    table = replace(cpu_table(), catch_up_s=1e-4)
    for num_prompt, is_worth_it in ((50, True), (10_000, False)):
        pacer = make_goodput("draft_model", MAX_K, table)
        choices = pacer.choose(SpeculationPlan(max_k=MAX_K), [request_of(1, num_prompt=num_prompt)], 0)
        assert pacer.predicted is not None
        assert (max(choice.k for choice in choices) > 0) == is_worth_it


def test_a_choice_holds_until_the_batch_changes() -> None:
    pacer, plan = make_goodput("draft_model", MAX_K, cpu_table()), SpeculationPlan(max_k=MAX_K)
    batch = [request_of(1), request_of(2, temperature=0.0)]
    first = pacer.choose(plan, batch, 0)
    assert pacer.choose(plan, batch, 0) is first
    assert pacer.choose(plan, batch[:1], 0) is not first
    assert len(pacer.choose(plan, batch[:1], 0)) == 1
    assert pacer.choose(replace(plan, max_k=1), batch[:1], 0)[0].k <= 1
    assert any(pacer.choose(plan, batch, 0) is not first for _ in range(20)), "and not for good"


def test_what_holds_while_off_is_given_to_whoever_comes() -> None:
    table = CostTable(verify_s=tuple(1e-3 * rows for rows in ROW_KNOTS), pass_s=(1.0,) * len(BATCH_KNOTS))
    pacer, plan = make_goodput("eagle", MAX_K, table, lookup=True), SpeculationPlan(max_k=MAX_K)
    Simulation(table, WORKLOADS["adversarial"], lambda _: 1).run(pacer, plan, 2.0)
    assert not pacer.switch.is_on
    for number in range(1, 40):
        batch = [request_of(1000 + key, temperature=float(key % 2)) for key in range(number)]
        choices = pacer.choose(plan, batch, 0)
        assert [choice.k for choice in choices] == [0] * number or choices[0].reason == "probe"
        assert all(choice.k_by_match is not None for choice in choices)


def test_choosing_is_cheap() -> None:
    """A guard against a slip of an order of magnitude; figures are measured in `bench`."""
    cumulative_acceptance = np.cumprod(np.random.default_rng(0).uniform(0.3, 0.95, (32, MAX_K)), axis=1)
    added_s = np.arange(cumulative_acceptance.size + 1) * 5e-4
    begin = time.process_time()
    for _ in range(200):
        allocate(cumulative_acceptance, base_s=0.03, fixed_s=5e-4, pass_s=1e-3, added_s=added_s, depths=(2, 3, 4))
    assert (time.process_time() - begin) / 200 < 1e-3


def test_the_pace_needs_no_torch() -> None:
    code = (
        "import autoscale.policy.goodput, autoscale.simulation.simulator, autoscale.policy.policies, sys; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
