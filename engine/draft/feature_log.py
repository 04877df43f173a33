"""The target's features of the latest rows, kept where the draft can read them, and which row is whose.

Owns the ring in the draft buffer: each forward's rows go behind those of the one before, one copy per step, drafted
rows included. What was rejected is simply never looked up. The ring is the whole memory of the past: what it no longer
holds has no features, and the draft does without those positions. A feature of a position is the outputs of a few
layers there, side by side. Knows nothing of what the draft does with them.

    ring      ... | step 7: a a a b b | step 8: a b b b b | (oldest rows are overwritten next)
    runs      a: (position 5, row 40, 2 rows) (position 7, row 45, 1 row)      rejected rows are in no run
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.core.step import Span


@dataclass(slots=True)
class _Run:
    """Consecutive positions of one request in consecutive rows."""

    position: int
    row: int
    """Counted from the beginning of time; its place in the ring is row % capacity."""
    length: int


class FeatureLog:
    """One engine's.

    Args:
        ring: [capacity, width], in the draft buffer; capacity is at least the rows of a step.
    """

    def __init__(self, ring: torch.Tensor) -> None:
        self._ring = ring
        self._capacity = len(ring)
        self._next = 0
        self._q_lens: npt.NDArray[np.int32] | None = None
        self._runs: dict[int, deque[_Run]] = {}

    def write(self, features: torch.Tensor, q_lens: npt.NDArray[np.int32]) -> None:
        """Keep the features of a forward. The draft must not be reading.

        Args:
            features: [N, width].
            q_lens: [S] rows per span, as in its plan.
        """
        begin = self._next % self._capacity
        first = min(len(features), self._capacity - begin)
        self._ring[begin : begin + first].copy_(features[:first])
        if first < len(features):
            self._ring[: len(features) - first].copy_(features[first:])
        self._next += len(features)
        self._q_lens = q_lens

    def settle(self, spans: Sequence[Span]) -> None:
        """Note whose the rows of the last forward are, once its verdict has been committed.

        Args:
            spans: of the batch it computed; finished requests may be among them.
        """
        if self._q_lens is None:
            return
        row = self._next - int(self._q_lens.sum())
        for span, q_len in zip(spans, self._q_lens.tolist(), strict=True):
            request = span.request
            if request.finish_reason is None:
                # The last committed token has not been computed yet; what was computed from there on was rejected.
                self._append(request.key, span.start, row, min(q_len, len(request.tokens) - 1 - span.start))
            row += q_len
        self._q_lens = None

    def rows(self, key: int, start: int, num_tokens: int) -> tuple[int, ...]:
        """Where in the ring the features before each of a request's tokens [start, start + num_tokens) are.

        Returns:
            Rows of the ring, -1 where there are none (any more).
        """
        found = [-1] * num_tokens
        missing = num_tokens
        oldest = self._next - self._capacity
        for run in reversed(self._runs.get(key, ())):  # later ones count: a position may have been computed twice
            if missing == 0:
                break
            # Token p takes the features of position p - 1.
            low = max(run.position + 1, start, run.position + 1 + oldest - run.row)
            for token in range(low, min(run.position + run.length, start + num_tokens - 1) + 1):
                if found[token - start] < 0:
                    found[token - start] = (run.row + token - 1 - run.position) % self._capacity
                    missing -= 1
        return tuple(found)

    def sent(self, key: int, num_tokens: int) -> None:
        """The draft has the features before the first `num_tokens` tokens of a request."""
        runs = self._runs.get(key)
        while runs and runs[0].position + runs[0].length < num_tokens:
            runs.popleft()

    def is_pressing(self, key: int) -> bool:
        """Whether a request's oldest features are half-way to being overwritten."""
        runs = self._runs.get(key)
        return runs is not None and len(runs) > 0 and runs[0].row < self._next - self._capacity // 2

    def forget(self, key: int) -> None:
        """The request is over."""
        self._runs.pop(key, None)

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
