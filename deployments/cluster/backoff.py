"""The pauses between attempts to restart a process that keeps failing.

Owns the series of pauses: none before the first restart, then growing, until a process has run long enough to start the
series anew. Knows no clock.
"""

from __future__ import annotations

STEADY_S = 60.0
"""A process that ran this many seconds ends a series of failures."""


class Backoff:
    """Pauses of 0, first_s, 2 first_s, 4 first_s, ... seconds, at most longest_s.

    Args:
        first_s: pause before the second restart of a series, in seconds.
        longest_s: upper bound of a pause, in seconds.
    """

    def __init__(self, *, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self.num_failures = 0
        """Number of failures in the current series."""

    def lived(self, seconds: float) -> None:
        """Record how long the process ran before it failed. STEADY_S or more starts a new series."""
        if seconds >= STEADY_S:
            self.num_failures = 0

    def next_pause_s(self) -> float:
        """Count a failure and return the seconds to wait before the restart."""
        self.num_failures += 1
        if self.num_failures == 1:
            return 0.0
        return min(self._first_s * 2.0 ** (self.num_failures - 2), self._longest_s)
