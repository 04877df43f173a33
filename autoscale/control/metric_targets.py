"""Which replicas Prometheus can scrape: those that announced themselves lately and whose node is alive.

Owns the list of announced targets. Every replica announces its own every few seconds, so a new controller knows all of
them soon, and a dead replica disappears by itself. Knows no HTTP and no Ray.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

ANNOUNCE_PERIOD_S = 5.0
"""Seconds between two announcements of a replica."""
KEPT_S = 3 * ANNOUNCE_PERIOD_S
"""Seconds for which an announcement counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricTarget:
    """The metrics endpoint of one replica."""

    address: str
    """host:port."""
    labels: dict[str, str]
    """Values of the common labels: app, replica, model."""
    node_id: str
    """Ray's id of the node that the replica runs on."""


class TargetRegistry:
    """The announced targets, by address.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._announced: dict[str, tuple[MetricTarget, float]] = {}

    def announce(self, target: MetricTarget) -> None:
        """Note that a target is alive now. A new one at the same address replaces the old one."""
        self._announced[target.address] = (target, self._clock())

    def living(self, dead_nodes: Collection[str]) -> tuple[MetricTarget, ...]:
        """The targets that were announced within KEPT_S and are on no dead node, in order of their addresses."""
        oldest = self._clock() - KEPT_S
        self._announced = {
            address: (target, at)
            for address, (target, at) in self._announced.items()
            if at >= oldest and target.node_id not in dead_nodes
        }
        return tuple(self._announced[address][0] for address in sorted(self._announced))
