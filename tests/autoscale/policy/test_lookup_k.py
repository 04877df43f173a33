"""K of prompt lookup drafts: they go on where a model's drafts do not pay, and responses stay exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from fakes import RandomPacer, ToyEngine, ToyModel, toy_drafter
from msgspec import structs
from step_stats import make_step
from switches import drafting

from autoscale.control.priors import DraftClass
from autoscale.control.report import Aggregator
from autoscale.policy.cost_model import ROW_KNOTS, CostModel, CostTable
from autoscale.policy.goodput import Goodput, make_goodput
from autoscale.policy.lookup_k import LookupK
from autoscale.simulation.hardware import cpu_table
from engine.core.drafter import NoDrafter
from engine.core.pacing import MAX_MATCH_LEN, NUM_MATCH_CLASSES, KChoice, Prediction, SpeculationPlan
from engine.core.request import Request
from engine.core.stats import RowOutcome, StepStats
from engine.core.step import Batch, Span
from engine.draft.first_of import FirstOf
from engine.draft.grammar import GrammarDrafter
from engine.lookup.ngram import NgramDrafter
from engine.messages import WORKLOADS, SamplingParams, Submit

MAX_K = 6


def request(key: int) -> Request:
    submit = Submit(request_id=str(key), prompt=(1,), sampling=SamplingParams(temperature=0.0, max_tokens=500))
    return Request(submit=submit, key=key, stream_key=0, tokens=[1])


def step_of(*outcomes: RowOutcome) -> StepStats:
    return structs.replace(make_step([], 1), outcomes=outcomes)


def taught(model: bool, lookup: bool, batch: int = 4, table: CostTable | None = None) -> tuple[Goodput, list[KChoice]]:
    """A policy that has seen all drafts of a source accepted or all rejected, and what it then chooses."""
    pacer = drafting(make_goodput("eagle", MAX_K, table or cpu_table(), lookup=True))
    requests = [request(key) for key in range(batch)]
    for _ in range(150):
        pacer.acceptance.observe([RowOutcome(1, 4, 4 * model, 10)])
        assert pacer.lookup is not None
        pacer.lookup.observe([RowOutcome(1, 4, 4 * lookup, 10, source="lookup")], ())
    for _ in range(40):  # time for the switch
        chosen = list(pacer.choose(SpeculationPlan(max_k=MAX_K), requests, 0))
        pacer._now_s += 0.05
    return pacer, [choice for choice in chosen if choice.reason != "probe"]


def test_lookup_goes_on_where_the_model_does_not_pay() -> None:
    pacer, choices = taught(model=False, lookup=True)
    assert not pacer.switch.is_on
    assert {choice.k for choice in choices} == {0}
    assert all(choice.k_by_match is not None and choice.k_by_match[0] == MAX_K for choice in choices)


def test_the_model_goes_on_where_lookup_finds_nothing_of_use() -> None:
    _, choices = taught(model=True, lookup=False)
    assert all(choice.k > 0 for choice in choices)
    assert all(choice.k_by_match is not None and choice.k_by_match[0] <= 1 for choice in choices)


def test_rows_that_cost_more_than_they_yield_are_not_drafted() -> None:
    """In a large batch a row costs a full share of the step, so only drafts that are likelier than that are kept."""
    table = cpu_table()
    expensive = replace(table, verify_s=tuple(0.01 * rows for rows in ROW_KNOTS))
    pacer, _ = taught(model=False, lookup=True, table=expensive)
    assert pacer.lookup is not None
    for _ in range(100):
        pacer.lookup.observe([RowOutcome(1, 1, n, 10, source="lookup") for n in (0, 1)], ())
    found = [
        pacer.choose(SpeculationPlan(max_k=MAX_K), [request(key) for key in range(8)], 0)[0].k_by_match
        for _ in range(31)
    ]
    assert np.median([ks[0] for ks in found if ks is not None]) == 0


def test_a_long_match_is_drafted_where_a_short_one_is_not() -> None:
    pacer, _ = taught(model=False, lookup=True)
    assert pacer.lookup is not None
    for _ in range(100):
        short = [RowOutcome(1, 1, n, 10, source="lookup", match_len=2) for n in (0, 0, 0, 1)]
        long = [RowOutcome(2, MAX_K, MAX_K, 10, source="lookup", match_len=MAX_MATCH_LEN)]
        pacer.lookup.observe(short + long, ())
    ks = pacer.lookup.ks(tokens_per_s=100.0, row_s=0.005, width=MAX_K)[0]
    assert ks[0] == 0
    assert ks[-1] == MAX_K


@pytest.mark.parametrize(("before", "length"), [((9, 5, 6, 7), 3), ((4, 5, 6, 7), 4), ((6, 7), 2)])
def test_lookup_reports_the_match_and_is_cut_to_its_k(before: tuple[int, ...], length: int) -> None:
    tokens = [*before, 1, 2, 3, 0, 4, 5, 6, 7]
    span = Span(replace(request(1), tokens=tokens), len(tokens) - 1, 1, 3, True, "plan", k_by_match=(1, 2, 3, 3))
    lookup = NgramDrafter(min_size=2, max_size=2)
    for drafter in (lookup, FirstOf(lookup, NoDrafter(), source="lookup")):
        (row,) = drafter.draft(Batch(1, (span,), 0)).rows
        assert (row.token_ids, row.match_len) == ((1, 2, 3)[: 1 if length == 2 else 2], length)


def test_each_source_is_learned_and_pooled_separately() -> None:
    pacer = make_goodput("eagle", MAX_K, cpu_table(), lookup=True)
    before = pacer.acceptance.by_position().copy()
    step = step_of(RowOutcome(1, 3, 0, 10, source="lookup"), RowOutcome(2, 3, 3, 10, source="grammar"))
    for _ in range(50):
        pacer.observe(step)
    assert np.array_equal(pacer.acceptance.by_position(), before)
    assert pacer.lookup is not None
    assert pacer.lookup.acceptance_of(0).by_position()[0] < 0.1
    aggregator = Aggregator("eagle")
    aggregator.add(step_of(*step.outcomes, RowOutcome(3, 2, 2, 10)), Prediction())
    assert set(aggregator.take().by_draft_class) == {
        DraftClass("ngram", "greedy"),
        DraftClass("eagle", "greedy"),
    }


def test_a_tree_of_lookup_and_model_tells_nothing_of_the_model_s_acceptance() -> None:
    """Lookup would have its part without the model. The draft's passes are part of the cost all the same."""
    pacer = make_goodput("eagle", MAX_K, cpu_table(), lookup=True)
    before, pass_s = pacer.acceptance.by_position().copy(), pacer.cost.pass_s(1)
    assert pacer.lookup is not None
    step = step_of(RowOutcome(1, 3, 0, 10, source="merged", match_len=2))
    for _ in range(50):
        pacer.observe(structs.replace(step, draft_s=1.0, step_s=1.1))
    assert np.array_equal(pacer.acceptance.by_position(), before)
    assert pacer.lookup.acceptance_of(2).by_position()[0] < 0.1
    assert pacer.cost.pass_s(1) > 2 * pass_s
    aggregator = Aggregator("eagle")
    aggregator.add(step, Prediction())
    assert aggregator.take().by_draft_class == {}


def test_lookup_drafts_teach_the_cost_model_rows_but_no_passes() -> None:
    cost = CostModel(cpu_table())
    before = cost.pass_s(1)
    step = structs.replace(make_step([(4, 2)], 0), draft_s=0.0, handoff_s=0.0)
    lookup = structs.replace(
        step, outcomes=tuple(structs.replace(outcome, source="lookup") for outcome in step.outcomes)
    )
    for _ in range(100):
        cost.observe(lookup)
    assert cost.pass_s(1) / before == pytest.approx(
        cost.verify_s(1, 0) / CostModel(cpu_table()).verify_s(1, 0), rel=0.3
    )


class TwoKs(RandomPacer):
    """Random K and lookup K, independent of each other."""

    def choose(self, plan: SpeculationPlan, decodes: Sequence[Request], num_prefill_rows: int) -> list[KChoice]:
        choices = super().choose(plan, decodes, num_prefill_rows)
        return [
            replace(choice, k_by_match=tuple(self._random.integers(0, 5, NUM_MATCH_CLASSES).tolist()))
            for choice in choices
        ]


def test_greedy_responses_are_the_same_under_any_two_ks() -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=50)
    submits = [Submit(request_id=f"r{i}", prompt=(i, 1, 2, 1, 2), sampling=sampling) for i in range(5)]

    def drafter() -> FirstOf:
        lookup = NgramDrafter(min_size=1, max_size=2)
        model = toy_drafter(ToyModel(vocab_size=5, seed=4, blend=0.3))
        return FirstOf(GrammarDrafter(), FirstOf(lookup, model, source="lookup"), source="grammar")

    plain = ToyEngine(ToyModel(vocab_size=5), NoDrafter(), RandomPacer(1, 0)).run(submits)
    for seed in range(3):
        engine = ToyEngine(ToyModel(vocab_size=5), drafter(), TwoKs(seed, 4))
        assert engine.run(submits) == plain


def test_a_row_is_drafted_where_its_acceptance_exceeds_its_price() -> None:
    """At 100 tokens per second a row of 5 ms costs half a token, and 0.55 with the margin."""
    lookup = LookupK(4)
    ks = lookup.ks(tokens_per_s=100.0, row_s=0.005, width=4)
    cumulative = [lookup.acceptance_of(length).by_position().cumprod() for length in (1, 3, 5, MAX_MATCH_LEN)]
    assert ks == [tuple(int((rates >= 0.55).sum()) for rates in cumulative)] * len(WORKLOADS)
    assert lookup.ks(tokens_per_s=100.0, row_s=0.0, width=3) == [(3,) * NUM_MATCH_CLASSES] * len(WORKLOADS)


def test_a_row_that_does_not_pay_is_tried_in_one_call_of_64() -> None:
    lookup = LookupK(4)
    ks = [lookup.ks(tokens_per_s=100.0, row_s=1.0, width=4)[0] for _ in range(128)]
    assert [index for index, k in enumerate(ks) if k == (1,) * NUM_MATCH_CLASSES] == [63, 127]
    assert sum(map(sum, ks)) == 2 * NUM_MATCH_CLASSES
    assert lookup.ks(tokens_per_s=100.0, row_s=1.0, width=0)[0] == (0,) * NUM_MATCH_CLASSES


def test_before_anything_was_seen_a_longer_match_gets_more_tokens() -> None:
    """A row pays where it is accepted with 1.1 times its price, 0.35 here; the last prior holds beyond it."""
    ks = LookupK(8).ks(tokens_per_s=70.0, row_s=0.005, width=8)
    assert ks[0] == (1, 2, 3, 5)
    assert ks == [ks[0]] * len(ks), "every kind starts alike"
    assert LookupK(8).ks(tokens_per_s=70.0, row_s=0.005, width=3)[0] == (1, 2, 3, 3)


def test_every_sixty_fourth_call_tries_one_token_where_none_pays() -> None:
    lookup = LookupK(8)
    tried = [call for call in range(1, 130) if lookup.ks(tokens_per_s=1000.0, row_s=1.0, width=8)[0] != (0, 0, 0, 0)]
    assert tried == [64, 128]
