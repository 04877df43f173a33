"""Whether to draft at all: a switch with hysteresis, probes while it is off, and baseline samples while it is on.

Owns the hysteresis (two thresholds), the dwell (a gain must last before it counts) and two schedules of doubling
pauses. Knows only a gain, a time and the price of a probe. The time is whatever the caller counts, so an hour can be
simulated in a second.

    gain = predicted goodput with drafts / without
    start                                            probe, then on if gain > off_gain
    on   --gain <= off_gain for dwell_s-->           off
    off  --gain >= on_gain  for dwell_s-->           on
    off  --after a pause, doubling-->                probe: draft for some steps, to renew the acceptance estimates
    off  --after a longer pause, if no draft pays--> wide probe: the same with all requests, to renew the costs
    on   --after a pause, doubling-->                baseline sample: some steps without drafts, to renew their cost
    off  --the same, while lookup drafts are used--> baseline sample
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mode = Literal["on", "off", "probe", "wide_probe", "baseline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchParams:
    """Parameters of the switch. The defaults are chosen with `autoscale.simulation.simulator`."""

    on_gain: float = 1.03
    """Gain from which drafting is switched on."""
    off_gain: float = 1.0
    """Gain up to which drafting is switched off."""
    dwell_s: float = 0.25
    """Seconds for which the gain must be past a threshold before the switch follows."""
    first_probe_s: float = 1.0
    """Seconds from switching off to the first probe."""
    longest_probe_s: float = 30.0
    """Longest pause between two probes, in seconds."""
    probe_share: float = 0.01
    """Largest share of the time since drafting stopped, or since the last probe, that the next probe may cost. It does
    not bound the first probe after the start."""
    probe_steps: int = 6
    """Drafting steps of one probe."""
    longest_probe_steps: int = 24
    """Steps after which a probe ends even if its requests could not draft."""
    doubtful_probe_s: float = 30.0
    """Seconds added before a probe while the cost model says that no draft could pay. The costs may be wrong."""
    first_baseline_s: float = 1.0
    """Seconds from the start, and from each change, to the first baseline sample."""
    longest_baseline_s: float = 30.0
    """Longest pause between two baseline samples, in seconds, while the gain is at least `clear_gain`."""
    clear_gain: float = 1.25
    """Gain from which drafting clearly pays."""
    doubtful_baseline_s: float = 4.0
    """Longest pause between two baseline samples, in seconds, while the gain is below `clear_gain`."""
    baseline_steps: int = 3
    """Steps without drafts of one baseline sample."""


class HysteresisSwitch:
    """The switch of one engine. It starts with a probe, because nothing is known of the draft's acceptance."""

    def __init__(self, params: SwitchParams) -> None:
        self._params = params
        self._is_on = False
        self._is_new = True  # until the first probe has ended
        self._is_undecided = False  # the first probe has ended, and what it found has not been used
        self._past_threshold_since_s: float | None = None
        self._probe_pause_s = params.first_probe_s
        self._stopped_s = self._next_probe_s = 0.0
        self._num_probe_steps = self._num_steps_left = 0  # still to come: with drafts, and at most
        self._probe: Mode = "probe"  # the kind of the probe that runs
        self._baseline_pause_s = params.first_baseline_s
        self._next_baseline_s = params.first_baseline_s
        self._num_baseline_steps = 0  # still to come
        self.num_switches = 0
        """Changes between on and off so far."""
        self.num_probes = 0
        """Probes begun so far."""

    @property
    def is_on(self) -> bool:
        """Whether drafting is on."""
        return self._is_on

    def decide(
        self,
        gain: float,
        now_s: float,
        *,
        worth_probing: bool = True,
        probe_cost_s: float = 0.0,
        has_lookup_drafts: bool = False,
    ) -> Mode:
        """Return the mode of the next step.

        Args:
            gain: predicted goodput with the best drafts over that without any.
            now_s: current time in seconds; must not decrease.
            worth_probing: whether drafting could pay at all if the draft were good.
            probe_cost_s: predicted seconds that a probe begun now would add.
            has_lookup_drafts: whether prompt lookup drafts are verified while the draft model is off.
        """
        if self._num_probe_steps > 0:
            self._num_steps_left -= 1
            if self._num_steps_left > 0:
                return self._probe
            self._end_probe(now_s)
        params = self._params
        is_past_threshold = gain <= params.off_gain if self._is_on else gain >= params.on_gain
        if not is_past_threshold:
            self._past_threshold_since_s = None
        elif self._past_threshold_since_s is None:
            self._past_threshold_since_s = now_s
        since_s = self._past_threshold_since_s
        if self._is_undecided:
            self._is_undecided = False
            if gain > params.off_gain:
                self._change(now_s)
        elif not self._is_new and since_s is not None and now_s - since_s >= params.dwell_s:
            self._change(now_s)
        if self._is_on:
            return "baseline" if self._samples_baseline(now_s, gain) else "on"
        if self._probe_is_due(now_s, probe_cost_s, worth_probing=worth_probing):
            self.num_probes += 1
            self._num_probe_steps, self._num_steps_left = params.probe_steps, params.longest_probe_steps
            self._probe = "probe" if worth_probing else "wide_probe"
            return self._probe
        return "baseline" if has_lookup_drafts and self._samples_baseline(now_s, gain) else "off"

    def drafted(self, now_s: float) -> None:
        """Count a step that drafted; it ends a probe after enough of them."""
        if self._num_probe_steps == 0:
            return
        self._num_probe_steps -= 1
        if self._num_probe_steps == 0:
            self._end_probe(now_s)

    def _end_probe(self, now_s: float) -> None:
        self._num_probe_steps = 0
        if self._is_new:
            self._is_new, self._is_undecided = False, True
        else:
            self._probe_pause_s = min(2 * self._probe_pause_s, self._params.longest_probe_s)
        self._stopped_s, self._next_probe_s = now_s, now_s + self._probe_pause_s

    def _probe_is_due(self, now_s: float, cost_s: float, *, worth_probing: bool) -> bool:
        params = self._params
        if self._is_new:
            return worth_probing or now_s >= params.doubtful_probe_s
        pause_s = 0.0 if worth_probing else params.doubtful_probe_s
        is_cheap = cost_s <= params.probe_share * (now_s - self._stopped_s)
        return now_s >= self._next_probe_s + pause_s and is_cheap

    def _samples_baseline(self, now_s: float, gain: float) -> bool:
        params = self._params
        if now_s >= self._next_baseline_s:
            longest_s = params.longest_baseline_s if gain >= params.clear_gain else params.doubtful_baseline_s
            self._baseline_pause_s = min(2 * self._baseline_pause_s, longest_s)
            self._next_baseline_s = now_s + self._baseline_pause_s
            self._num_baseline_steps = params.baseline_steps
        if self._num_baseline_steps == 0:
            return False
        self._num_baseline_steps -= 1
        return True

    def _change(self, now_s: float) -> None:
        self._is_on = not self._is_on
        self._past_threshold_since_s = None
        self._num_probe_steps = 0
        self.num_switches += 1
        if not self._is_on:
            self._stopped_s, self._next_probe_s = now_s, now_s + self._probe_pause_s
        else:
            self._probe_pause_s = self._params.first_probe_s
        self._baseline_pause_s = self._params.first_baseline_s
        self._next_baseline_s = now_s + self._baseline_pause_s
        self._num_baseline_steps = 0
