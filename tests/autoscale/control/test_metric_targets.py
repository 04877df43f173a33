"""The list of living replicas: announced lately, and on no lost node."""

from __future__ import annotations

from autoscale.control.controller import Controller
from autoscale.control.metric_targets import ANNOUNCE_PERIOD_S, KEPT_S, MetricTarget, TargetRegistry
from engine.core.pacing import SpeculationPlan


def target(number: int, node: str = "n1") -> MetricTarget:
    return MetricTarget(address=f"192.0.2.{number}:9400", labels={"replica": f"r{number}"}, node_id=node)


class Time:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_replica_is_listed_while_it_announces_itself() -> None:
    time = Time()
    registry = TargetRegistry(time)
    registry.announce(target(2))
    registry.announce(target(1))
    assert registry.living(()) == (target(1), target(2))
    time.now_s += KEPT_S
    registry.announce(target(2))
    assert registry.living(()) == (target(1), target(2))
    time.now_s += 0.1
    assert registry.living(()) == (target(2),)


def test_two_announcements_may_be_lost() -> None:
    assert KEPT_S >= 3 * ANNOUNCE_PERIOD_S


def test_replicas_of_a_lost_node_go_at_once_and_stay_away() -> None:
    registry = TargetRegistry()
    for number, node in ((1, "n1"), (2, "n2"), (3, "n2")):
        registry.announce(target(number, node))
    assert registry.living(frozenset({"n2"})) == (target(1, "n1"),)
    assert registry.living(frozenset()) == (target(1, "n1"),)


def test_a_new_replica_takes_over_the_address_of_an_old_one() -> None:
    registry = TargetRegistry()
    registry.announce(target(1))
    new = MetricTarget(address=target(1).address, labels={"replica": "new"}, node_id="n1")
    registry.announce(new)
    assert registry.living(()) == (new,)


def test_the_controller_lists_living_targets_and_tells_replicas_the_lost_nodes() -> None:
    lost: set[str] = set()
    controller = Controller(SpeculationPlan(), lambda: frozenset(lost))
    assert controller.announce(target(1, "n1")) == frozenset()
    controller.announce(target(2, "n2"))
    assert controller.targets() == (target(1, "n1"), target(2, "n2"))
    lost.add("n2")
    assert controller.announce(target(1, "n1")) == {"n2"}
    assert controller.targets() == (target(1, "n1"),)
