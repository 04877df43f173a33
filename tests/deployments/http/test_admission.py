"""Admission: the bound, fair shares of a full queue, and counts that return to zero."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.errors import RateLimited
from deployments.http.admission import MEMORY_S, Admission, Client, Ticket
from engine.errors import EngineUnavailable, QueueFull


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


A, B, C = (Client(name=name) for name in "abc")


def fill(admission: Admission, client: Client, count: int) -> list[Ticket]:
    return [admission.enter(client, 1) for _ in range(count)]


def test_one_client_may_have_everything_while_nobody_else_wants_it() -> None:
    admission = Admission(10)
    fill(admission, A, 10)
    with pytest.raises(QueueFull, match="capacity of 10"):
        admission.enter(A, 1)


def test_a_newcomer_gets_its_share_as_places_become_free() -> None:
    clock = Clock()
    admission = Admission(10, clock=clock)
    tickets = fill(admission, A, 10)
    with pytest.raises(QueueFull):
        admission.enter(B, 1)
    for _ in range(5):
        tickets.pop().release()
        with pytest.raises(QueueFull, match="its share is 5"):
            admission.enter(A, 1)
        admission.enter(B, 1)
    assert admission.num_in_flight == 10
    clock.now += MEMORY_S + 1


def test_shares_do_not_bind_while_there_is_plenty() -> None:
    admission = Admission(100)
    fill(admission, B, 1)
    fill(admission, C, 1)
    fill(admission, A, 48)  # more than a third, but half is still free


def test_retry_after_follows_how_fast_places_become_free() -> None:
    def retry_after_s(interval_s: float) -> float:
        clock = Clock()
        admission = Admission(100, clock=clock)
        tickets = fill(admission, A, 100)
        for ticket in tickets[:90]:
            clock.now += interval_s
            ticket.release()
        fill(admission, A, 90)
        with pytest.raises(QueueFull) as refused:
            admission.enter(A, 1)
        return refused.value.retry_after_s

    fast, slow, stuck = retry_after_s(0.01), retry_after_s(0.4), retry_after_s(50.0)
    assert fast == 1.0
    assert slow == pytest.approx(10.0, rel=0.2)
    assert stuck == 60.0


def test_draining_refuses_and_keeps_what_runs() -> None:
    causes: list[str] = []
    admission = Admission(10, on_refused=causes.append)
    (ticket,) = fill(admission, A, 1)
    admission.accepts = False
    with pytest.raises(EngineUnavailable, match="draining"):
        admission.enter(A, 1)
    assert admission.num_in_flight == 1
    ticket.release()
    ticket.release()
    assert admission.num_in_flight == 0
    assert causes == ["unavailable"]


def test_refusals_are_counted_by_cause() -> None:
    causes: list[str] = []
    admission = Admission(1, clock=Clock(), on_refused=causes.append)
    limited = Client(name="l", requests_per_minute=1)
    admission.enter(limited, 1).release()
    with pytest.raises(RateLimited):
        admission.enter(limited, 1)
    fill(admission, A, 1)
    with pytest.raises(QueueFull):
        admission.enter(A, 1)
    assert causes == ["rate_limit", "queue_full"]


@settings(max_examples=200, deadline=None)
@given(
    capacity=st.integers(1, 12),
    moves=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 4), st.booleans()), max_size=80),
)
def test_counts_balance_and_the_bound_holds(capacity: int, moves: list[tuple[str, int, bool]]) -> None:
    clock = Clock()
    admission = Admission(capacity, clock=clock)
    held: dict[str, list[tuple[Ticket, int]]] = {name: [] for name in "abc"}
    for name, size, leaves in moves:
        clock.now += 0.5
        if leaves and held[name]:
            held[name].pop()[0].release()
        elif not leaves:
            with contextlib.suppress(QueueFull):
                held[name].append((admission.enter(Client(name=name, max_concurrent=6), size), size))
        sizes = {name: sum(size for _, size in tickets) for name, tickets in held.items()}
        assert admission.num_in_flight == sum(sizes.values()) <= capacity
        assert max(sizes.values()) <= 6
    for tickets in held.values():
        for ticket, _ in tickets:
            ticket.release()
    assert admission.num_in_flight == 0
