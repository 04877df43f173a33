"""Acceptance of the first drafted token on live requests, by the weights that serve, and the test for a regression.

Owns the counts per request and the comparison. The first token is drafted at every K and confidence, so its acceptance
depends neither on the pace nor on early exit. Knows no weights.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.draft.messages import DraftRequestRow, DraftResponseRow

MIN_REQUESTS = 12
"""Requests that a comparison needs on either side."""
MAX_REQUESTS = 128
"""Latest requests that it looks at on either side."""
SIGMAS = 4.0
"""Standard errors by which acceptance must be lower to count as a regression: without one, a comparison of independent
requests says so once in 30,000 times."""


@dataclass(slots=True)
class Counts:
    """Drafts of one request, and how many of their first tokens were accepted."""

    num_drafts: int = 0
    num_accepted: int = 0


def acceptance(counts: Iterable[Counts]) -> tuple[float, float]:
    """Acceptance rate over requests, and its standard error, a ratio of means over requests (Cochran 1977)."""
    kept = list(counts)
    drafts = sum(each.num_drafts for each in kept)
    if drafts == 0:
        return 0.0, math.inf
    rate = sum(each.num_accepted for each in kept) / drafts
    spread = sum((each.num_accepted - rate * each.num_drafts) ** 2 for each in kept)
    return rate, math.sqrt(spread * len(kept) / max(len(kept) - 1, 1)) / drafts


class LiveAcceptance:
    """Counts drafts as their requests go on. All methods run in one thread."""

    def __init__(self) -> None:
        self._drafted: dict[int, tuple[int, int]] = {}  # key -> committed tokens then, first drafted token
        self._running: dict[int, Counts] = {}
        self._now: deque[Counts] = deque(maxlen=MAX_REQUESTS)
        self._before: deque[Counts] = deque(maxlen=MAX_REQUESTS)

    @property
    def rate(self) -> float:
        """Acceptance with the weights that serve now; 0 before any draft."""
        return acceptance(self._now)[0]

    def observe(self, rows: Sequence[DraftRequestRow], released: Sequence[int]) -> None:
        """Compare the committed tokens of a draft request with what was drafted before."""
        for row in rows:
            drafted = self._drafted.pop(row.key, None)
            if drafted is not None and row.new_tokens and drafted[0] == row.start:
                counts = self._running.setdefault(row.key, Counts())
                counts.num_drafts += 1
                counts.num_accepted += row.new_tokens[0] == drafted[1]
        for key in released:
            self._drafted.pop(key, None)
            finished = self._running.pop(key, None)
            if finished is not None:
                self._now.append(finished)

    def drafted(self, rows: Sequence[DraftRequestRow], response: Sequence[DraftResponseRow]) -> None:
        """Note what was drafted."""
        for row, made in zip(rows, response, strict=True):
            if made.token_ids:
                self._drafted[row.key] = (row.start + len(row.new_tokens), made.token_ids[0])

    def swapped(self) -> None:
        """Other weights serve from now on. Requests that still run count for neither."""
        self._before, self._now = self._now, deque(maxlen=MAX_REQUESTS)
        self._running.clear()
        self._drafted.clear()

    def rolled_back(self) -> None:
        """The weights before serve again, with their counts."""
        self._now, self._before = self._before, deque(maxlen=MAX_REQUESTS)
        self._running.clear()
        self._drafted.clear()

    @property
    def has_regressed(self) -> bool:
        """Whether acceptance is lower than before the latest swap, by more than chance."""
        if min(len(self._now), len(self._before)) < MIN_REQUESTS:
            return False
        (now, error), (before, error_before) = acceptance(self._now), acceptance(self._before)
        return before - now > SIGMAS * math.hypot(error, error_before)
