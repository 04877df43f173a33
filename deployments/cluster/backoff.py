"""How long to wait before the next attempt to replace what keeps failing.

Owns the series of pauses: none before the first attempt, then growing, until something has lived long enough to count
as well. Knows no clock.
"""

from __future__ import annotations

STEADY_S = 60.0
"""What lived this long was not part of a series of failures."""


class Backoff:
    """Pauses of 0, first, 2 first, 4 first ... longest seconds.

    Args:
        first_s: the second pause.
        longest_s: the longest one.
    """

    def __init__(self, *, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self.num_failures = 0
        """Attempts since the last steady life."""

    def lived(self, seconds: float) -> None:
        """The last one lived for so long before it failed."""
        if seconds >= STEADY_S:
            self.num_failures = 0

    def next_pause_s(self) -> float:
        """Seconds to wait before the attempt that follows."""
        self.num_failures += 1
        if self.num_failures == 1:
            return 0.0
        return min(self._first_s * 2.0 ** (self.num_failures - 2), self._longest_s)
