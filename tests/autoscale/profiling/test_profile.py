"""The profile at start measures rows, context, draft passes and reading, and is cached for the same engine only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from autoscale.policy.cost_model import BATCH_KNOTS, ROW_KNOTS, CostTable
from autoscale.policy.goodput import UNMEASURED
from autoscale.profiling.profile import adapted, profile_draft, profile_target
from engine.core.step import ForwardInput
from engine.draft.messages import DraftRequestRow, DraftResponse, DraftResponseRow


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


ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""The knots within LIMITS."""


class ListedForward:
    """A forward that takes `seconds_of(rows, turn)` and lists its inputs."""

    def __init__(self, seconds_of: Callable[[int, int], float]) -> None:
        self.inputs: list[ForwardInput] = []
        self.now_s = 0.0
        self._seconds_of = seconds_of
        self._num_calls: dict[tuple[int, int], int] = {}

    def __call__(self, forward_input: ForwardInput) -> None:
        self.inputs.append(forward_input)
        rows, context = self.job_of(forward_input)
        turn = self._num_calls.get((rows, context), 0)
        self._num_calls[rows, context] = turn + 1
        self.now_s += self._seconds_of(rows, turn)

    @staticmethod
    def job_of(forward_input: ForwardInput) -> tuple[int, int]:
        """Rows, and cached tokens per span."""
        return len(forward_input.token_ids), int(forward_input.kv_lens[0] - forward_input.q_lens[0])

    def profile(self, **limits: int) -> CostTable:
        return profile_target(self, **(LIMITS | limits), clock=lambda: self.now_s)


def test_the_table_by_hand() -> None:
    """Linear costs: a step of 0.5 ms, 20 us per row and 2 us per token of the context; 32 tokens of it per span."""
    forward = TimedForward()
    table = profile_target(forward, **LIMITS, clock=lambda: forward.now_s)
    spans = [-(-rows // 4) for rows in ROWS]
    expected = [0.0005 + 2e-5 * rows + 2e-6 * (rows + 32 * num) for rows, num in zip(ROWS, spans, strict=True)]
    slope = (expected[-1] - expected[-2]) / 128
    expected += [expected[-1] + slope * more for more in (256, 768, 1792)]
    assert table.verify_s == pytest.approx(expected)
    assert table.context_s == pytest.approx(2e-6)
    assert table.pass_s == (0.0,) * len(BATCH_KNOTS)


def test_jobs_take_turns_and_run_seven_times_each() -> None:
    forward = ListedForward(lambda rows, turn: 0.001)
    forward.profile()
    jobs = [(1, 32), (8, 32), (8, 512), *((rows, 32) for rows in ROWS if rows not in (1, 8))]
    assert [forward.job_of(each) for each in forward.inputs] == jobs * 7


def test_forwards_of_more_than_50_ms_run_three_times() -> None:
    forward = ListedForward(lambda rows, turn: 0.049 if rows < 64 else 0.051)
    forward.profile()
    runs = [forward.job_of(each)[0] for each in forward.inputs]
    assert [runs.count(rows) for rows in (32, 64, 128, 256)] == [7, 3, 3, 3]


def test_the_fastest_run_after_the_first_one_counts() -> None:
    table = ListedForward(lambda rows, turn: (0.001, 0.009, 0.009, 0.004, 0.009, 0.009, 0.009)[turn]).profile()
    assert table.verify_s[:9] == pytest.approx((0.004,) * 9)


def test_a_forward_that_seems_slower_with_fewer_rows_takes_the_time_of_more_rows() -> None:
    table = ListedForward(lambda rows, turn: {1: 0.005, 2: 0.003, 4: 0.002, 8: 0.004}.get(rows, 0.006)).profile()
    assert table.verify_s[:5] == pytest.approx((0.002, 0.002, 0.002, 0.004, 0.006))


def test_spans_have_four_rows_and_blocks_of_their_own() -> None:
    forward = ListedForward(lambda rows, turn: 0.001)
    forward.profile()
    by_job = {forward.job_of(each): each for each in forward.inputs}
    assert by_job[1, 32].q_lens.tolist() == [1]
    assert by_job[8, 512].q_lens.tolist() == [4, 4]
    assert by_job[8, 512].kv_lens.tolist() == [516, 516]
    assert by_job[8, 512].positions.tolist() == [512, 513, 514, 515] * 2
    assert by_job[8, 512].block_tables.tolist() == [list(range(1, 34)), list(range(34, 67))]
    assert by_job[8, 512].slots.tolist() == [33 * 16, 33 * 16 + 1, 33 * 16 + 2, 33 * 16 + 3] + [
        66 * 16 + offset for offset in range(4)
    ]
    assert [len(by_job[rows, 32].logit_rows) for rows in (64, 128, 256)] == [64, 128, 128]
    assert by_job[8, 32].logit_rows.tolist() == list(range(8))


def test_rows_are_spread_over_the_spans_that_the_limits_allow() -> None:
    forward = ListedForward(lambda rows, turn: 0.001)
    forward.profile(max_spans=3)
    q_lens = {len(each.token_ids): each.q_lens.tolist() for each in forward.inputs}
    assert q_lens[3] == [3], "the rows of the two contexts that are compared"
    assert q_lens[16] == [6, 5, 5]


@pytest.mark.parametrize(("num_blocks", "largest"), [(193, 256), (192, 128)])
def test_forwards_that_do_not_fit_in_the_cache_are_left_out(num_blocks: int, largest: int) -> None:
    """64 spans of 36 tokens take three blocks each; block 0 is not used."""
    forward = ListedForward(lambda rows, turn: 1e-5 * rows)
    table = forward.profile(num_blocks=num_blocks)
    assert max(len(each.token_ids) for each in forward.inputs) == largest
    assert table.verify_s[8] == pytest.approx(256e-5)


def test_one_row_alone_gives_a_constant_table_without_context() -> None:
    table = ListedForward(lambda rows, turn: 0.003).profile(max_rows=1)
    assert table.verify_s == pytest.approx((0.003,) * len(ROW_KNOTS))
    assert table.context_s == 0.0


@pytest.mark.parametrize(("factor", "holds"), [(1.29, True), (1.31, False), (1 / 1.29, True), (1 / 1.31, False)])
def test_a_cached_table_holds_within_thirty_percent(factor: float, holds: bool) -> None:
    """The forward takes what the table says of its rows and its cached tokens, times a factor."""
    table = CostTable(tuple(0.01 + 0.001 * rows for rows in ROW_KNOTS), (0.0,) * len(BATCH_KNOTS), context_s=1e-4)
    now_s, seen = 0.0, set()

    def forward(forward_input: ForwardInput) -> None:
        nonlocal now_s
        rows, num_cached = len(forward_input.token_ids), int((forward_input.kv_lens - forward_input.q_lens).sum())
        seen.add((rows, num_cached))
        now_s += factor * (0.01 + 0.001 * rows + 1e-4 * num_cached)

    assert (adapted(table, forward, **LIMITS, clock=lambda: now_s) is table) is holds
    assert {(1, 32), (16, 128)} == seen


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


@pytest.mark.parametrize("factor", [0.32, 0.34, 0.5, 2.0, 2.9, 3.1])
def test_a_cached_table_follows_the_machine_up_to_a_bound(factor: float) -> None:
    """On a machine that is twice as fast or slow all costs are; one that differs more than threefold is timed anew."""
    table = CostTable(tuple(0.01 + 0.001 * rows for rows in ROW_KNOTS), (0.0,) * len(BATCH_KNOTS), context_s=1e-4)
    now_s = 0.0

    def forward(forward_input: ForwardInput) -> None:
        nonlocal now_s
        num_cached = int((forward_input.kv_lens - forward_input.q_lens).sum())
        now_s += factor * (0.01 + 0.001 * len(forward_input.token_ids) + 1e-4 * num_cached)

    found = adapted(table, forward, **LIMITS, clock=lambda: now_s)
    if not 1 / 3 < factor < 3:
        assert found is None
        return
    assert found is not None
    assert found.verify_s == pytest.approx([factor * seconds for seconds in table.verify_s])
    assert found.context_s == pytest.approx(factor * table.context_s)


def test_a_cached_table_is_corrected_by_rows_and_stays_monotone() -> None:
    """One row got twice as fast and sixteen twice as slow, so four rows take 1.25 times as long."""
    table = CostTable(tuple(0.01 + 0.001 * rows for rows in ROW_KNOTS), (0.0,) * len(BATCH_KNOTS))
    now_s = 0.0

    def forward(forward_input: ForwardInput) -> None:
        nonlocal now_s
        rows = len(forward_input.token_ids)
        now_s += (0.01 + 0.001 * rows) * (0.5 if rows == 1 else 2.0)

    found = adapted(table, forward, **LIMITS, clock=lambda: now_s)
    assert found is not None
    factors = [new / old for new, old in zip(found.verify_s, table.verify_s, strict=True)]
    assert factors[0] == pytest.approx(0.5)
    assert factors[2] == pytest.approx(1.25)
    assert factors[4:] == pytest.approx([2.0] * (len(ROW_KNOTS) - 4))
    assert list(found.verify_s) == sorted(found.verify_s)


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


class ListedDraft:
    """A draft that lists its requests. A pass over n sequences takes 1 + 0.1 n ms, and a token that is read 10 us."""

    def __init__(self) -> None:
        self.num_calls = 16
        """Requests per batch size."""
        self.request_s = 0.0
        self.asked: list[tuple[int, int, int, int]] = []
        """Rows, and first position, new tokens and k of each."""
        self.keys: set[int] = set()
        self.released: list[int] = []

    def __call__(self, rows: Sequence[DraftRequestRow], released: Sequence[int]) -> DraftResponse:
        self.released += released
        num, call = len(rows), len(self.asked)
        if rows:
            self.asked.append((num, rows[0].start, len(rows[0].new_tokens), rows[0].k))
            assert {(row.start, len(row.new_tokens), row.k) for row in rows} == {self.asked[-1][1:]}
        self.keys |= {row.key for row in rows}
        draft_s = sum(1e-5 * len(row.new_tokens) for row in rows) + max(
            (self.request_s + row.k * (0.001 + 1e-4 * num) for row in rows if row.k), default=0.0
        )
        is_first_pass = 1 <= call % self.num_calls <= self.num_calls // 8  # one of each length
        responses = tuple(DraftResponseRow((1,) * row.k) for row in rows)
        return DraftResponse(
            1, 1, responses, 1e-6 if is_first_pass else draft_s, handoff_s=1e-5 * (call % self.num_calls)
        )


def test_the_draft_table_by_hand() -> None:
    """Drafts of four tokens and of one; the first two requests warm up."""
    draft = ListedDraft()
    draft.request_s = 0.0007
    table = profile_draft(draft, UNMEASURED, max_rows=64, max_k=5)
    assert table.pass_s == pytest.approx([0.001 + 1e-4 * batch for batch in BATCH_KNOTS])
    assert table.catch_up_s == pytest.approx(1e-5)
    assert table.request_s == pytest.approx(0.0007)
    assert table.handoff_s == pytest.approx(7.5e-5), "the median of 10 to 140 us"
    assert table.verify_s == UNMEASURED.verify_s


def test_the_requests_of_the_draft_profile() -> None:
    """One token to begin, seven drafts of each length, the reading of 32 tokens; then the next size, keys released."""
    draft = ListedDraft()
    profile_draft(draft, UNMEASURED, max_rows=3, max_k=2)
    one_size = [(0, 1, 0), *((start, 1, 1 + start % 2) for start in range(1, 15)), (15, 32, 0)]
    assert draft.asked == [(num, *row) for num in (1, 3) for row in one_size]
    assert draft.keys == {(1 << 62) + index for index in range(3)}, "above the key of every real request"
    assert draft.released == [(1 << 62) + index for index in (0, 0, 1, 2)]


@pytest.mark.parametrize(("positions", "max_k", "depth"), [(8, 5, 5), (3, 9, 3)])
def test_a_parallel_draft_is_timed_with_one_full_pass(positions: int, max_k: int, depth: int) -> None:
    """Each answer takes the time of `depth` passes of the listed draft; all of it is the time of one pass here."""
    draft = ListedDraft()
    draft.num_calls = 9
    table = profile_draft(draft, UNMEASURED, max_rows=1, max_k=max_k, positions_per_pass=positions)
    assert table.request_s == 0.0
    assert {k for *_, k in draft.asked} == {0, depth}
    assert table.positions_per_pass == positions
    assert table.pass_s == pytest.approx([depth * (0.001 + 1e-4) + 1e-5] * len(BATCH_KNOTS))


def test_a_draft_of_one_row_gives_a_constant_table() -> None:
    table = profile_draft(ListedDraft(), UNMEASURED, max_rows=1, max_k=9)
    assert table.pass_s == pytest.approx([0.001 + 1e-4] * len(BATCH_KNOTS))


@pytest.mark.parametrize("seconds", [4.1, 60.0])
def test_where_one_forward_takes_the_whole_budget_one_row_is_timed(seconds: float) -> None:
    forward = ListedForward(lambda rows, turn: seconds)
    table = forward.profile()
    assert table.verify_s == (seconds,) * len(ROW_KNOTS)
    assert table.context_s == 0.0
    assert [len(each.token_ids) for each in forward.inputs] == [1]


def test_a_time_that_falls_with_the_rows_is_not_extrapolated() -> None:
    """The last timed forward has more rows and is faster, because another process disturbed the one before."""
    forward = ListedForward(lambda rows, turn: {1: 0.9, 2: 1.2, 8: 1.0}.get(rows, 0.8))
    table = forward.profile()
    assert {len(each.token_ids) for each in forward.inputs} == {1, 2, 8}, "the budget ends before four rows"
    assert all(0 < seconds <= 1.2 for seconds in table.verify_s)
    assert list(table.verify_s) == sorted(table.verify_s)


def test_a_slow_machine_times_small_forwards_and_extrapolates_the_others() -> None:
    """Its longest forwards alone would take minutes. They take as long as the rows say."""
    slow, times = TimedForward(factor=400.0), dict[int, int]()

    def counted(forward_input: ForwardInput) -> None:
        rows = len(forward_input.token_ids)
        times[rows] = times.get(rows, 0) + 1
        slow(forward_input)

    table = profile_target(counted, **LIMITS, clock=lambda: slow.now_s)
    assert slow.now_s < 20
    assert times[1] > 1
    assert times[max(times)] == 1, "a forward of more than half a second runs once"
    assert max(times) < 256
    truth = profile_target(whole := TimedForward(), **LIMITS, clock=lambda: whole.now_s)
    assert table.verify_s == pytest.approx([400 * seconds for seconds in truth.verify_s], rel=0.1)
    assert 1e-6 < table.context_s / 400 < 4e-6, "contexts are timed before large forwards"
