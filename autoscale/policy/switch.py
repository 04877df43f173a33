"""On or off, without flapping and without ever being off for good.

Owns hysteresis (two thresholds), dwell (a verdict must last before it counts) and the probe schedule (rarer with every
probe that finds nothing). Knows only a gain and a time; the time is whatever the caller counts, so a simulation of an
hour takes a second.

    gain = predicted goodput with drafts / without
    on   --gain <= off_gain for dwell_s-->  off
    off  --gain >= on_gain  for dwell_s-->  on
    off  --every probe_s, doubling-->       probe for some steps, so that acceptance is not judged by old evidence
    on   --every baseline_s, doubling-->        look for some steps what a step without drafts costs now
    off  --the same, while drafts that cost nothing are verified-->  look
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mode = Literal["on", "off", "probe", "baseline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchParams:
    """Chosen with the simulator, see `autoscale.simulation.simulator`."""

    on_gain: float = 1.03
    off_gain: float = 1.0
    dwell_s: float = 0.25
    first_probe_s: float = 1.0
    longest_probe_s: float = 30.0
    probe_steps: int = 6
    """Drafting steps of one probe."""
    doubtful_probe_s: float = 30.0
    """Before probing where costs say that no draft could pay: they may be wrong, too."""
    first_look_s: float = 1.0
    longest_look_s: float = 30.0
    clear_gain: float = 1.25
    doubtful_look_s: float = 4.0
    """Longest pause between looks while the gain is below `clear_gain`."""
    baseline_steps: int = 3
    """Steps without drafts of one look."""


class HysteresisSwitch:
    """The switch of one engine."""

    def __init__(self, params: SwitchParams) -> None:
        self._params = params
        self._is_on = True
        self._since_s: float | None = None
        """When the gain began to speak for the other side."""
        self._probe_s = params.first_probe_s
        self._next_probe_s = 0.0
        self._probe_left = 0
        self._look_s = params.first_look_s
        self._next_look_s = params.first_look_s
        self._look_left = 0
        self.num_switches = 0
        self.num_probes = 0

    @property
    def is_on(self) -> bool:
        return self._is_on

    def decide(self, gain: float, now_s: float, *, worth_probing: bool = True, has_lookup_drafts: bool = False) -> Mode:
        """The mode of the next step.

        Args:
            gain: predicted goodput with the best drafts over that without any.
            now_s: current time, never going back.
            worth_probing: whether drafting could pay at all if the draft were good.
            has_free_drafts: whether drafts that cost nothing are verified while the draft is off.
        """
        params = self._params
        disagrees = gain <= params.off_gain if self._is_on else gain >= params.on_gain
        if not disagrees:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s
        if self._since_s is not None and now_s - self._since_s >= params.dwell_s:
            self._switch(now_s)
        if self._is_on:
            return "baseline" if self._samples_baseline(now_s, gain) else "on"
        if self._probe_left > 0:
            return "probe"
        if now_s >= self._next_probe_s + (0.0 if worth_probing else params.doubtful_probe_s):
            self.num_probes += 1
            self._probe_left = params.probe_steps
            return "probe"
        return "baseline" if has_lookup_drafts and self._samples_baseline(now_s, gain) else "off"

    def drafted(self, now_s: float) -> None:
        """A step drafted; counts down a probe."""
        if self._is_on or self._probe_left == 0:
            return
        self._probe_left -= 1
        if self._probe_left == 0:
            self._probe_s = min(2 * self._probe_s, self._params.longest_probe_s)
            self._next_probe_s = now_s + self._probe_s

    def _samples_baseline(self, now_s: float, gain: float) -> bool:
        params = self._params
        if now_s >= self._next_look_s:
            longest_s = params.longest_look_s if gain >= params.clear_gain else params.doubtful_look_s
            self._look_s = min(2 * self._look_s, longest_s)
            self._next_look_s = now_s + self._look_s
            self._look_left = params.baseline_steps
        if self._look_left == 0:
            return False
        self._look_left -= 1
        return True

    def _switch(self, now_s: float) -> None:
        self._is_on = not self._is_on
        self._since_s = None
        self._probe_left = 0
        self.num_switches += 1
        if not self._is_on:
            self._next_probe_s = now_s + self._probe_s
        else:
            self._probe_s = self._params.first_probe_s
        self._look_s = self._params.first_look_s
        self._next_look_s = now_s + self._look_s
        self._look_left = 0
