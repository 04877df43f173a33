"""The estimated time per token: with the K that pays at each batch, corrected by what tokens took."""

from __future__ import annotations

import numpy as np
import pytest
from step_stats import make_step, step_stats

from autoscale.policy.goodput import make_goodput
from autoscale.replicas.decision import BATCHES
from autoscale.replicas.tpot_estimate import TpotEstimate
from autoscale.simulation.hardware import cpu_table
from engine.core.pacing import Prediction, SpeculationPlan


def test_the_estimate_is_with_the_k_that_pays_at_each_batch() -> None:
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


def test_the_estimate_follows_what_tokens_took() -> None:
    goodput = make_goodput("draft_model", 8, cpu_table())
    tpot_estimate = TpotEstimate(goodput)
    before = tpot_estimate.tpot_s(SpeculationPlan(policy="off"))
    for _ in range(50):
        tpot_estimate.observe(make_step([], 4, step_s=0.03), Prediction())
    assert tpot_estimate.tpot_s(SpeculationPlan(policy="off"))[2] == pytest.approx(0.03, rel=0.1)
    assert tpot_estimate.tpot_s(SpeculationPlan(policy="off"))[2] > 2 * before[2]


@pytest.mark.parametrize(
    "plan", [SpeculationPlan(policy="off"), SpeculationPlan(enabled=False), SpeculationPlan(policy="fixed", max_k=0)]
)
def test_without_drafts_it_is_the_plain_step(plan: SpeculationPlan) -> None:
    goodput = make_goodput("draft_model", 8, cpu_table())
    assert TpotEstimate(goodput).tpot_s(plan) == pytest.approx([goodput.cost.step_s(batch, 0) for batch in BATCHES])


def test_under_a_fixed_k_it_is_the_whole_step_over_its_tokens() -> None:
    goodput = make_goodput("draft_model", 8, cpu_table())
    found = TpotEstimate(goodput).tpot_s(SpeculationPlan(policy="fixed", max_k=3))
    tokens = 1 + np.cumprod(goodput.acceptance.mean_rates()[:3]).sum()
    assert found == pytest.approx([goodput.cost.step_s(4 * batch, 0, batch, 3) / tokens for batch in BATCHES])


def test_the_threshold_policy_drafts_below_its_batch_only() -> None:
    estimate = TpotEstimate(make_goodput("draft_model", 8, cpu_table()))
    threshold = estimate.tpot_s(SpeculationPlan(policy="threshold", max_k=3, max_batch=8))
    fixed, plain = (estimate.tpot_s(SpeculationPlan(policy=policy, max_k=3)) for policy in ("fixed", "off"))
    assert [a == b for a, b in zip(threshold, fixed, strict=True)] == [batch < 8 for batch in BATCHES]
    assert [a == b for a, b in zip(threshold, plain, strict=True)] == [batch >= 8 for batch in BATCHES]


@pytest.mark.parametrize(("step_s", "factor"), [(100.0, 4.0), (1e-6, 0.5)])
def test_the_correction_is_bounded(step_s: float, factor: float) -> None:
    estimate, plan = TpotEstimate(make_goodput("draft_model", 8, cpu_table())), SpeculationPlan(policy="off")
    plain = estimate.tpot_s(plan)
    estimate.observe(step_stats(step_s=step_s, context_len=0), Prediction())
    assert estimate.tpot_s(plan) == pytest.approx([factor * value for value in plain])


def test_steps_without_decodes_do_not_count() -> None:
    estimate, plan = TpotEstimate(make_goodput("draft_model", 8, cpu_table())), SpeculationPlan(policy="off")
    before = estimate.tpot_s(plan)
    estimate.observe(step_stats(num_decodes=0, num_emitted=1, step_s=9.0), Prediction())
    assert estimate.tpot_s(plan) == before
