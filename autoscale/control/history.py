"""The last minutes of all engines of an app, second by second, for the live page.

Owns how much is kept and how reports are added up by second. Keeps sums only, so that engines and seconds can be added;
the page forms the ratios. Its clock is the caller's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from autoscale.control.report import Observation, combine
from engine.core.pacing import SpeculationPlan

KEPT_S = 600
"""Seconds of history that are kept."""


@dataclass(frozen=True, slots=True)
class Second:
    """The sums over all engines of the reports that arrived within one second."""

    time_s: int
    """Unix time at which the second began."""
    observation: Observation
    """Sums over the steps that were reported."""


@dataclass(frozen=True, slots=True)
class PlanChange:
    """The moment at which a plan came into force."""

    time_s: float
    """Unix time of the change."""
    plan: SpeculationPlan
    """The new plan, without priors."""


@dataclass(frozen=True, slots=True)
class HistoryView:
    """A part of the history for one reader."""

    now_s: float
    """Unix time of the response."""
    num_engines: int
    """Number of engines that have reported within KEPT_S."""
    plan: SpeculationPlan
    """The plan in force now, without priors."""
    seconds: tuple[Second, ...]
    """Seconds in which steps were reported, in order; the last one may still grow."""
    changes: tuple[PlanChange, ...]
    """Changes of the plan, in order."""


class History:
    """A bounded record of reports and plans."""

    def __init__(self) -> None:
        self._seconds: deque[Second] = deque(maxlen=KEPT_S)
        self._changes: deque[PlanChange] = deque(maxlen=KEPT_S)
        self._last_report_s: dict[str, float] = {}

    def add(self, engine_id: str, observation: Observation, plan: SpeculationPlan, now_s: float) -> None:
        """Add one report.

        Args:
            engine_id: of the engine that reports.
            observation: sums since its last report.
            plan: the plan that the engine gets in return.
            now_s: Unix time. It may go back by a clock correction; the report then counts for the last second.
        """
        self._last_report_s[engine_id] = now_s
        plan = _without_priors(plan)
        if not self._changes or self._changes[-1].plan != plan:
            self._changes.append(PlanChange(now_s, plan))
        if observation.num_steps == 0:
            return
        observation = replace(observation, by_draft_class={})  # the pool of priors keeps these
        second = int(now_s)
        if self._seconds and self._seconds[-1].time_s >= second:
            last = self._seconds.pop()
            self._seconds.append(Second(last.time_s, combine((last.observation, observation))))
        else:
            self._seconds.append(Second(second, observation))

    def view(self, since_s: float, plan: SpeculationPlan, now_s: float) -> HistoryView:
        """What happened at `since_s` or later, as far as it is kept.

        Args:
            since_s: Unix time.
            plan: the plan in force.
            now_s: Unix time of the call.
        """
        begin_s = max(since_s, now_s - KEPT_S)
        self._last_report_s = {key: at for key, at in self._last_report_s.items() if at >= now_s - KEPT_S}
        return HistoryView(
            now_s=now_s,
            num_engines=len(self._last_report_s),
            plan=_without_priors(plan),
            seconds=tuple(second for second in self._seconds if second.time_s >= int(begin_s)),
            # The first plan is the start of the history, not a change.
            changes=tuple(change for change in list(self._changes)[1:] if change.time_s >= begin_s),
        )


def _without_priors(plan: SpeculationPlan) -> SpeculationPlan:
    """The plan without its priors, which are too large for a page that polls every second."""
    return replace(plan, priors=())
