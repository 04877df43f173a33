"""The last minutes of every engine of an app, second by second: what the live page draws.

Owns how much is kept and how reports become seconds. Sums only, so that engines and seconds can be added; ratios are
formed where they are shown. Its clock is the caller's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from autoscale.control.report import Observation, combine
from engine.core.pacing import SpeculationPlan

KEPT_S = 600
"""Seconds of history."""


@dataclass(frozen=True, slots=True)
class Second:
    """What all engines did within one second."""

    time_s: int
    """Unix time at which it began."""
    observation: Observation


@dataclass(frozen=True, slots=True)
class PlanChange:
    """A plan came into force."""

    time_s: float
    """Unix time."""
    plan: SpeculationPlan


@dataclass(frozen=True, slots=True)
class HistoryView:
    """A part of the history, for one reader."""

    now_s: float
    """Unix time of the answer."""
    num_engines: int
    """Engines that have reported within what is kept."""
    plan: SpeculationPlan
    """In force now."""
    seconds: tuple[Second, ...]
    """Those in which a step ended, in order; the last one may still grow."""
    changes: tuple[PlanChange, ...]


class History:
    """A bounded record of reports and plans."""

    def __init__(self) -> None:
        self._seconds: deque[Second] = deque(maxlen=KEPT_S)
        self._changes: deque[PlanChange] = deque(maxlen=KEPT_S)
        self._last_report_s: dict[str, float] = {}

    def add(self, engine_id: str, observation: Observation, plan: SpeculationPlan, now_s: float) -> None:
        """Take one report, and the plan that it was answered with.

        Args:
            now_s: unix time, never earlier than before by more than a clock correction.
        """
        self._last_report_s[engine_id] = now_s
        plan = _command(plan)
        if not self._changes or self._changes[-1].plan != plan:
            self._changes.append(PlanChange(now_s, plan))
        if observation.num_steps == 0:
            return
        observation = replace(observation, by_kind={})  # the pool of priors keeps these
        second = int(now_s)
        if self._seconds and self._seconds[-1].time_s >= second:
            last = self._seconds.pop()
            self._seconds.append(Second(last.time_s, combine((last.observation, observation))))
        else:
            self._seconds.append(Second(second, observation))

    def view(self, since_s: float, plan: SpeculationPlan, now_s: float) -> HistoryView:
        """What happened at `since_s` or later, as far as it is kept."""
        begin_s = max(since_s, now_s - KEPT_S)
        self._last_report_s = {key: at for key, at in self._last_report_s.items() if at >= now_s - KEPT_S}
        return HistoryView(
            now_s=now_s,
            num_engines=len(self._last_report_s),
            plan=_command(plan),
            seconds=tuple(second for second in self._seconds if second.time_s >= int(begin_s)),
            # The first plan is where history begins, not a change.
            changes=tuple(change for change in list(self._changes)[1:] if change.time_s >= begin_s),
        )


def _command(plan: SpeculationPlan) -> SpeculationPlan:
    """What a plan orders; priors are too much for a page that asks every second."""
    return replace(plan, priors=())
