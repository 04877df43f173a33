"""Sessions stay with their replica, load is the limit, and nothing depends on the node of the entry."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from deployments.fleet.request_router import CHOICE_S, MAX_LOAD_RATIO, SLACK_REQUESTS, LoadRouter, preferred_replica

NAMES = [f"replica-{index}" for index in range(4)]


def test_a_session_always_meets_the_same_replica() -> None:
    idle = dict.fromkeys(NAMES, 0)
    for session in map(str, range(50)):
        assert len({preferred_replica(session, idle) for _ in range(3)}) == 1


def test_sessions_spread_over_the_replicas() -> None:
    """2,000 sessions over four replicas: none is above 1.2 times the mean; a false alarm has odds below 1e-6."""
    counts = Counter(preferred_replica(str(session), dict.fromkeys(NAMES, 0)) for session in range(2000))
    assert set(counts) == set(NAMES)
    assert max(counts.values()) < 1.2 * 500


def test_only_the_sessions_of_a_lost_replica_move() -> None:
    everyone, rest = dict.fromkeys(NAMES, 0), dict.fromkeys(NAMES[:-1], 0)
    for session in map(str, range(300)):
        before = preferred_replica(session, everyone)
        if before != NAMES[-1]:
            assert preferred_replica(session, rest) == before


@given(st.lists(st.integers(0, 100), min_size=1, max_size=4), st.text(min_size=1))
def test_an_overloaded_replica_keeps_no_session(loads: list[int], session: str) -> None:
    given_loads = dict(zip(NAMES, loads, strict=False))
    chosen = preferred_replica(session, given_loads)
    owner = preferred_replica(session, dict.fromkeys(given_loads, 0))
    limit = MAX_LOAD_RATIO * sum(loads) / len(loads) + SLACK_REQUESTS
    assert owner is not None
    assert chosen == (owner if given_loads[owner] <= limit else None)


def test_a_request_without_a_session_has_no_preference() -> None:
    assert preferred_replica("", {"a": 0, "b": 5}) is None
    assert preferred_replica("s", {}) is None


@dataclass(frozen=True)
class Id:
    unique_id: str


@dataclass(frozen=True)
class Running:
    replica_id: Id
    node_id: str = "elsewhere"


@dataclass
class Metadata:
    session_id: str = ""


@dataclass
class Pending:
    metadata: Metadata


class Router(LoadRouter):
    """The router without Serve's tasks and caches."""

    def __init__(self) -> None:
        self._use_replica_queue_len_cache = False
        self._pending_requests_to_fulfill = ()
        self.now_s = 100.0
        self.initialize_state()

    def _now_s(self) -> float:
        return self.now_s


def choose(router: Router, replicas: list[Running], session: str = "") -> list[str]:
    ranks = asyncio.run(router.choose_replicas(replicas, Pending(Metadata(session))))  # type: ignore[arg-type]
    assert all(len(rank) == 1 for rank in ranks)
    return [rank[0].replica_id.unique_id for rank in ranks]


def replicas_on_two_nodes() -> list[Running]:
    return [Running(Id(name), node_id=f"node-{index % 2}") for index, name in enumerate(NAMES)]


def test_the_least_loaded_replica_comes_first_whatever_its_node() -> None:
    router, replicas = Router(), replicas_on_two_nodes()
    for _ in range(40):
        first = choose(router, replicas)[0]
        router.on_send_request(Id(first))  # type: ignore[arg-type]
    assert set(router._in_flight.values()) == {10}
    for _ in range(3):
        router.on_request_completed(Id(NAMES[2]), "")  # type: ignore[arg-type]
    assert choose(router, replicas)[0] == NAMES[2]


def test_a_session_s_replica_comes_first_and_the_others_follow_by_load() -> None:
    router, replicas = Router(), replicas_on_two_nodes()
    owner = preferred_replica("chat-7", dict.fromkeys(NAMES, 0))
    assert owner is not None
    router.on_send_request(Id(owner))  # type: ignore[arg-type]
    ranked = choose(router, replicas, "chat-7")
    assert ranked[0] == owner
    assert sorted(ranked) == NAMES
    assert choose(router, replicas)[-1] == owner


def test_requests_that_arrive_together_spread_before_one_of_them_is_sent() -> None:
    router, replicas = Router(), replicas_on_two_nodes()
    chosen = [choose(router, replicas)[0] for _ in range(12)]
    assert Counter(chosen) == dict.fromkeys(NAMES, 3)
    for name in chosen:
        router.on_send_request(Id(name))  # type: ignore[arg-type]
    assert {router._load(name) for name in NAMES} == {3}, "a request that was sent counts once"


def test_a_choice_that_serve_did_not_follow_is_forgotten() -> None:
    router, replicas = Router(), replicas_on_two_nodes()
    first, second = choose(router, replicas)[:2]
    router.on_send_request(Id(second))  # type: ignore[arg-type]
    assert router._load(first) == 1
    router.now_s += CHOICE_S + 0.1
    assert router._load(first) == 0
    assert router._load(second) == 1


def test_nothing_to_choose_from_is_no_rank() -> None:
    assert asyncio.run(Router().choose_replicas([], None)) == []
