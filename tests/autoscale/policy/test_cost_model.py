"""Costs of steps: they follow a machine that changes, outliers move them little, each part has its own measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs
from step_stats import make_step

from autoscale.policy.cost_model import BATCH_KNOTS, ROW_KNOTS, CostModel, CostTable
from autoscale.policy.goodput import UNMEASURED
from autoscale.simulation.hardware import cpu_table
from autoscale.simulation.simulator import Simulation, Workload
from engine.core.pacing import KChoice, Prediction, SpeculationPlan
from engine.core.request import Request
from engine.core.stats import StepStats


class Recording:
    """A pacer of random K that lets a cost model observe every step."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self._rng = np.random.default_rng(5)
        self.stats: list[StepStats] = []

    def choose(self, plan: SpeculationPlan, decodes: Sequence[Request], num_prefill_rows: int) -> list[KChoice]:
        k = int(self._rng.integers(0, 6))
        return [KChoice(k, "plan")] * len(decodes)

    def observe(self, stats: StepStats) -> Prediction:
        self.cost.observe(stats)
        self.stats.append(stats)
        return Prediction()


def test_from_knowing_nothing_to_a_median_error_below_ten_percent() -> None:
    cost = CostModel(UNMEASURED, measured=False)
    streams = lambda now_s: 1 + int(now_s) % 32  # noqa: E731 - a load that visits every batch size
    pacer = Recording(cost)
    Simulation(cpu_table(), Workload("any", 0.6), streams).run(pacer, SpeculationPlan(), 60.0)
    assert cost.error()[0] < 0.10
    held_out = Recording(CostModel(cost.table()))
    Simulation(cpu_table(), Workload("any", 0.6), streams, seed=9).run(held_out, SpeculationPlan(), 10.0)
    assert held_out.cost.error()[0] < 0.10


def test_one_hiccup_moves_little_and_a_lasting_change_is_followed() -> None:
    cost = CostModel(cpu_table())
    pacer = Recording(cost)
    Simulation(cpu_table(), Workload("any", 0.6), lambda _: 8).run(pacer, SpeculationPlan(), 20.0)
    usual = pacer.stats[-1]
    before = cost.verify_s(usual.num_rows, usual.context_len)
    cost.observe(structs.replace(usual, verify_s=100 * usual.verify_s, step_s=100 * usual.step_s))
    assert cost.verify_s(usual.num_rows, usual.context_len) < 1.05 * before
    for _ in range(600):
        cost.observe(structs.replace(usual, verify_s=2 * before, step_s=2 * before))
    assert cost.verify_s(usual.num_rows, usual.context_len) > 1.6 * before


def step(*, rows: int, verify_s: float, rest_s: float, sample_s: float = 0.0, draft_s: float = 0.0) -> StepStats:
    """A step of one request. Rows after the first one are drafted by a model."""
    drafted = rows - 1
    return structs.replace(
        make_step([(drafted, 0)], 0) if drafted else make_step([], 1),
        context_len=0,
        num_caught_up=min(1, drafted),
        draft_s=draft_s,
        handoff_s=0.0,
        verify_s=verify_s,
        sample_s=sample_s,
        step_s=verify_s + sample_s + draft_s + rest_s,
    )


def test_the_handoff_is_not_part_of_a_plain_step() -> None:
    """Otherwise steps without drafts look too expensive, and drafting stays on where it loses."""
    cost = CostModel(cpu_table())
    verify_s = CostModel(cpu_table()).verify_s
    plain = step(rows=1, verify_s=verify_s(1, 0), rest_s=0.001)
    asked = step(rows=4, verify_s=verify_s(4, 0), rest_s=0.003, draft_s=0.002)
    for number in range(400):
        cost.observe(plain if number % 20 == 0 else asked)
    assert cost.overhead_s == pytest.approx(0.001, rel=0.02)
    assert cost.handoff_s == pytest.approx(0.002, rel=0.05)
    assert cost.step_s(1, 0) == pytest.approx(plain.step_s, rel=0.05)
    assert cost.step_s(4, 0, batch=1, depth=3, num_caught_up=1) == pytest.approx(asked.step_s, rel=0.05)


def test_sampling_costs_per_row() -> None:
    cost = CostModel(cpu_table())
    for number in range(100):
        rows = 8 - number % 2
        cost.observe(step(rows=rows, verify_s=cost.verify_s(rows, 0), rest_s=0.0, sample_s=5e-4 * rows))
    forward_s = (cost.verify_s(12, 0) - cost.verify_s(8, 0)) / 4
    assert cost.row_s(8, 4) == pytest.approx(forward_s + 5e-4, rel=0.05)
    assert cost.step_s(9, 0) - cost.step_s(9, 0, num_prompt_rows=4) == pytest.approx(4 * 5e-4, rel=0.05)


def test_plain_steps_of_one_size_are_learned_by_their_mean() -> None:
    each, mean = CostModel(cpu_table()), CostModel(cpu_table())
    for seconds in (0.010, 0.016, 0.012, 0.014):
        each.observe(step(rows=1, verify_s=seconds, rest_s=0.0))
        mean.observe(step(rows=1, verify_s=0.013, rest_s=0.0))
    assert each.verify_s(1, 0) == pytest.approx(mean.verify_s(1, 0))
    assert each.verify_s(1, 0) != CostModel(cpu_table()).verify_s(1, 0)


def test_observe_returns_what_was_predicted_before_it_learned() -> None:
    cost, fresh = CostModel(cpu_table()), CostModel(cpu_table())
    stats = step(rows=4, verify_s=1.0, rest_s=0.5, draft_s=0.5)
    found = cost.observe(stats)
    assert found.seconds == fresh.step_s(4, 0, batch=1, depth=3, num_caught_up=1)
    assert found.plain_s == fresh.step_s(1, 0)
    assert cost.step_s(1, 0) != fresh.step_s(1, 0)


def test_the_error_is_relative_to_the_measured_step() -> None:
    cost = CostModel(cpu_table())
    assert cost.error() == (0.0, 0.0)
    stats = step(rows=1, verify_s=0.02, rest_s=0.0)
    predicted = cost.observe(stats).seconds
    assert cost.error() == pytest.approx((abs(predicted - 0.02) / 0.02,) * 2)


def test_prompts_are_not_sampled() -> None:
    """Of eight rows six are of prompts; sampling two rows took 2 ms, and of none it takes nothing."""
    cost = CostModel(replace(cpu_table(), sample_row_s=0.0))
    stats = structs.replace(step(rows=1, verify_s=0.01, rest_s=0.0), num_rows=8, num_prefill_tokens=6, sample_s=0.002)
    cost.observe(stats)
    without = cost.overhead_s + cost.verify_s(8, 0)
    assert cost.step_s(8, 0, num_prompt_rows=6) == pytest.approx(without + 0.002)
    assert cost.step_s(8, 0, num_prompt_rows=8) == without
    learned = cost.table()
    cost.observe(structs.replace(stats, num_prefill_tokens=8, sample_s=0.0))
    assert (cost.table().sample_s, cost.table().sample_row_s) == (learned.sample_s, learned.sample_row_s)


def sampling(cost: CostModel, rows: int, seconds: float) -> None:
    """Observe a plain step with this time of sampling."""
    cost.observe(structs.replace(step(rows=1, verify_s=0.01, rest_s=0.0), num_rows=rows, sample_s=seconds))


def test_sampling_has_a_price_per_step_and_a_price_per_row() -> None:
    """0.1 ms and 20 us. Drafted rows cost the latter only, whatever the batch."""
    cost = CostModel(cpu_table())
    for _ in range(400):
        for rows in (1, 6, 32):
            sampling(cost, rows, 1e-4 + 2e-5 * rows)
    learned = cost.table()
    assert learned.sample_s == pytest.approx(1e-4, rel=0.1)
    assert learned.sample_row_s == pytest.approx(2e-5, rel=0.1)


def test_dearer_sampling_of_a_full_batch_is_a_price_per_row() -> None:
    cost = CostModel(replace(cpu_table(), sample_s=1e-4, sample_row_s=2e-5))
    for _ in range(400):
        sampling(cost, 32, 1e-4 + 2e-4 * 32)
    learned = cost.table()
    assert learned.sample_s + 32 * learned.sample_row_s == pytest.approx(1e-4 + 2e-4 * 32, rel=0.01)
    assert learned.sample_row_s == pytest.approx(2e-4, rel=0.05)


def test_the_prices_of_sampling_are_never_negative() -> None:
    cost = CostModel(replace(cpu_table(), sample_s=1e-3, sample_row_s=0.0))
    for _ in range(50):
        sampling(cost, 16, 0.0)
    assert cost.table().sample_s >= 0.0
    assert cost.table().sample_row_s == 0.0


def test_the_first_observations_of_a_single_number_are_averaged() -> None:
    cost = CostModel(replace(cpu_table(), overhead_s=0.0))
    for rest_s in (0.001, 0.002, 0.003):
        cost.observe(step(rows=1, verify_s=0.01, rest_s=rest_s))
    assert cost.overhead_s == pytest.approx(0.002)


def test_a_measured_table_replaces_what_was_learned() -> None:
    cost = CostModel(cpu_table())
    for _ in range(20):
        cost.observe(step(rows=1, verify_s=0.1, rest_s=0.0))
    cost.measured(cpu_table())
    assert cost.table() == cpu_table()


def test_what_is_kept_of_a_size_is_what_it_took_when_it_was_in_use() -> None:
    """A neighbour takes time while 32 requests run. The next step is predicted slower at every size."""
    cost, alone_s, full_s = CostModel(cpu_table()), cpu_table().verify_s[0], cpu_table().verify_s[5]
    alone, full = step(rows=1, verify_s=alone_s, rest_s=0.0), step(rows=1, verify_s=full_s, rest_s=0.0)
    for number in range(1600):
        cost.observe(structs.replace(full, num_rows=32) if number // 4 % 2 else alone)
    for _ in range(2000):
        cost.observe(structs.replace(full, num_rows=32, verify_s=1.5 * full_s))
    assert cost.table().verify_s[0] == pytest.approx(alone_s, rel=0.02)
    assert cost.table().verify_s[5] == pytest.approx(1.5 * full_s, rel=0.02)
    assert cost.verify_s(32, 0) == pytest.approx(1.5 * full_s, rel=0.02)
    assert cost.verify_s(1, 0) > 1.3 * alone_s


def test_a_draft_pass_is_kept_as_it_was_measured() -> None:
    cost = CostModel(cpu_table())
    asked = step(rows=4, verify_s=0.02, rest_s=0.0, draft_s=3 * 0.002)
    for _ in range(400):
        cost.observe(structs.replace(asked, num_caught_up=0))
    assert cost.table().pass_s[0] == pytest.approx(0.002, rel=0.02)


def test_what_a_request_takes_besides_passes_does_not_make_longer_drafts_look_dear() -> None:
    """A draft takes 0.6 ms and 0.4 ms for each token. All drafts that are seen have one token."""
    table = replace(cpu_table(), pass_s=(0.0004,) * len(BATCH_KNOTS), request_s=0.0006, catch_up_s=0.0)
    cost = CostModel(table)
    for _ in range(400):
        cost.observe(structs.replace(step(rows=2, verify_s=0.01, rest_s=0.0, draft_s=0.001), num_caught_up=0))
    assert cost.draft_s(1, 5) - cost.handoff_s == pytest.approx(0.0006 + 5 * 0.0004, rel=0.02)
    assert cost.table().request_s == 0.0006


def test_knots_double_from_one_to_the_largest_step_and_batch() -> None:
    assert tuple(2**power for power in range(12)) == ROW_KNOTS
    assert tuple(2**power for power in range(9)) == BATCH_KNOTS


def test_the_errors_are_the_median_and_the_95th_percentile_of_the_last_512() -> None:
    cost, errors = CostModel(cpu_table()), []
    rng = np.random.default_rng(0)
    for number in range(700):
        stats = step(rows=1, verify_s=float(rng.uniform(0.01, 0.02)), rest_s=0.0)
        errors.append(abs(cost.observe(stats).seconds - stats.step_s) / stats.step_s)
        if number in (0, 1, 19, 20, 99, 511, 512, 699):
            last = sorted(errors[-512:])
            at_95 = min(len(last) - 1, int(0.95 * len(last)))
            assert cost.error() == (last[len(last) // 2], last[at_95])


def test_a_step_of_no_duration_has_no_error() -> None:
    cost = CostModel(cpu_table())
    cost.observe(structs.replace(step(rows=1, verify_s=0.0, rest_s=0.0), step_s=0.0))
    assert cost.error() == (0.0, 0.0)


def test_the_parts_of_a_step_add_up() -> None:
    table = CostTable(
        tuple(0.001 * rows for rows in ROW_KNOTS),
        tuple(0.0001 * batch for batch in BATCH_KNOTS),
        context_s=1e-5,
        catch_up_s=1e-4,
        handoff_s=0.0015,
        request_s=0.0005,
        overhead_s=0.004,
        sample_s=0.003,
        sample_row_s=0.0005,
    )
    cost = CostModel(table)
    assert cost.table() == table
    plain = 0.004 + 0.003 + 0.001 * 6 + 1e-5 * 100
    assert cost.step_s(6, 100) == pytest.approx(plain + 0.0005 * 6)
    assert cost.step_s(6, 100, num_prompt_rows=4) == pytest.approx(plain + 0.0005 * 2)
    assert cost.step_s(6, 100, 3, 2) == pytest.approx(plain + 0.0005 * 6 + 0.002 + 2 * 0.0003)
    assert cost.step_s(6, 100, 3, 0, 5) == pytest.approx(plain + 0.0005 * 6 + 0.002 + 5e-4)
    assert cost.step_s(6, 100, 3, 0, 0) == cost.step_s(6, 100), "no draft request"
    assert cost.added_rows_s(4, 2) == pytest.approx([0.0, 0.0015, 0.003])
    assert cost.row_s(4, 2) == pytest.approx(0.0015)
    assert cost.draft_s(3, 2) == pytest.approx(0.002 + 2 * 0.0003)


def test_steps_are_learned_in_groups_of_four_of_one_size() -> None:
    """Three steps of one row are kept until a fourth one, a draft, or another size comes."""
    before = CostModel(cpu_table()).verify_s(1, 0)
    plain = step(rows=1, verify_s=2 * before, rest_s=0.0)
    other = structs.replace(plain, num_rows=2)
    drafting = step(rows=4, verify_s=2 * before, rest_s=0.0, draft_s=0.001)
    for steps, is_learned in (
        ([plain] * 3, False),
        ([plain] * 4, True),
        ([plain, other], True),
        ([drafting], True),
    ):
        cost = CostModel(cpu_table())
        for each in steps:
            cost.observe(each)
        assert (cost.verify_s(1, 0) != before) is is_learned


def test_padded_rows_are_paid_for_and_rows_within_the_padding_are_free() -> None:
    cost, padded = CostModel(replace(cpu_table(), sample_row_s=0.0)), CostModel(replace(cpu_table(), sample_row_s=0.0))
    padded.pad_rows((1, 4, 8))
    assert padded.verify_s(2, 0) == padded.verify_s(4, 0) == cost.verify_s(4, 0)
    assert padded.verify_s(9, 0) == cost.verify_s(9, 0)
    added = padded.added_rows_s(2, 4).tolist()
    assert added[:3] == [0.0, 0.0, 0.0]
    assert added[3] == added[4] == pytest.approx(cost.verify_s(8, 0) - cost.verify_s(4, 0))
    assert padded.added_rows_s(2, 4).shape == cost.added_rows_s(2, 4).shape
