"""The target's features of the latest rows, kept where the draft can read them, and the owner of each row.

Owns the ring of features in the draft buffer. Each step's rows go behind those of the step before, rejected rows
included, in one copy. An index of runs finds the row of a request's position; no run covers a rejected row. A feature
that the ring no longer holds is lost, and the draft goes without that position. The feature of a position is the output
of a few layers there, side by side. Knows nothing of what the draft does with features.

    ring      ... | step 7: a a a b b | step 8: a b b b b | (oldest rows are overwritten next)
    runs      a: (position 5, row 40, 2 rows) (position 7, row 45, 1 row)      no run covers a rejected row
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.core.step import Features, RowVerdict, Span


@dataclass(slots=True)
class _Run:
    """Consecutive positions of one request in consecutive rows."""

    position: int
    """First position of the run in its request."""
    row: int
    """Number of the first row, counted over all steps; its index in the ring is row % capacity."""
    length: int
    """Number of rows."""


class FeatureLog:
    """The features of one engine.

    Args:
        ring: [capacity, width] in the draft buffer; the capacity is at least the rows of a step.
    """

    def __init__(self, ring: torch.Tensor) -> None:
        self._ring = ring
        self._capacity = len(ring)
        self._next = 0
        self._runs: dict[int, deque[_Run]] = {}

    def add(self, features: Features, spans: Sequence[Span], verdicts: Sequence[RowVerdict]) -> None:
        """Keep the features of a step whose verdict has been committed. The draft must not be reading.

        Args:
            features: of the step.
            spans: of the step's batch; finished requests may be among them.
            verdicts: of the spans.
        """
        row = self._next
        self._copy(features.values)
        for span, q_len, verdict in zip(spans, features.q_lens.tolist(), verdicts, strict=True):
            request = span.request
            if request.finish_reason is None:
                # The last committed token has not been computed yet; rows from its position on were rejected.
                length = min(q_len, len(request.tokens) - 1 - span.start)
                if verdict.path:
                    length = span.num_tokens
                self._append(request.key, span.start, row, length)
                for depth, node in enumerate(verdict.path):
                    self._append(request.key, span.start + length + depth, row + length + node, 1)
            row += q_len

    def rows(self, key: int, start: int, num_tokens: int) -> tuple[int, ...]:
        """Rows of the ring with the features that precede tokens [start, start + num_tokens) of a request.

        Returns:
            One row index per token, -1 where the ring does not hold the feature.
        """
        found = [-1] * num_tokens
        num_missing = num_tokens
        oldest = self._next - self._capacity
        for run in reversed(self._runs.get(key, ())):  # later runs win: a position may have been computed twice
            if num_missing == 0:
                break
            # Token p takes the features of position p - 1.
            low = max(run.position + 1, start, run.position + 1 + oldest - run.row)
            for token in range(low, min(run.position + run.length, start + num_tokens - 1) + 1):
                if found[token - start] < 0:
                    found[token - start] = (run.row + token - 1 - run.position) % self._capacity
                    num_missing -= 1
        return tuple(found)

    def sent(self, key: int, num_tokens: int) -> None:
        """Drop the runs that the draft has read: those before the first `num_tokens` tokens of a request."""
        runs = self._runs.get(key)
        while runs and runs[0].position + runs[0].length < num_tokens:
            runs.popleft()

    def is_pressing(self, key: int) -> bool:
        """Whether the oldest features of a request are half-way to being overwritten."""
        runs = self._runs.get(key)
        return runs is not None and len(runs) > 0 and runs[0].row < self._next - self._capacity // 2

    def forget(self, key: int) -> None:
        """Drop the runs of a request that has ended."""
        self._runs.pop(key, None)

    def _copy(self, values: torch.Tensor) -> None:
        begin = self._next % self._capacity
        num_first = min(len(values), self._capacity - begin)
        self._ring[begin : begin + num_first].copy_(values[:num_first])
        if num_first < len(values):
            self._ring[: len(values) - num_first].copy_(values[num_first:])
        self._next += len(values)

    def _append(self, key: int, position: int, row: int, length: int) -> None:
        if length <= 0:
            return
        runs = self._runs.setdefault(key, deque())
        last = runs[-1] if runs else None
        if last is not None and last.position + last.length == position and last.row + last.length == row:
            last.length += length
        else:
            runs.append(_Run(position, row, length))
        while runs and runs[0].row + runs[0].length <= self._next - self._capacity:
            runs.popleft()
