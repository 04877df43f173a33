"""The profile at start sees rows, context, draft passes and reading, and is cached for the same engine only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from autoscale.policy.cost_model import BATCH_KNOTS, ROW_KNOTS, CostTable
from autoscale.policy.goodput import UNMEASURED
from autoscale.policy.profiling import TableCache, profile_draft, profile_target, still_holds
from engine.core.step import ForwardInput
from engine.draft.messages import DraftResponse, DraftResponseRow


class TimedForward:
    """A forward that takes a time by its rows and context, and the clock that shows it."""

    def __init__(self, factor: float = 1.0) -> None:
        self.now_s = 0.0
        self._factor = factor

    def __call__(self, forward_input: ForwardInput) -> None:
        assert forward_input.block_tables.max() < 400
        assert (forward_input.slots // 16 > 0).all(), "block 0 is scratch"
        self.now_s += self._factor * (
            0.0005 + 2e-5 * len(forward_input.token_ids) + 2e-6 * float(forward_input.kv_lens.sum())
        )


LIMITS = {"block_size": 16, "num_blocks": 400, "max_rows": 256, "max_spans": 64, "vocab_size": 1000}


def test_the_profile_sees_rows_and_context() -> None:
    forward = TimedForward()
    table = profile_target(forward, **LIMITS, clock=lambda: forward.now_s)
    assert len(table.verify_s) == len(ROW_KNOTS)
    assert 1e-5 < (table.verify_s[6] - table.verify_s[0]) / 63 < 8e-5
    assert table.verify_s[-1] > table.verify_s[7], "rows past the limit are extrapolated with the last slope"
    assert 1e-6 < table.context_s < 4e-6


def test_rows_have_different_tokens_so_that_they_wake_different_experts() -> None:
    """An expert costs its weights once, however many rows have it: the table must grow with the experts awake."""
    seen: list[ForwardInput] = []
    profile_target(seen.append, **LIMITS)
    for forward_input in seen:
        assert forward_input.token_ids.min() >= 0
        assert forward_input.token_ids.max() < 1000
        assert len(set(forward_input.token_ids.tolist())) == len(forward_input.token_ids)


def test_other_processes_hardly_disturb_the_profile() -> None:
    quiet, busy, rng = TimedForward(), TimedForward(), np.random.default_rng(3)

    def disturbed(forward_input: ForwardInput) -> None:
        busy(forward_input)
        if rng.random() < 0.4:
            busy.now_s += rng.uniform(0.0, 0.02)

    truth = profile_target(quiet, **LIMITS, clock=lambda: quiet.now_s)
    table = profile_target(disturbed, **LIMITS, clock=lambda: busy.now_s)
    assert table.verify_s == pytest.approx(truth.verify_s, rel=0.05)
    assert list(table.verify_s) == sorted(table.verify_s)


@pytest.mark.parametrize(("factor", "holds"), [(1.0, True), (1.1, True), (0.5, False), (2.0, False)])
def test_a_cached_table_holds_only_while_forwards_take_as_long(factor: float, holds: bool) -> None:
    """A kernel that is twice as fast, or a machine that is twice as slow, is measured again."""
    first = TimedForward()
    table = profile_target(first, **LIMITS, clock=lambda: first.now_s)
    now = TimedForward(factor)
    assert still_holds(table, now, **LIMITS, clock=lambda: now.now_s) is holds


def test_the_profile_of_the_draft_sees_passes_and_reading() -> None:
    sent: dict[int, int] = {}

    def ask(rows, released):  # type: ignore[no-untyped-def]
        draft_s = 0.0
        for row in rows:
            assert sent.get(row.key, 0) == row.start, "the profile sends committed tokens in order"
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


def test_a_table_is_cached_for_the_same_engine_only(tmp_path: Path) -> None:
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
