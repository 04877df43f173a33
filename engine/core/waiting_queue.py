"""The waiting requests, in an order that is fair between clients.

Owns the order only. It is self-clocked fair queueing (Golestani 1994). A flow is one client at one priority. Each flow
gets a share of the admitted tokens by its priority's weight, no matter how many requests it queues, and every flow
makes progress. Within a flow, requests are served in order of arrival. Preempted requests precede all others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from engine.core.request import Request
from engine.messages import Priority

WEIGHTS: dict[Priority, float] = {"high": 16.0, "normal": 4.0, "low": 1.0}
"""Weight of each priority: the flows' shares of admitted tokens are proportional to it."""
TYPICAL_TOKENS = 256
"""Upper bound of the response length that a request is charged for. Most requests leave max_tokens at the model length
and use little of it."""

Flow = tuple[str, Priority]


class WaitingQueue:
    """The requests that wait for admission."""

    def __init__(self) -> None:
        self._preempted: deque[Request] = deque()
        self._flows: dict[Flow, deque[tuple[float, Request]]] = {}
        self._last_tag: dict[Flow, float] = {}
        self._virtual_time = 0.0  # tag of the request admitted last

    def __len__(self) -> int:
        return len(self._preempted) + sum(len(flow) for flow in self._flows.values())

    def __iter__(self) -> Iterator[Request]:
        yield from self._preempted
        for flow in self._flows.values():
            yield from (request for _, request in flow)

    def add(self, request: Request) -> None:
        """Queue a new request."""
        submit = request.submit
        flow = (submit.client, submit.priority)
        cost = len(submit.prompt) + min(submit.sampling.max_tokens, TYPICAL_TOKENS)
        tag = max(self._virtual_time, self._last_tag.get(flow, 0.0)) + cost / WEIGHTS[submit.priority]
        self._last_tag[flow] = tag
        self._flows.setdefault(flow, deque()).append((tag, request))

    def put_back(self, request: Request) -> None:
        """Queue a preempted request ahead of all others."""
        self._preempted.appendleft(request)

    def peek(self) -> Request | None:
        """The next request, without taking it; None when the queue is empty."""
        if self._preempted:
            return self._preempted[0]
        flow = self._next_flow()
        return None if flow is None else self._flows[flow][0][1]

    def pop(self) -> Request:
        """Take the next request.

        Raises:
            IndexError: the queue is empty.
        """
        if self._preempted:
            return self._preempted.popleft()
        flow = self._next_flow()
        if flow is None:
            raise IndexError("the waiting queue is empty")
        self._virtual_time, request = self._flows[flow].popleft()
        self._drop_if_empty(flow)
        return request

    def discard(self, request: Request) -> None:
        """Remove a request; nothing happens if it does not wait."""
        if request in self._preempted:
            self._preempted.remove(request)
            return
        flow = (request.submit.client, request.submit.priority)
        entries = self._flows.get(flow)
        if entries is not None:
            self._flows[flow] = deque(entry for entry in entries if entry[1] is not request)
            self._drop_if_empty(flow)

    def _next_flow(self) -> Flow | None:
        return min(self._flows, key=lambda flow: self._flows[flow][0][0], default=None)

    def _drop_if_empty(self, flow: Flow) -> None:
        """Delete a flow without requests, so that clients who left use no memory."""
        if not self._flows[flow]:
            del self._flows[flow]
            del self._last_tag[flow]
