"""Acceptance of adapters is learned apart: a draft that fails for one goes on for the others, and is noticed."""

from __future__ import annotations

from msgspec import structs
from step_stats import make_step, step_stats

from autoscale.control.priors import MAX_ADAPTERS, Counts, DraftClass, PriorPool
from autoscale.control.report import Aggregator
from autoscale.policy.acceptance_rate import Acceptance, AcceptanceClasses
from autoscale.policy.goodput import make_goodput
from autoscale.policy.lookup_k import LookupK
from autoscale.simulation.hardware import cpu_table
from engine.core.pacing import KChoice, Prediction, Prior, SpeculationPlan
from engine.core.request import Request
from engine.core.stats import RowOutcome
from engine.messages import WORKLOADS, AdapterRef, SamplingParams, Submit

MAX_K = 6
PLAN = SpeculationPlan(max_k=MAX_K)
GOOD, BAD = AdapterRef(number=1, name="good"), AdapterRef(number=2, name="bad")


def request(key: int, adapter: AdapterRef | None) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=10_000)
    submit = Submit(request_id=str(key), prompt=(1,), sampling=sampling, adapter=adapter)
    return Request(submit=submit, key=key, stream_key=0, tokens=[1] * 50, num_computed=49)


def outcome(of: Request, k: int, accepted: int) -> RowOutcome:
    return RowOutcome(of.key, k, accepted, 50, adapter=of.adapter_name)


def test_each_adapter_has_rows_of_its_own() -> None:
    classes = AcceptanceClasses()
    assert [classes.row(workload) for workload in WORKLOADS] == list(range(len(WORKLOADS)))
    first = classes.row("greedy", "a")
    assert first == len(WORKLOADS)
    assert classes.row("greedy", "b") == 2 * len(WORKLOADS)
    assert classes.row("greedy", "a") == first
    assert len(classes) == 3 * len(WORKLOADS)


def test_a_draft_that_fails_for_one_adapter_keeps_its_rates_elsewhere() -> None:
    acceptance = Acceptance(MAX_K, (0.75,))
    base, good, bad = request(1, None), request(2, GOOD), request(3, BAD)
    for _ in range(200):
        acceptance.observe([outcome(base, 4, 4), outcome(good, 4, 3), outcome(bad, 4, 0)])
    assert acceptance.by_position("greedy")[0] > 0.9
    assert acceptance.by_position("greedy", "good")[0] > 0.9
    assert acceptance.by_position("greedy", "bad")[0] < 0.1
    assert acceptance.by_position("greedy", "new")[0] == 0.75, "a new adapter starts from the default prior"
    assert acceptance.by_position("hot", "bad")[0] == 0.75
    assert acceptance.rates().shape == (4 * len(WORKLOADS), MAX_K)


def run(pacer, requests: list[Request], accepts: dict[str, int], steps: int) -> list[KChoice]:  # type: ignore[no-untyped-def]
    """Steps in which a draft of any length is accepted up to so many tokens. Returns the last choices."""
    choices: list[KChoice] = []
    for _ in range(steps):
        choices = list(pacer.choose(PLAN, requests, 0))
        drafted = [(r, c.k) for r, c in zip(requests, choices, strict=True) if c.k]
        outcomes = tuple(outcome(r, k, min(k, accepts[r.adapter_name])) for r, k in drafted)
        num_drafted, num_accepted = sum(o.num_drafted for o in outcomes), sum(o.num_accepted for o in outcomes)
        rows = len(requests) + num_drafted
        pacer.observe(
            step_stats(
                num_decodes=len(requests),
                num_rows=rows,
                num_drafted=num_drafted,
                num_accepted=num_accepted,
                num_emitted=num_accepted + len(requests),
                depth=max((o.num_drafted for o in outcomes), default=0),
                outcomes=outcomes,
                step_s=0.02,
            )
        )
    return choices


def test_the_pace_of_one_batch_differs_by_adapter() -> None:
    """New requests of each adapter: what decides is what was learned of the adapter, not of the request."""
    pacer = make_goodput("draft_model", MAX_K, cpu_table())
    old = [request(1, None), request(2, GOOD), request(3, BAD)]
    run(pacer, old, {"": MAX_K, "good": MAX_K, "bad": 0}, 300)
    new = [request(11, None), request(12, GOOD), request(13, BAD), request(14, AdapterRef(number=3, name="unseen"))]
    base, good, bad, unseen = (choice.k for choice in pacer.choose(PLAN, new, 0))
    assert bad == 0
    assert base > 1
    assert good > 1
    assert unseen > 0


def test_an_adapter_that_comes_while_drafting_is_off_gets_a_choice() -> None:
    pacer = make_goodput("draft_model", MAX_K, cpu_table(), lookup=True)
    run(pacer, [request(1, None)], {"": 0}, 400)
    late = [request(1, None), request(2, GOOD)]
    choices = run(pacer, late, {"": 0, "good": 0}, 3)
    assert len(choices) == 2
    assert all(choice.k_by_match is not None for choice in choices)


def test_lookup_drafts_are_learned_by_adapter() -> None:
    classes = AcceptanceClasses()
    lookup = LookupK(4, classes)
    for _ in range(200):
        lookup.observe([RowOutcome(1, 4, 0, 9, source="lookup", match_len=2, adapter="bad")], [])
    acceptance = lookup.acceptance_of(2)
    assert acceptance.by_position("greedy", "bad")[0] < 0.1
    assert acceptance.by_position("greedy")[0] == 0.5
    assert len(lookup.ks(tokens_per_s=10.0, row_s=0.001, width=4)) == len(classes)


def test_priors_are_pooled_by_adapter() -> None:
    aggregator = Aggregator("eagle")
    outcomes = [RowOutcome(1, 2, 2, 9), RowOutcome(2, 2, 0, 9, adapter="bad")]
    for _ in range(100):
        aggregator.add(structs.replace(make_step([], 1), outcomes=tuple(outcomes)), Prediction())
    pool = PriorPool()
    pool.add(aggregator.take().by_draft_class)
    priors = {(prior.adapter, prior.workload): prior for prior in pool.priors()}
    assert len(priors) == 2 * len(WORKLOADS)
    assert priors["", "greedy"].rates[0] > 0.9
    assert priors["bad", "greedy"].rates[0] < 0.1
    assert priors["", "hot"].rates[0] > 0.9, "a class without observations starts from its own adapter's others"
    assert priors["bad", "hot"].rates[0] < 0.1
    acceptance = Acceptance(2, (0.5,))
    acceptance.adopt(pool.priors())
    assert acceptance.by_position("greedy")[0] > 0.9
    assert acceptance.by_position("greedy", "bad")[0] < 0.1
    again = PriorPool()
    again.adopt(pool.priors())
    kept = {(prior.adapter, prior.workload): prior for prior in again.priors()}
    assert kept["bad", "greedy"].rates[0] < 0.1


def test_the_pool_forgets_the_adapters_seen_longest_ago() -> None:
    pool = PriorPool()
    pool.add({DraftClass("eagle", "greedy"): Counts((9,), (9,))})
    for number in range(MAX_ADAPTERS + 5):
        pool.add({DraftClass("eagle", "greedy", f"a{number}"): Counts((9,), (9,))})
    names = {prior.adapter for prior in pool.priors()}
    assert names == {"", *(f"a{number}" for number in range(5, MAX_ADAPTERS + 5))}


def test_a_prior_without_an_adapter_is_that_of_the_base_model() -> None:
    assert Prior(method="eagle", workload="greedy", rates=(0.5,), weights=(1.0,)).adapter == ""
