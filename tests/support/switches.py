"""A switch after its first probe, because most of its life comes then."""

from __future__ import annotations

from autoscale.policy.goodput import Goodput
from autoscale.policy.switch import HysteresisSwitch


def settled(switch: HysteresisSwitch, *, gain: float = 2.0) -> HysteresisSwitch:
    """The switch at time 0, its first probe over, which found this gain: on, or off where it is not above 1."""
    while switch.decide(gain, 0.0) == "probe":
        switch.drafted(0.0)
    return switch


def drafting(pacer: Goodput) -> Goodput:
    """The policy with drafting switched on and nothing observed."""
    settled(pacer.switch)
    return pacer
