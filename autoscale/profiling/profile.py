"""The initial cost table: a few timed forwards at start.

Owns what is timed. The forward and the draft are injected; nothing here knows a model. `table_cache` keeps the result.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoscale.policy.cost_curve import Curves, Points
from autoscale.policy.cost_model import BATCH_KNOTS, ROW_KNOTS, CostTable
from engine.core.step import ForwardInput
from engine.draft.messages import DraftRequestRow, DraftResponse
from engine.sampling.row_sampling import RowSampling

SHORT_CONTEXT, LONG_CONTEXT = 32, 512
REPEATS, FEW_REPEATS, LONG_FORWARD_S = 6, 2, 0.05
"""Repetitions of a timed forward; fewer where one takes longer than LONG_FORWARD_S seconds."""
ONCE_FORWARD_S = 0.5
"""A forward that takes longer runs once: what the first run adds to its own time is small then."""
BUDGET_S = 4.0
"""Once the first runs took so many seconds, no larger forwards are timed. Their time grows with the rows by then."""
SPAN_ROWS = 4
"""Rows per span of a timed forward: between a plain decode and the verification of a long draft."""
MAX_LOGIT_ROWS = 128
"""Rows of a timed forward that yield logits. Further rows stand for prompts, which need none."""
CHECK_ROWS = (1, 16)
"""Numbers of rows at which a cached table is checked."""
CHECK_RATIO, MOST_RATIO = 1.3, 3.0
"""A cached table is corrected where a forward takes more than the first many times longer or shorter than it says, and
discarded where it is more than the second. On a shared machine memory is often a half faster or slower than before."""
LEAST_SHARE = 4
"""A draft pass takes at least the share of a draft that it would have if all passes took the same, over this number."""
_PROFILE_KEY = 1 << 62
"""First key of the profiling requests, above the key of every real request."""
_SPREAD = 7919
"""Distance of the token ids of neighbouring rows. A prime, so that they differ."""


def profile_target(
    forward: Callable[[ForwardInput], object],
    *,
    block_size: int,
    num_blocks: int,
    max_rows: int,
    max_spans: int,
    vocab_size: int,
    clock: Callable[[], float] = time.perf_counter,
) -> CostTable:
    """Time the target at growing numbers of rows, before the first request arrives.

    Args:
        forward: runs one forward; what it writes into the KV cache is overwritten later.
        block_size: tokens per KV block.
        num_blocks: blocks of the KV cache; block 0 is not used.
        max_rows, max_spans: limits of one forward.
        vocab_size: of the target. The rows have different tokens, as in a batch, so that they wake different experts.
        clock: returns seconds.

    Returns:
        A table without draft costs. Rows past the limits or the budget are extrapolated with the last slope.
    """

    limits = _Limits(block_size, num_blocks, max_rows, max_spans, vocab_size, clock)

    few = min(8, max_spans)
    first, *others = ROW_KNOTS  # One row comes first, so that it is timed whatever the budget is.
    jobs = [(first, SHORT_CONTEXT), (few, SHORT_CONTEXT), (few, LONG_CONTEXT)]
    jobs += [(rows, SHORT_CONTEXT) for rows in others]
    fastest = _fastest(forward, limits, jobs)
    values: list[float] = []
    for rows in ROW_KNOTS:
        seconds = fastest.get((rows, SHORT_CONTEXT))
        if seconds is None:
            last = len(values) - 1
            slope = (values[last] - values[last - 1]) / (ROW_KNOTS[last] - ROW_KNOTS[last - 1]) if last > 0 else 0.0
            # More rows seem faster where another process took the time of fewer; far beyond, that would be below 0.
            seconds = values[last] + max(0.0, slope) * (rows - ROW_KNOTS[last])
        values.append(seconds)
    # Fewer rows do not take longer. Where they seem to, another process took the time.
    values = np.minimum.accumulate(values[::-1])[::-1].tolist()
    short, long = fastest.get((few, SHORT_CONTEXT)), fastest.get((few, LONG_CONTEXT))
    rate = (long - short) / ((LONG_CONTEXT - SHORT_CONTEXT) * limits.spans(few)) if short and long else 0.0
    return CostTable(tuple(values), (0.0,) * len(BATCH_KNOTS), context_s=max(0.0, rate))


def adapted(
    table: CostTable,
    forward: Callable[[ForwardInput], object],
    *,
    block_size: int,
    num_blocks: int,
    max_rows: int,
    max_spans: int,
    vocab_size: int,
    clock: Callable[[], float] = time.perf_counter,
) -> CostTable | None:
    """A cached table as it holds now, by a few timed forwards: their ratios to the table correct it.

    Below the smallest and above the largest of them their own ratios hold; in between the ratio is interpolated over
    the logarithm of the rows. Steps teach the rest.

    Args:
        table: the cached table.
        forward, block_size, num_blocks, max_rows, max_spans, vocab_size, clock: see `profile_target`.

    Returns:
        The table itself where it holds, a corrected one, or None where it is so far off that all must be timed anew.
    """
    limits = _Limits(block_size, num_blocks, max_rows, max_spans, vocab_size, clock)
    curve = Curves([Points(knots=ROW_KNOTS, values=table.verify_s)])[0]
    ratios: dict[int, float] = {}
    for (rows, _), seconds in _fastest(forward, limits, [(rows, SHORT_CONTEXT) for rows in CHECK_ROWS]).items():
        ratios[rows] = seconds / (curve.at(rows) + table.context_s * SHORT_CONTEXT * limits.spans(rows))
    furthest = max(max(ratio, 1 / ratio) for ratio in ratios.values())
    if furthest > MOST_RATIO:
        return None
    if furthest < CHECK_RATIO:
        return table
    factors = np.interp(np.log(ROW_KNOTS), np.log(list(ratios)), list(ratios.values()))
    verify_s = np.maximum.accumulate(np.array(table.verify_s) * factors).tolist()
    return replace(table, verify_s=tuple(verify_s), context_s=table.context_s * float(factors[-1]))


def profile_draft(
    ask: Callable[[Sequence[DraftRequestRow], Sequence[int]], DraftResponse],
    table: CostTable,
    *,
    max_rows: int,
    max_k: int,
    positions_per_pass: int = 1,
) -> CostTable:
    """Time the draft at growing batch sizes, before it drafts for a request.

    Args:
        ask: sends draft request rows and released keys to the draft and returns its response.
        table: costs of the target.
        max_rows, max_k: limits of one draft request.
        positions_per_pass: tokens that one pass of the draft drafts. A parallel draft is timed with one full pass.

    Returns:
        The table with the draft's costs added.
    """
    depth = min(4 if positions_per_pass == 1 else positions_per_pass, max_k)
    num_passes = -(-depth // positions_per_pass)
    sizes = sorted({min(size, max_rows) for size in (1, 4, 16)})
    timed = [_time_draft(ask, batch, depth, num_passes) for batch in sizes]
    seconds = [each.pass_s for each in timed]
    pass_s = np.interp(BATCH_KNOTS, sizes, seconds)
    slope = (seconds[-1] - seconds[0]) / max(1, sizes[-1] - sizes[0])
    pass_s += max(0.0, slope) * np.maximum(0, np.array(BATCH_KNOTS) - sizes[-1])
    return replace(
        table,
        positions_per_pass=positions_per_pass,
        pass_s=tuple(float(value) for value in pass_s),
        catch_up_s=min(each.catch_up_s for each in timed),
        request_s=min(each.request_s for each in timed),
        handoff_s=statistics.median([handoff_s for each in timed for handoff_s in each.handoffs_s]),
    )


@dataclass(frozen=True, slots=True)
class _DraftTimes:
    """Measured times of the draft at one batch size."""

    pass_s: float
    """Seconds of a pass."""
    request_s: float
    """Seconds of a request besides passes and reading; 0 for one pass, which does not tell."""
    catch_up_s: float
    """Seconds for each committed token that the draft reads."""
    handoffs_s: tuple[float, ...]
    """Seconds that each draft request took besides the draft's computing."""


def _time_draft(
    ask: Callable[[Sequence[DraftRequestRow], Sequence[int]], DraftResponse], batch: int, depth: int, num_passes: int
) -> _DraftTimes:
    """Time drafts of `depth` tokens and of one token for `batch` sequences, and the reading of SHORT_CONTEXT tokens.

    What a draft of one token takes more than a pass belongs to the request.
    """
    keys = [_PROFILE_KEY + index for index in range(batch)]
    ask([_request_row(key, 0, 1, 0) for key in keys], [])
    num_sent = 1
    drafts_s: dict[int, list[float]] = {depth: []} if num_passes == 1 else {depth: [], 1: []}
    handoffs_s: list[float] = []
    for _ in range(REPEATS + 1):
        for k, seconds in drafts_s.items():
            response = ask([_request_row(key, num_sent, 1, k) for key in keys], [])
            num_sent += 1
            seconds.append(response.draft_s)
            handoffs_s.append(response.handoff_s)
    response = ask([_request_row(key, num_sent, SHORT_CONTEXT, 0) for key in keys], [])
    ask([], keys)
    catch_up_s = response.draft_s / (SHORT_CONTEXT * batch)
    fastest = {k: min(seconds[1:]) for k, seconds in drafts_s.items()}  # The first repetition warms up.
    pass_s, request_s = fastest[depth] / num_passes, 0.0
    if num_passes > 1:
        # A bound, because another process may have taken the time of the shorter draft.
        pass_s = min(pass_s, max(pass_s / LEAST_SHARE, (fastest[depth] - fastest[1]) / (num_passes - 1)))
        request_s = max(0.0, fastest[1] - pass_s - catch_up_s * batch)
    return _DraftTimes(pass_s, request_s, catch_up_s, tuple(handoffs_s))


@dataclass(frozen=True, slots=True)
class _Limits:
    """Limits of one forward, and the clock that times it."""

    block_size: int
    num_blocks: int
    max_rows: int
    max_spans: int
    vocab_size: int
    clock: Callable[[], float]

    def spans(self, rows: int) -> int:
        """Number of spans over which so many rows are spread."""
        return min(self.max_spans, -(-rows // SPAN_ROWS))


def _fastest(
    forward: Callable[[ForwardInput], object], limits: _Limits, jobs: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], float]:
    """Seconds of a forward by (rows, cached tokens per span); jobs past the limits or the budget are left out.

    Jobs take turns and the fastest run of each counts, because other processes can only add time.
    """
    inputs: dict[tuple[int, int], ForwardInput] = {}
    for rows, context in jobs:
        num_spans = limits.spans(rows)
        q_lens = [rows // num_spans + (index < rows % num_spans) for index in range(num_spans)]
        width = -(-(context + max(q_lens)) // limits.block_size)
        if rows <= limits.max_rows and num_spans * width <= limits.num_blocks - 1:
            inputs[rows, context] = _forward_input(q_lens, context, width, limits)
    best = dict.fromkeys(inputs, math.inf)
    started = limits.clock()
    for turn in range(1 + REPEATS):  # the first one warms up
        for job, forward_input in inputs.items():
            begin = limits.clock()
            if turn == 0 and begin - started > BUDGET_S:
                del best[job]
                continue
            if job not in best:
                continue
            is_timed = best[job] < math.inf
            if is_timed and best[job] > (LONG_FORWARD_S if turn > FEW_REPEATS else ONCE_FORWARD_S):
                continue
            forward(forward_input)
            seconds = limits.clock() - begin
            if turn > 0 or seconds > ONCE_FORWARD_S:
                best[job] = min(best[job], seconds)
    return best


def _request_row(key: int, start: int, num_new_tokens: int, k: int) -> DraftRequestRow:
    return DraftRequestRow(key, start, (1,) * num_new_tokens, k, RowSampling(0.0, 1.0, 0, 0, False))


def _forward_input(q_lens: Sequence[int], context: int, width: int, limits: _Limits) -> ForwardInput:
    """One span of each length in `q_lens` after `context` cached tokens, each in separate KV blocks.

    Args:
        q_lens: rows of each span.
        context: cached tokens before each span.
        width: KV blocks per span.
        limits: of the target.
    """
    spans, block_size = len(q_lens), limits.block_size
    tables = (1 + np.arange(spans * width, dtype=np.int32)).reshape(spans, width)
    positions = [np.arange(context, context + length, dtype=np.int32) for length in q_lens]
    slots = [tables[i, at // block_size] * block_size + at % block_size for i, at in enumerate(positions)]
    rows = sum(q_lens)
    return ForwardInput(
        token_ids=(np.arange(rows) * _SPREAD % limits.vocab_size).astype(np.int32),
        positions=np.concatenate(positions),
        slots=np.concatenate(slots).astype(np.int32),
        q_lens=np.array(q_lens, dtype=np.int32),
        kv_lens=np.array(q_lens, dtype=np.int32) + np.int32(context),
        block_tables=tables,
        logit_rows=np.arange(min(rows, MAX_LOGIT_ROWS), dtype=np.int32),
    )
