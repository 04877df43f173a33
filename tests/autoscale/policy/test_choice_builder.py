"""From K to choices: reasons, the early-exit threshold, and the K of prompt lookup drafts."""

from __future__ import annotations

import numpy as np
import pytest

from autoscale.policy.acceptance_rate import Acceptance
from autoscale.policy.allocation import Allocation
from autoscale.policy.choice_builder import ChoiceBuilder
from autoscale.policy.cost_model import CostModel
from autoscale.policy.lookup_k import LookupK
from autoscale.simulation.hardware import cpu_table
from engine.core.pacing import NUM_MATCH_CLASSES, KChoice
from engine.core.stats import RowOutcome
from engine.messages import WORKLOADS

BEST = Allocation(np.array([3, 2, 1]), tokens=6.0, seconds=0.02)


def builder(*, lookup: bool = False, confidences: bool = False) -> ChoiceBuilder:
    acceptance = Acceptance(4, (0.8,))
    if confidences:
        acceptance.observe([RowOutcome(1, 2, 2, 10, "greedy", 2, (0.9, 0.9))])
    built = ChoiceBuilder(CostModel(cpu_table()), acceptance, LookupK(4) if lookup else None)
    built.reprice(BEST, 9, 4, 300.0)
    return built


def test_each_k_has_its_reason() -> None:
    choices = builder().build([2, 0, 1], [0, 0, 1], reason="plan", zero_reason="acceptance")
    cost = CostModel(cpu_table())
    least, price = 300.0 * cost.row_s(9, 4), 300.0 * cost.pass_s(3) / 3
    assert choices == [
        KChoice(2, "plan", least_acceptance=least, node_price=price),
        KChoice(0, "acceptance"),
        KChoice(1, "plan", least_acceptance=least, node_price=price),
    ]


def test_a_node_of_a_tree_has_to_be_worth_its_row_unless_acceptance_is_measured() -> None:
    built = builder(lookup=True)
    (zero,) = built.build([0], [0], reason="plan", zero_reason="acceptance")
    assert 0 < zero.least_acceptance < 1, "lookup may draft"
    (probe,) = built.build([2], [0], reason="probe", zero_reason="acceptance")
    assert (probe.least_acceptance, probe.node_price) == (0.0, 0.0)
    (off,) = built.build([0], [0], reason="probe", zero_reason="acceptance")
    assert off == zero, "while the model does not draft, lookup still has to pay"
    built.reprice(BEST, 9, 4, 1e6)
    (dear,) = built.build([2], [0], reason="plan", zero_reason="acceptance")
    assert dear.least_acceptance == 1.0


def test_the_threshold_is_the_price_of_a_position_over_the_rate_of_the_next_one() -> None:
    """A position costs its row and its share of a pass over the two requests with K > 1, at 300 tokens per second."""
    cost, acceptance = CostModel(cpu_table()), Acceptance(4, (0.8,))
    acceptance.observe([RowOutcome(1, 2, 2, 10, "greedy", 2, (0.9, 0.9))])
    price = 300.0 * (cost.row_s(9, 4) + cost.pass_s(2) / 4)
    expected = acceptance.confidence_at(price / acceptance.deeper_rate(0), 0)
    choices = builder(confidences=True).build([0, 1, 2], [0, 0, 0], reason="plan", zero_reason="acceptance")
    assert [choice.exit_threshold for choice in choices] == [0.0, 0.0, pytest.approx(expected)]
    assert 0 < expected < 1


def test_without_confidences_there_is_no_threshold() -> None:
    (choice,) = builder().build([3], [0], reason="plan", zero_reason="acceptance")
    assert choice.exit_threshold == 0.0


def test_lookup_drafts_get_a_k_of_their_own_unless_nothing_may_be_drafted() -> None:
    built, lookup = builder(lookup=True), LookupK(4)
    row_s = CostModel(cpu_table()).row_s(9, 4)
    expected = lookup.ks(tokens_per_s=300.0, row_s=row_s, width=4)
    assert built.has_lookup_drafts
    choices = built.build([0, 0], [0, 2], reason="plan", zero_reason="acceptance")
    assert [choice.k_by_match for choice in choices] == [expected[0], expected[2]]
    (baseline,) = built.build([0], [0], reason="probe", zero_reason="probe", lookup_allowed=False)
    assert baseline == KChoice(0, "probe", (0,) * NUM_MATCH_CLASSES)


def test_without_lookup_there_is_none() -> None:
    built = builder()
    assert not built.has_lookup_drafts
    (choice,) = built.build([0], [0], reason="probe", zero_reason="probe", lookup_allowed=False)
    assert choice.k_by_match is None


def test_lookup_drafts_that_never_pay_do_not_count() -> None:
    built = ChoiceBuilder(CostModel(cpu_table()), Acceptance(4, (0.8,)), LookupK(4))
    assert not built.has_lookup_drafts, "nothing was priced yet"
    built.reprice(BEST, 9, 4, 1e6)
    assert not built.has_lookup_drafts


def test_the_choice_of_zero_by_workload() -> None:
    assert builder().zero_by_workload("batch") == [KChoice(0, "batch")] * len(WORKLOADS)
