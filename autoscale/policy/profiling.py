"""The first cost table: a few timed forwards at start, kept on disk for the next start on the same machine.

Owns what is timed and the file it is kept in. The forward and the draft are injected; nothing here knows a model.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from autoscale.policy.cost_curve import Curves, Points
from autoscale.policy.cost_model import BATCH_KNOTS, ROW_KNOTS, CostTable
from engine.core.step import ForwardInput
from engine.draft.messages import DraftRequestRow, DraftResponse
from engine.sampling.row_sampling import RowSampling

SHORT_CONTEXT, LONG_CONTEXT = 32, 512
REPEATS, FEW_REPEATS, LONG_FORWARD_S = 6, 2, 0.05
"""Times that a forward is timed; fewer times when it takes long."""
SPAN_ROWS = 4
"""Rows per span of a timed forward: between a plain decode and a long verification."""
MOST_LOGITS = 128
"""Rows of a timed forward that yield logits: what is more are prompts, which need none."""
SPOT_ROWS = (1, 16)
SPOT_LIMIT = 1.3
"""A kept table is measured anew when a forward takes this many times longer or shorter than it says."""
VERSION = 5
_PROFILE_KEY = 1 << 62
"""Above every request's key."""


def profile_target(
    forward: Callable[[ForwardInput], object],
    *,
    block_size: int,
    num_blocks: int,
    max_rows: int,
    max_spans: int,
    clock: Callable[[], float] = time.perf_counter,
) -> CostTable:
    """Time the target at growing numbers of rows, before the first request arrives.

    Args:
        forward: runs a plan; whatever it writes into the KV cache is overwritten later.
        block_size, num_blocks: of the cache, block 0 excluded from use.
        max_rows, max_spans: limits of one forward.
        clock: seconds.

    Returns:
        A table without draft costs; rows that do not fit are extended with the last slope.
    """

    limits = _Limits(block_size, num_blocks, max_rows, max_spans, clock)

    few = min(8, max_spans)
    jobs = [(rows, SHORT_CONTEXT) for rows in (*ROW_KNOTS, few)] + [(few, LONG_CONTEXT)]
    found = _fastest(forward, limits, jobs)
    values: list[float] = []
    for rows in ROW_KNOTS:
        seconds = found.get((rows, SHORT_CONTEXT))
        if seconds is None:
            last = len(values) - 1
            slope = (values[last] - values[last - 1]) / (ROW_KNOTS[last] - ROW_KNOTS[last - 1]) if last > 0 else 0.0
            seconds = values[last] + slope * (rows - ROW_KNOTS[last])
        values.append(seconds)
    # Fewer rows never take longer: where they seem to, something else ran.
    values = np.minimum.accumulate(values[::-1])[::-1].tolist()
    short, long = found.get((few, SHORT_CONTEXT)), found.get((few, LONG_CONTEXT))
    rate = (long - short) / ((LONG_CONTEXT - SHORT_CONTEXT) * limits.spans(few)) if short and long else 0.0
    return CostTable(tuple(values), (0.0,) * len(BATCH_KNOTS), context_s=max(0.0, rate))


def still_holds(
    table: CostTable,
    forward: Callable[[ForwardInput], object],
    *,
    block_size: int,
    num_blocks: int,
    max_rows: int,
    max_spans: int,
    clock: Callable[[], float] = time.perf_counter,
) -> bool:
    """Whether a few forwards take about as long as a table of another day says; arguments as in `profile_target`."""
    limits = _Limits(block_size, num_blocks, max_rows, max_spans, clock)
    curve = Curves([Points(knots=ROW_KNOTS, values=table.verify_s)])[0]
    for (rows, _), seconds in _fastest(forward, limits, [(rows, SHORT_CONTEXT) for rows in SPOT_ROWS]).items():
        ratio = seconds / (curve.at(rows) + table.context_s * SHORT_CONTEXT * limits.spans(rows))
        if not 1 / SPOT_LIMIT < ratio < SPOT_LIMIT:
            return False
    return True


def profile_draft(
    ask: Callable[[Sequence[DraftRequestRow], Sequence[int]], DraftResponse],
    table: CostTable,
    *,
    max_rows: int,
    max_k: int,
) -> CostTable:
    """Time the draft at growing batches, before it drafts for anybody.

    Args:
        ask: sends order rows and released keys to the draft and returns its answer.
        table: what is known of the target.
        max_rows, max_k: limits of one order.

    Returns:
        The table with the draft's costs.
    """
    depth = min(4, max_k)
    points: list[tuple[int, float]] = []
    handoffs: list[float] = []
    feeds: list[float] = []
    for batch in sorted({min(size, max_rows) for size in (1, 4, 16)}):
        keys = [_PROFILE_KEY + index for index in range(batch)]
        told = 1
        ask([_order(key, 0, 1, 0) for key in keys], [])
        passes = []
        for _ in range(REPEATS + 1):
            answer = ask([_order(key, told, 1, depth) for key in keys], [])
            told += 1
            passes.append(answer.draft_s / depth)
            handoffs.append(answer.handoff_s)
        points.append((batch, min(passes[1:])))
        fed = ask([_order(key, told, SHORT_CONTEXT, 0) for key in keys], [])
        feeds.append(fed.draft_s / (SHORT_CONTEXT * batch))
        ask([], keys)
    sizes, seconds = zip(*points, strict=True)
    pass_s = np.interp(BATCH_KNOTS, sizes, seconds)
    slope = (seconds[-1] - seconds[0]) / max(1, sizes[-1] - sizes[0])
    pass_s += max(0.0, slope) * np.maximum(0, np.array(BATCH_KNOTS) - sizes[-1])
    return replace(
        table,
        pass_s=tuple(float(value) for value in pass_s),
        catch_up_s=min(feeds),
        handoff_s=statistics.median(handoffs),
    )


@dataclass(frozen=True, slots=True)
class _Limits:
    """Of one forward, and what it is timed with."""

    block_size: int
    num_blocks: int
    max_rows: int
    max_spans: int
    clock: Callable[[], float]

    def spans(self, rows: int) -> int:
        """Over which so many rows are spread."""
        return min(self.max_spans, -(-rows // SPAN_ROWS))


def _fastest(
    forward: Callable[[ForwardInput], object], limits: _Limits, jobs: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], float]:
    """Seconds of a forward per (rows, cached tokens per span); without those that do not fit.

    Jobs take turns and the fastest of each counts, because whatever else the machine does only ever adds time.
    """
    plans: dict[tuple[int, int], ForwardInput] = {}
    for rows, context in jobs:
        num_spans = limits.spans(rows)
        q_lens = [rows // num_spans + (index < rows % num_spans) for index in range(num_spans)]
        width = -(-(context + max(q_lens)) // limits.block_size)
        if rows <= limits.max_rows and num_spans * width <= limits.num_blocks - 1:
            plans[rows, context] = _plan(q_lens, context, width, limits.block_size)
    best = dict.fromkeys(plans, math.inf)
    for turn in range(1 + REPEATS):  # the first one warms up
        for job, plan in plans.items():
            if turn > FEW_REPEATS and best[job] > LONG_FORWARD_S:
                continue
            begin = limits.clock()
            forward(plan)
            if turn > 0:
                best[job] = min(best[job], limits.clock() - begin)
    return best


def _order(key: int, start: int, num_new_tokens: int, k: int) -> DraftRequestRow:
    return DraftRequestRow(key, start, (1,) * num_new_tokens, k, RowSampling(0.0, 1.0, 0, 0, False))


def _plan(q_lens: Sequence[int], context: int, width: int, block_size: int) -> ForwardInput:
    """Spans of these many rows after `context` tokens each, every span in blocks of its own."""
    spans = len(q_lens)
    tables = (1 + np.arange(spans * width, dtype=np.int32)).reshape(spans, width)
    positions = [np.arange(context, context + length, dtype=np.int32) for length in q_lens]
    slots = [tables[i, at // block_size] * block_size + at % block_size for i, at in enumerate(positions)]
    rows = sum(q_lens)
    return ForwardInput(
        token_ids=np.ones(rows, dtype=np.int32),
        positions=np.concatenate(positions),
        slots=np.concatenate(slots).astype(np.int32),
        q_lens=np.array(q_lens, dtype=np.int32),
        kv_lens=np.array(q_lens, dtype=np.int32) + np.int32(context),
        block_tables=tables,
        logit_rows=np.arange(min(rows, MOST_LOGITS), dtype=np.int32),
    )


class TableCache:
    """Cost tables on disk, one file per (model, hardware, threads, settings that change a step).

    Args:
        folder: made when needed.
        identity: everything that makes two machines or models differ; hashed into the file's name.
    """

    def __init__(self, folder: Path, identity: dict[str, str]) -> None:
        named = json.dumps(identity | {"version": str(VERSION), "processor": processor()}, sort_keys=True)
        self._path = folder / f"{hashlib.blake2b(named.encode(), digest_size=12).hexdigest()}.json"

    def load(self) -> CostTable | None:
        """The table kept last; None when there is none or it cannot be read."""
        try:
            table = msgspec.json.decode(self._path.read_bytes(), type=CostTable)
        except (OSError, msgspec.DecodeError):
            return None
        if len(table.verify_s) != len(ROW_KNOTS) or len(table.pass_s) != len(BATCH_KNOTS):
            return None
        return table

    def store(self, table: CostTable) -> None:
        """Keep a table; a disk that refuses costs only the next start a second."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=self._path.parent)
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(table))
            os.replace(name, self._path)
        except OSError:
            return


def processor() -> str:
    """The processor's name and number of cores."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith(("model name", "flags")):
            name += line.partition(":")[2]
    return f"{name} x{os.cpu_count()}"
