"""When the trainer may run: its duty cycle in CPU time, and its pause while the target computes.

Owns the decision only: it reads no clock and stops no process.
"""

from __future__ import annotations

QUIET_S = 0.1
"""Seconds without a step of the target after which the trainer may run."""
BURST_S = 1.0
"""Seconds of the trainer's share that it may save up."""


class Governor:
    """Decides in each tick. The trainer's time over any period is at most share * (period + BURST_S), and what it uses
    between two ticks.

    Args:
        cpu_share: share of one CPU.
        quiet_s: seconds without a step that count as idle.
    """

    def __init__(self, cpu_share: float, *, quiet_s: float = QUIET_S) -> None:
        self._share = cpu_share
        self._quiet_s = quiet_s
        self._credit_s = cpu_share * BURST_S
        self._last: tuple[float, float] | None = None

    def may_run(self, now_s: float, *, idle_s: float, used_s: float) -> bool:
        """Whether the trainer may run until the next tick.

        Args:
            now_s: time of the tick.
            idle_s: seconds since the target's latest step; 0 during a step.
            used_s: CPU time of the trainer so far, in seconds.
        """
        if self._last is not None:
            before_s, used_before_s = self._last
            earned_s = self._share * (now_s - before_s)
            self._credit_s = min(self._share * BURST_S, self._credit_s + earned_s) - (used_s - used_before_s)
        self._last = (now_s, used_s)
        return idle_s >= self._quiet_s and self._credit_s > 0
