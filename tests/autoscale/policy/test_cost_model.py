"""Costs: monotone whatever is learned, close to a machine that changes, calm about hiccups."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from step_stats import make_step

from autoscale.policy.cost_curve import Curves, Points
from autoscale.policy.cost_model import BATCH_KNOTS, ROW_KNOTS, CostModel, CostTable
from autoscale.policy.goodput import UNMEASURED
from autoscale.policy.profiling import TableCache, profile_draft, profile_target, still_holds
from autoscale.simulation.hardware import cpu_table
from autoscale.simulation.simulator import Simulation, Workload
from engine.core.pacing import KChoice, SpeculationPlan
from engine.core.request import Request
from engine.core.stats import StepStats
from engine.core.step import ForwardInput
from engine.draft.messages import DraftResponse, DraftResponseRow


@given(st.lists(st.tuples(st.floats(1, 3000), st.floats(0, 1), st.floats(0, 1e5)), max_size=60), st.booleans())
def test_a_longer_job_is_never_predicted_to_be_cheaper(
    lessons: list[tuple[float, float, float]], measured: bool
) -> None:
    curve = Curves([Points(knots=ROW_KNOTS, values=cpu_table().verify_s)], measured=measured)[0]
    for x, seen_s, context in lessons:
        curve.learn(x, seen_s, num_units=context)
    assert 0 <= curve.rate <= 1
    values = [curve.at(x) for x in (1, 1.5, 3, 7, 20, 33, 100, 700, 2500)]
    assert all(value >= 0 for value in values)
    assert values == sorted(values)
    assert np.all(np.diff(curve.added(5, 90)) >= 0)


class Recording:
    """A pacer of fixed but varied K that shows a cost model every step."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self._rng = np.random.default_rng(5)
        self.stats: list[StepStats] = []

    def choose(self, plan: SpeculationPlan, decodes: list[Request], num_prefill_rows: int) -> list[KChoice]:
        k = int(self._rng.integers(0, 6))
        return [KChoice(k, "plan")] * len(decodes)

    def observe(self, stats: StepStats) -> None:
        self.cost.observe(stats)
        self.stats.append(stats)


def test_from_knowing_nothing_to_a_median_error_below_ten_percent() -> None:
    cost = CostModel(UNMEASURED, measured=False)
    streams = lambda now_s: 1 + int(now_s) % 32  # noqa: E731 - a load that visits every batch size
    pacer = Recording(cost)
    Simulation(cpu_table(), Workload("any", 0.6), streams).run(pacer, SpeculationPlan(), 60.0)  # type: ignore[arg-type]
    assert cost.error()[0] < 0.10
    held_out = Recording(CostModel(cost.table()))
    Simulation(cpu_table(), Workload("any", 0.6), streams, seed=9).run(held_out, SpeculationPlan(), 10.0)  # type: ignore[arg-type]
    assert held_out.cost.error()[0] < 0.10


def test_one_hiccup_moves_little_and_a_lasting_change_is_followed() -> None:
    cost = CostModel(cpu_table())
    pacer = Recording(cost)
    Simulation(cpu_table(), Workload("any", 0.6), lambda _: 8).run(pacer, SpeculationPlan(), 20.0)  # type: ignore[arg-type]
    usual = pacer.stats[-1]
    before = cost.verify_s(usual.num_rows, usual.context_len)
    cost.observe(structs.replace(usual, verify_s=100 * usual.verify_s, step_s=100 * usual.step_s))
    assert cost.verify_s(usual.num_rows, usual.context_len) < 1.05 * before
    for _ in range(600):
        cost.observe(structs.replace(usual, verify_s=2 * before, step_s=2 * before))
    assert cost.verify_s(usual.num_rows, usual.context_len) > 1.6 * before


def step(*, rows: int, verify_s: float, rest_s: float, sample_s: float = 0.0, draft_s: float = 0.0) -> StepStats:
    """Of one request; asks the draft for the rows after the first one when there are any."""
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


def test_what_asking_the_draft_adds_is_no_part_of_a_plain_step() -> None:
    """Else steps without drafts look dearer than they are, and drafting is not given up where it loses."""
    cost = CostModel(cpu_table())
    verify_s = CostModel(cpu_table()).verify_s
    plain = step(rows=1, verify_s=verify_s(1, 0), rest_s=0.001)
    asked = step(rows=4, verify_s=verify_s(4, 0), rest_s=0.003, draft_s=0.002)
    for number in range(400):
        cost.observe(plain if number % 20 == 0 else asked)
    assert cost.overhead_s == pytest.approx(0.001, rel=0.02)
    assert cost.handoff_s == pytest.approx(0.002, rel=0.05)
    assert cost.step_s(1, 0) == pytest.approx(plain.step_s, rel=0.05)
    assert cost.step_s(4, 0, batch=1, depth=3, feed=1) == pytest.approx(asked.step_s, rel=0.05)


def test_what_sampling_takes_is_paid_per_row() -> None:
    cost = CostModel(cpu_table())
    for number in range(100):
        rows = 8 - number % 2
        cost.observe(step(rows=rows, verify_s=cost.verify_s(rows, 0), rest_s=0.0, sample_s=5e-4 * rows))
    forward_s = (cost.verify_s(12, 0) - cost.verify_s(8, 0)) / 4
    assert cost.row_s(8, 4) == pytest.approx(forward_s + 5e-4, rel=0.05)
    assert cost.step_s(9, 0) - cost.step_s(9, 0, num_prompt_rows=4) == pytest.approx(4 * 5e-4, rel=0.05)


def test_plain_steps_of_one_size_teach_by_their_mean() -> None:
    each, mean = CostModel(cpu_table()), CostModel(cpu_table())
    for seconds in (0.010, 0.016, 0.012, 0.014):
        each.observe(step(rows=1, verify_s=seconds, rest_s=0.0))
        mean.observe(step(rows=1, verify_s=0.013, rest_s=0.0))
    assert each.verify_s(1, 0) == pytest.approx(mean.verify_s(1, 0))
    assert each.verify_s(1, 0) != CostModel(cpu_table()).verify_s(1, 0)


class TimedForward:
    """A forward whose time is a function of its plan, and the clock that shows it."""

    def __init__(self, factor: float = 1.0) -> None:
        self.now_s = 0.0
        self._factor = factor

    def __call__(self, plan: ForwardInput) -> None:
        assert plan.block_tables.max() < 400
        assert (plan.slots // 16 > 0).all(), "block 0 is scratch"
        self.now_s += self._factor * (0.0005 + 2e-5 * len(plan.token_ids) + 2e-6 * float(plan.kv_lens.sum()))


LIMITS = {"block_size": 16, "num_blocks": 400, "max_rows": 256, "max_spans": 64}


def test_the_profile_sees_rows_and_context() -> None:
    forward = TimedForward()
    table = profile_target(forward, **LIMITS, clock=lambda: forward.now_s)
    assert len(table.verify_s) == len(ROW_KNOTS)
    assert 1e-5 < (table.verify_s[6] - table.verify_s[0]) / 63 < 8e-5
    assert table.verify_s[-1] > table.verify_s[7], "rows beyond the limit go on with the last slope"
    assert 1e-6 < table.context_s < 4e-6


def test_what_else_the_machine_does_hardly_shows_in_the_profile() -> None:
    quiet, busy, rng = TimedForward(), TimedForward(), np.random.default_rng(3)

    def disturbed(plan: ForwardInput) -> None:
        busy(plan)
        if rng.random() < 0.4:
            busy.now_s += rng.uniform(0.0, 0.02)

    truth = profile_target(quiet, **LIMITS, clock=lambda: quiet.now_s)
    table = profile_target(disturbed, **LIMITS, clock=lambda: busy.now_s)
    assert table.verify_s == pytest.approx(truth.verify_s, rel=0.05)
    assert list(table.verify_s) == sorted(table.verify_s)


@pytest.mark.parametrize(("factor", "holds"), [(1.0, True), (1.1, True), (0.5, False), (2.0, False)])
def test_a_kept_table_is_believed_only_while_forwards_take_as_long(factor: float, holds: bool) -> None:
    """A kernel that is twice as fast, or a machine that is twice as slow, is measured anew."""
    first = TimedForward()
    table = profile_target(first, **LIMITS, clock=lambda: first.now_s)
    now = TimedForward(factor)
    assert still_holds(table, now, **LIMITS, clock=lambda: now.now_s) is holds


def test_the_draft_s_profile_sees_passes_and_reading() -> None:
    sent: dict[int, int] = {}

    def ask(rows, released):  # type: ignore[no-untyped-def]
        draft_s = 0.0
        for row in rows:
            assert sent.get(row.key, 0) == row.start, "the profile tells what was committed in order"
            sent[row.key] = row.start + len(row.new_tokens)
            draft_s = max(draft_s, row.k * (0.001 + 1e-4 * len(rows)))
        draft_s += 1e-5 * sum(len(row.new_tokens) for row in rows)
        for key in released:
            del sent[key]
        return DraftResponse(1, 1, tuple(DraftResponseRow((1,) * row.k) for row in rows), draft_s, handoff_s=4e-5)

    table = profile_draft(ask, UNMEASURED, max_rows=16, max_k=5)
    assert not sent, "nothing is left in the draft"
    assert abs(table.pass_s[0] - 0.0011) < 1e-4
    assert abs(table.pass_s[4] - 0.0026) < 1e-4
    assert table.pass_s[-1] > table.pass_s[4]
    assert abs(table.catch_up_s - 1e-5) < 1e-6
    assert table.handoff_s == 4e-5


def test_a_table_is_found_again_only_by_the_same_engine(tmp_path: Path) -> None:
    table = CostTable(tuple(0.001 * x for x in ROW_KNOTS), (0.0,) * len(BATCH_KNOTS), context_s=1e-7)
    cache = TableCache(tmp_path / "costs", {"model": "a"})
    assert cache.load() is None
    cache.store(table)
    assert TableCache(tmp_path / "costs", {"model": "a"}).load() == table
    assert TableCache(tmp_path / "costs", {"model": "b"}).load() is None
    for damaged in (b"", b"{}", b'{"verify_s": [1], "pass_s": [1]}', b"\xff\x00"):
        (kept,) = (tmp_path / "costs").iterdir()
        kept.write_bytes(damaged)
        assert cache.load() is None
