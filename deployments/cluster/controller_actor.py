"""The controller as a Ray actor, in a module that imports no torch: its process imports what this module imports."""

from __future__ import annotations

import os

import ray

from autoscale.control.controller import Controller
from engine.core.pacing import SpeculationPlan


class ControllerActor(Controller):
    """The controller of one app."""

    def __init__(self, plan: SpeculationPlan) -> None:
        super().__init__(plan, dead_nodes)

    def pid(self) -> int:
        """Process id; also how the replica sees that the controller is alive."""
        return os.getpid()


def dead_nodes() -> frozenset[str]:
    """Ids of the nodes of this Ray cluster that are gone. A node of another cluster is not among them."""
    return frozenset(node["NodeID"] for node in ray.nodes() if not node["Alive"])
