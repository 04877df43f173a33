"""Order of admission: fair between clients by tokens, weighted by priority, by arrival within a client."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.request import Request
from engine.core.waiting_queue import WEIGHTS, WaitingQueue
from engine.messages import Priority, SamplingParams, Submit


def make(
    name: str, client: str = "", priority: Priority = "normal", tokens: int = 100, num_prompt: int = 10
) -> Request:
    submit = Submit(
        request_id=name,
        prompt=(1,) * num_prompt,
        sampling=SamplingParams(max_tokens=tokens),
        client=client,
        priority=priority,
    )
    return Request(submit=submit, key=0, stream_key=0, tokens=[1])


def drain(queue: WaitingQueue) -> list[str]:
    return [queue.pop().submit.request_id for _ in range(len(queue))]


def test_one_client_is_served_in_order() -> None:
    queue = WaitingQueue()
    names = [f"r{i}" for i in range(20)]
    for i, name in enumerate(names):
        queue.add(make(name, tokens=1 + i * 37 % 200))
    assert drain(queue) == names


def test_a_client_with_many_requests_does_not_hold_up_one_with_few() -> None:
    queue = WaitingQueue()
    for i in range(100):
        queue.add(make(f"greedy{i}", client="greedy"))
    for i in range(3):
        queue.add(make(f"modest{i}", client="modest"))
    order = drain(queue)
    assert [order.index(f"modest{i}") for i in range(3)] == pytest.approx([1, 3, 5], abs=1)


@settings(max_examples=50)
@given(weights=st.lists(st.sampled_from([20, 80, 200]), min_size=2, max_size=5))
def test_clients_get_equal_tokens_whatever_the_size_of_their_requests(weights: list[int]) -> None:
    queue = WaitingQueue()
    for client, size in enumerate(weights):
        for i in range(200):
            queue.add(make(f"{client}-{i}", client=str(client), tokens=size))
    served: Counter[int] = Counter()
    while min(served[c] for c in range(len(weights))) < 1000:
        client = int(queue.pop().submit.request_id.split("-")[0])
        served[client] += 10 + weights[client]
        assert max(served.values()) - min(served[c] for c in range(len(weights))) <= 2 * (10 + max(weights))


def test_priorities_get_their_shares_and_nobody_starves() -> None:
    queue = WaitingQueue()
    priorities: tuple[Priority, ...] = ("high", "normal", "low")
    for i in range(500):
        for priority in priorities:
            queue.add(make(f"{priority}-{i}", priority=priority))
    served = Counter(queue.pop().submit.priority for _ in range(420))
    total = sum(WEIGHTS.values())
    for priority in priorities:
        assert served[priority] == pytest.approx(420 * WEIGHTS[priority] / total, abs=3)


def test_a_client_who_comes_late_is_not_owed_the_past() -> None:
    queue = WaitingQueue()
    for i in range(100):
        queue.add(make(f"early{i}", client="early"))
    for _ in range(50):
        queue.pop()
    for i in range(10):
        queue.add(make(f"late{i}", client="late"))
    order = [name[:4] for name in drain(queue)[:10]]
    assert abs(order.count("earl") - order.count("late")) <= 2


def test_preempted_requests_go_first_and_anything_can_be_taken_out() -> None:
    queue = WaitingQueue()
    waiting = [make(f"w{i}", client=str(i % 2)) for i in range(4)]
    for request in waiting:
        queue.add(request)
    again = [make("p0"), make("p1")]
    for request in again:
        queue.put_back(request)
    assert queue.peek() is again[1]
    queue.discard(again[1])
    queue.discard(waiting[0])
    queue.discard(make("stranger"))
    assert len(queue) == 4
    assert set(queue) == {again[0], *waiting[1:]}
    assert drain(queue)[0] == "p0"
    assert queue.peek() is None
    with pytest.raises(IndexError):
        queue.pop()


def test_a_client_who_takes_its_only_request_back_is_not_charged_for_it() -> None:
    queue = WaitingQueue()
    aborted = make("aborted", client="a")
    queue.add(aborted)
    queue.discard(aborted)
    assert (len(queue), queue.peek()) == (0, None)
    for client in ("a", "b"):
        queue.add(make(client, client=client))
    assert drain(queue) == ["a", "b"], "equal charges are served in the order of arrival"


@pytest.mark.parametrize(("first", "second"), [("long", "prompt"), ("prompt", "long")])
def test_a_long_response_is_charged_as_one_of_256_tokens(first: str, second: str) -> None:
    """10 + 256 and 265 + 1 tokens: equal charges are served in the order of arrival."""
    queue = WaitingQueue()
    sizes = {"long": (10, 10_000), "prompt": (265, 1)}
    for name in (first, second):
        num_prompt, tokens = sizes[name]
        queue.add(make(name, client=name, tokens=tokens, num_prompt=num_prompt))
    assert drain(queue) == [first, second]


def test_a_priority_s_share_is_four_times_that_of_the_next() -> None:
    queue = WaitingQueue()
    for i in range(40):
        for priority in WEIGHTS:
            queue.add(make(f"{priority}-{i}", priority=priority))
    assert Counter(name.split("-")[0] for name in drain(queue)[:42]) == {"high": 32, "normal": 8, "low": 2}
