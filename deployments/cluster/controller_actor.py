"""The controller as a Ray actor, in a module that imports no torch: its process imports what this module imports."""

from __future__ import annotations

import os

from autoscale.control.controller import Controller


class ControllerActor(Controller):
    """The controller of one app."""

    def pid(self) -> int:
        """Process id; also how the replica sees that the controller is alive."""
        return os.getpid()
