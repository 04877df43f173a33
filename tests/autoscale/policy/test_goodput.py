"""The policy `goodput`: its regret on simulated loads, limits of requests, and what it remembers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from fakes import ToyEngine, ToyModel, toy_drafter
from step_stats import make_step, step_stats
from switches import drafting, settled

from autoscale.policy.cost_model import BATCH_KNOTS, ROW_KNOTS, CostModel, CostTable
from autoscale.policy.depth_search import WIDE_SEARCH_CHOICES
from autoscale.policy.goodput import Goodput, make_goodput
from autoscale.policy.policies import Fixed
from autoscale.simulation.hardware import cpu_table, h100_llama_70b
from autoscale.simulation.simulator import WORKLOADS, Oracle, Simulation, Workload
from engine.core.pacing import KChoice, Pacer, Prior, SpeculationPlan
from engine.core.request import Request
from engine.core.stats import RowOutcome
from engine.messages import SamplingParams, SpeculativeOptions, Submit

MAX_K = 8


def simulated(table, workload, streams, seconds=20.0, seed=0):  # type: ignore[no-untyped-def]
    pacer = make_goodput("draft_model", MAX_K, table)
    return pacer, Simulation(table, workload, streams, seed=seed).run(pacer, SpeculationPlan(max_k=MAX_K), seconds)


@pytest.mark.parametrize("hardware", [cpu_table, h100_llama_70b], ids=["cpu", "h100"])
@pytest.mark.parametrize("name", ["summarization", "chat", "high temperature", "adversarial"])
@pytest.mark.parametrize("streams", [4, 32])
def test_default_parameters_keep_their_regret(hardware, name: str, streams: int) -> None:  # type: ignore[no-untyped-def]
    """At least 0.95 of the best fixed K of this cell in hindsight, 0 included; simulated, so repeatable."""
    table, workload = hardware(), WORKLOADS[name]

    def fixed(k: int) -> float:
        plan = SpeculationPlan(policy="fixed", max_k=k)
        return Simulation(table, workload, lambda _: streams).run(Fixed(), plan, 20.0).goodput

    _, outcome = simulated(table, workload, lambda _: streams)
    assert outcome.goodput >= 0.95 * max(fixed(k) for k in (0, 1, 2, 3, 4, 6, 8))


@pytest.mark.parametrize("hardware", [cpu_table, h100_llama_70b], ids=["cpu", "h100"])
@pytest.mark.parametrize("streams", [1, 4, 16, 32])
def test_a_useless_draft_costs_little_from_the_start_on(hardware, streams: int) -> None:  # type: ignore[no-untyped-def]
    """The first six seconds of a server whose draft is never accepted, against no drafts; simulated, so repeatable."""
    table, workload = hardware(), Workload("any", 0.0, spread=0.0, prompt_len=300)
    ratios = []
    for seed in range(4):
        _, outcome = simulated(table, workload, lambda _: streams, 6.0, seed)
        plain = Simulation(table, workload, lambda _: streams, seed=seed)
        off = plain.run(Fixed(), SpeculationPlan(policy="fixed", max_k=0), 6.0)
        ratios.append(outcome.goodput / off.goodput)
    assert np.mean(ratios) > 0.975


FAULTS = {
    "a table twice too slow": (2.0, {}),
    "a table twice too fast": (0.5, {}),
    "noise": (1.0, {"noise": 0.25}),
    "a neighbour now and then": (1.0, {"slowdown": lambda now_s: 2.5 if now_s % 7 < 2 else 1.0}),
    "a machine that slows down": (1.0, {"slowdown": lambda now_s: 1 + now_s / 20}),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("name", "streams"), [("code", 1), ("chat", 8), ("adversarial", 32)])
def test_wrong_costs_and_a_busy_machine_lose_little(fault: str, name: str, streams: int) -> None:
    """At least 0.9 of the best fixed K in hindsight under the same fault; simulated, so repeatable."""
    factor, disturbed = FAULTS[fault]
    table, workload = cpu_table(), WORKLOADS[name]
    assumed = replace(table, verify_s=tuple(factor * seconds for seconds in table.verify_s))

    def run(pacer: Pacer, plan: SpeculationPlan) -> float:
        return Simulation(table, workload, lambda _: streams, **disturbed).run(pacer, plan, 20.0).goodput

    best = max(run(Fixed(), SpeculationPlan(policy="fixed", max_k=k)) for k in (0, 2, 4))
    assert run(make_goodput("draft_model", MAX_K, assumed), SpeculationPlan(max_k=MAX_K)) >= 0.9 * best


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
        return observe(stats)

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


def test_the_limits_of_a_request_hold_and_do_not_affect_the_others() -> None:
    pacer = drafting(make_goodput("draft_model", MAX_K, cpu_table()))

    def request(key: int, **options: object) -> Request:
        submit = Submit(
            request_id=str(key),
            prompt=(1,),
            sampling=SamplingParams(max_tokens=100),
            speculative=SpeculativeOptions(**options),  # type: ignore[arg-type]
        )
        return Request(submit=submit, key=key, stream_key=0, tokens=[1])

    unlimited = [request(1), request(2)]
    alone = [choice.k for choice in pacer.choose(SpeculationPlan(max_k=MAX_K), unlimited, 0)]
    mixed = pacer.choose(
        SpeculationPlan(max_k=MAX_K), [unlimited[0], request(3, enabled=False), unlimited[1], request(4, max_k=1)], 0
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
    """Where every row costs the same, a drafted row yields less than a plain one, however long the step already is."""
    table = CostTable(verify_s=tuple(max(5e-3, 4e-4 * rows) for rows in ROW_KNOTS), pass_s=(1e-4,) * len(BATCH_KNOTS))
    submit = Submit(request_id="r", prompt=(1,), sampling=SamplingParams(max_tokens=100))
    decodes = [Request(submit=submit, key=key, stream_key=0, tokens=[1]) for key in range(24)]
    for num_prefill_rows in (0, 480):
        pacer = make_goodput("draft_model", MAX_K, table)
        pacer.choose(SpeculationPlan(max_k=MAX_K), decodes, num_prefill_rows)
        prediction = pacer.observe(step_stats())
        assert prediction.expected_tokens == len(decodes)
        assert prediction.expected_s == pytest.approx(4e-4 * (len(decodes) + num_prefill_rows), rel=0.05)


def request_of(key: int, *, num_prompt: int = 1, temperature: float = 1.0) -> Request:
    sampling = SamplingParams(max_tokens=100, temperature=temperature)
    submit = Submit(request_id=str(key), prompt=(1,) * num_prompt, sampling=sampling)
    return Request(submit=submit, key=key, stream_key=0, tokens=[1] * num_prompt)


def test_prompts_that_the_draft_has_to_read_are_part_of_its_cost() -> None:
    """A response of some hundred tokens does not pay for reading a prompt of ten thousand."""
    table = replace(cpu_table(), catch_up_s=1e-4)
    for num_prompt, is_worth_it in ((50, True), (10_000, False)):
        pacer = drafting(make_goodput("draft_model", MAX_K, table))
        choices = pacer.choose(SpeculationPlan(max_k=MAX_K), [request_of(1, num_prompt=num_prompt)], 0)
        assert (max(choice.k for choice in choices) > 0) == is_worth_it


def test_tokens_that_the_draft_has_read_are_no_longer_part_of_its_cost() -> None:
    """Two hundred thousand unread tokens at 0.1 ms, spread over 64 steps, take more than drafting gains."""
    request = request_of(1, temperature=0.0)
    long = replace(
        request, submit=replace(request.submit, sampling=SamplingParams(max_tokens=300_000, temperature=0.0))
    )
    long.tokens += [1] * 200_000
    pacer = drafting(make_goodput("draft_model", MAX_K, replace(cpu_table(), catch_up_s=1e-4)))

    def largest_k() -> int:
        """Of as many new choices as it takes until the facts of the batch are built again."""
        choices = [pacer.choose(replace(PLAN), [long], 0) for _ in range(WIDE_SEARCH_CHOICES)]
        return max(choice.k for (choice,) in choices)

    assert largest_k() == 0
    cost = pacer.cost
    parts = {"verify_s": cost.verify_s(2, 100), "sample_s": 0.0, "draft_s": cost.draft_s(1, 1) - cost.handoff_s}
    step_s = sum(parts.values()) + cost.handoff_s + cost.overhead_s
    for num_read, pays in ((1, False), (len(long.tokens), True)):
        outcomes = (RowOutcome(1, 1, 1, num_read),)
        pacer.observe(step_stats(outcomes=outcomes, num_drafted=1, num_rows=2, step_s=step_s, **parts))
        assert (largest_k() > 0) == pays


def test_a_choice_holds_until_the_batch_changes() -> None:
    pacer, plan = drafting(make_goodput("draft_model", MAX_K, cpu_table())), SpeculationPlan(max_k=MAX_K)
    batch = [request_of(1), request_of(2, temperature=0.0)]
    first = pacer.choose(plan, batch, 0)
    assert pacer.choose(plan, batch, 0) is first
    assert pacer.choose(plan, batch[:1], 0) is not first
    assert len(pacer.choose(plan, batch[:1], 0)) == 1
    assert pacer.choose(replace(plan, max_k=1), batch[:1], 0)[0].k <= 1
    assert any(pacer.choose(plan, batch, 0) is not first for _ in range(20)), "and not for good"


def test_while_off_the_choice_holds_for_any_batch() -> None:
    table = CostTable(verify_s=tuple(1e-3 * rows for rows in ROW_KNOTS), pass_s=(1.0,) * len(BATCH_KNOTS))
    pacer, plan = make_goodput("eagle", MAX_K, table, lookup=True), SpeculationPlan(max_k=MAX_K)
    Simulation(table, WORKLOADS["adversarial"], lambda _: 1).run(pacer, plan, 2.0)
    assert not pacer.switch.is_on
    for number in range(1, 40):
        batch = [request_of(1000 + key, temperature=float(key % 2)) for key in range(number)]
        choices = pacer.choose(plan, batch, 0)
        assert [choice.k for choice in choices] == [0] * number or choices[0].reason == "probe"
        assert all(choice.k_by_match is not None for choice in choices)


def test_the_policies_need_no_torch() -> None:
    code = (
        "import autoscale.policy.goodput, autoscale.simulation.simulator, autoscale.policy.policies, sys; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


PLAN = SpeculationPlan(max_k=MAX_K)


def off_pacer() -> Goodput:
    """A policy whose draft was never accepted, so that drafting has just been switched off."""
    pacer = drafting(make_goodput("draft_model", MAX_K, cpu_table()))
    pacer.acceptance.observe([RowOutcome(1, 4, 0, 10)] * 300)
    for _ in range(100):
        if not pacer.switch.is_on:
            return pacer
        pacer.choose(PLAN, [request_of(1, temperature=0.0)], 0)
        pacer.observe(step_stats(step_s=0.1))
    raise AssertionError("drafting stays on")


def next_probe(pacer: Goodput, batch: list[Request]) -> Sequence[KChoice]:
    """The choices of the next probe."""
    for _ in range(1000):
        choices = pacer.choose(PLAN, batch, 0)
        if any(choice.k for choice in choices):
            return choices
        assert {choice.reason for choice in choices} == {"acceptance"}
        pacer.observe(step_stats(step_s=0.1))
    raise AssertionError("no probe")


@pytest.mark.parametrize(("batch", "probed"), [(1, 1), (2, 2), (8, 2), (16, 2), (24, 3), (32, 4)])
def test_a_probe_of_acceptance_drafts_two_tokens_for_a_few_requests(batch: int, probed: int) -> None:
    choices = next_probe(off_pacer(), [request_of(key, temperature=0.0) for key in range(batch)])
    assert [choice.k for choice in choices] == [2] * probed + [0] * (batch - probed)
    assert [choice.reason for choice in choices] == ["probe"] * probed + ["acceptance"] * (batch - probed)


def test_a_probe_drafts_for_the_requests_of_which_the_draft_has_least_to_read() -> None:
    batch = [request_of(key, num_prompt=length, temperature=0.0) for key, length in enumerate((400, 300, 20, 90, 50))]
    pacer = make_goodput("draft_model", MAX_K, cpu_table())
    assert [choice.k for choice in pacer.choose(PLAN, batch, 0)] == [0, 0, 2, 0, 2]
    read = (RowOutcome(0, 2, 0, 400), RowOutcome(1, 2, 0, 300))
    pacer.observe(step_stats(outcomes=read, num_drafted=2, num_rows=7, step_s=0.02))
    assert [choice.k for choice in pacer.choose(PLAN, batch, 0)] == [2, 2, 0, 0, 0]


@pytest.mark.parametrize("num_prompt", [100, 4_000])
def test_a_probe_comes_when_it_costs_a_hundredth_of_the_time_since_drafting_stopped(num_prompt: int) -> None:
    """Its cost: reading two prompts, and six steps of two passes, four rows and one handoff. Nothing is accepted."""
    table = replace(cpu_table(), catch_up_s=1e-4)
    pacer = settled_off(table)
    batch = [request_of(key, num_prompt=num_prompt, temperature=0.0) for key in (1, 2)]
    rows_s = CostModel(table).added_rows_s(2, 4)[-1]
    cost_s = 2 * num_prompt * 1e-4 + 6 * (table.handoff_s + 2 * CostModel(table).pass_s(2) + rows_s)
    waited_s = 0.0
    while not any(choice.k for choice in pacer.choose(PLAN, batch, 0)):
        pacer._now_s += 0.25
        waited_s += 0.25
    # A choice holds for eight steps, and the acceptance that is left after 3,000 rejections saves a little.
    assert 0.95 * cost_s / 0.01 < waited_s < cost_s / 0.01 + 8 * 0.25


def settled_off(table: CostTable) -> Goodput:
    """A policy whose draft was never accepted, switched off at time 0."""
    pacer = make_goodput("draft_model", MAX_K, table)
    pacer.acceptance.observe([RowOutcome(1, 4, 0, 10)] * 3000)
    settled(pacer.switch, gain=0.5)
    return pacer


def test_a_probe_where_costs_forbid_drafting_drafts_one_token_for_all() -> None:
    """A pass takes a second, so no draft pays. A request that does not draft then has the reason `batch`."""
    table = CostTable(verify_s=tuple(1e-3 * rows for rows in ROW_KNOTS), pass_s=(1.0,) * len(BATCH_KNOTS))
    pacer = make_goodput("draft_model", MAX_K, table)
    batch = [request_of(1), replace(request_of(2), submit=disabled()), request_of(3)]
    found = set()
    for _ in range(1000):
        choices = pacer.choose(PLAN, batch, 0)
        found.add(tuple((choice.k, choice.reason) for choice in choices))
        # No draft is observed, so the acceptance rates stay at their priors.
        pacer.observe(step_stats(step_s=0.1, verify_s=0.003, num_rows=3, num_decodes=3))
    off, probe = ((0, "batch"),) * 3, ((1, "probe"), (0, "batch"), (1, "probe"))
    baseline = ((0, "probe"),) * 3
    assert {off, probe} <= found <= {off, probe, baseline, ((0, "acceptance"),) * 3}


def disabled() -> Submit:
    return Submit(
        request_id="2",
        prompt=(1,),
        sampling=SamplingParams(max_tokens=100),
        speculative=SpeculativeOptions(enabled=False),
    )


def test_priors_longer_than_max_k_are_taken_up_to_it() -> None:
    """An engine with a small K gets priors from one with a larger K; the first position decides here."""
    for rate, is_worth_it in ((0.95, True), (0.01, False)):
        pacer = drafting(make_goodput("draft_model", 2, cpu_table()))
        prior = Prior(method="draft_model", workload="greedy", rates=(rate,) * 16, weights=(500.0,) * 16)
        (choice,) = pacer.choose(SpeculationPlan(max_k=16, priors=(prior,)), [request_of(1, temperature=0.0)], 0)
        assert choice.k == (2 if is_worth_it else 0)
        assert pacer.acceptance.by_position("greedy") == pytest.approx([rate] * 2)


def test_the_prediction_is_of_the_choice_that_was_used() -> None:
    pacer = drafting(make_goodput("draft_model", MAX_K, cpu_table()))
    batch = [request_of(1, temperature=0.0), request_of(2, temperature=0.0)]
    ks = [choice.k for choice in pacer.choose(PLAN, batch, 0)]
    assert max(ks) > 0
    tokens = 2 + sum(row[:k].sum() for row, k in zip(pacer.acceptance.cumulative_acceptance([1, 2]), ks, strict=True))
    held = [pacer.observe(step_stats()) for _ in range(2) if pacer.choose(PLAN, batch, 0)]
    assert held[0].expected_tokens == held[1].expected_tokens == pytest.approx(tokens)
    assert held[0].expected_s == held[1].expected_s > 0


def test_the_choice_of_another_policy_is_predicted_from_its_drafts() -> None:
    """Nothing was chosen here, so tokens follow from the drafts and seconds from the step."""
    pacer = make_goodput("draft_model", MAX_K, cpu_table())
    rates = pacer.acceptance.by_position("greedy")
    stats = make_step([(3, 1), (1, 1)], 2)
    prediction = pacer.observe(stats)
    assert prediction.expected_tokens == pytest.approx(4 + np.cumprod(rates)[:3].sum() + rates[0])
    assert prediction.expected_s == prediction.seconds > prediction.plain_s > 0


def test_a_prediction_is_used_for_one_step_only() -> None:
    pacer = drafting(make_goodput("draft_model", MAX_K, cpu_table()))
    pacer.choose(PLAN, [request_of(1, temperature=0.0)], 0)
    assert pacer.observe(step_stats()).expected_tokens > 1
    assert pacer.observe(step_stats()).expected_tokens == 1


def test_switches_and_probes_are_reported_with_the_step_in_which_they_happen() -> None:
    pacer = drafting(make_goodput("draft_model", MAX_K, cpu_table()))
    pacer.observe(step_stats())
    pacer.acceptance.observe([RowOutcome(1, 4, 0, 10)] * 300)
    switched, num_probed = [], 0
    for _ in range(60):
        before = pacer.switch.num_switches, pacer.switch.num_probes
        choices = pacer.choose(PLAN, [request_of(1, temperature=0.0)], 0)
        drafts = [(choice.k, 0) for choice in choices if choice.k]
        prediction = pacer.observe(make_step(drafts, 1 - len(drafts), step_s=0.1))
        after = pacer.switch.num_switches, pacer.switch.num_probes
        assert (prediction.switched is not None, prediction.probed) == (after[0] > before[0], after[1] > before[1])
        switched += [prediction.switched] if prediction.switched else []
        num_probed += prediction.probed
    assert switched == ["off"]
    assert 1 + num_probed == pacer.switch.num_probes > 1
