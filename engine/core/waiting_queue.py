"""Who is next: requests that wait for a place in the batch, in an order that is fair between clients.

Owns the order only. Self-clocked fair queueing (Golestani 1994) over flows of one client and one priority: each flow
gets a share of the admitted tokens by its priority's weight, however many requests it has in the queue, and nobody is
passed over for good. Within a flow it is first come, first served. Preempted requests go before everybody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from engine.core.request import Request
from engine.messages import Priority

WEIGHTS: dict[Priority, float] = {"high": 16.0, "normal": 4.0, "low": 1.0}
"""Shares of the priorities, of one client or of several."""
TYPICAL_TOKENS = 256
"""Longest answer that is charged for: most requests leave max_tokens at the whole context and use little of it."""

Flow = tuple[str, Priority]


class WaitingQueue:
    """Requests that wait, the next one first."""

    def __init__(self) -> None:
        self._preempted: deque[Request] = deque()
        self._flows: dict[Flow, deque[tuple[float, Request]]] = {}
        self._last_tag: dict[Flow, float] = {}
        self._now = 0.0  # tag of the request admitted last: virtual time

    def __len__(self) -> int:
        return len(self._preempted) + sum(len(flow) for flow in self._flows.values())

    def __iter__(self) -> Iterator[Request]:
        yield from self._preempted
        for flow in self._flows.values():
            yield from (request for _, request in flow)

    def add(self, request: Request) -> None:
        """Queue a request that arrived."""
        submit = request.submit
        flow = (submit.client, submit.priority)
        cost = len(submit.prompt) + min(submit.sampling.max_tokens, TYPICAL_TOKENS)
        tag = max(self._now, self._last_tag.get(flow, 0.0)) + cost / WEIGHTS[submit.priority]
        self._last_tag[flow] = tag
        self._flows.setdefault(flow, deque()).append((tag, request))

    def put_back(self, request: Request) -> None:
        """Queue a preempted request before everything else."""
        self._preempted.appendleft(request)

    def peek(self) -> Request | None:
        """The next request; it stays where it is."""
        if self._preempted:
            return self._preempted[0]
        flow = self._next_flow()
        return None if flow is None else self._flows[flow][0][1]

    def pop(self) -> Request:
        """Take the next request. Raises IndexError when there is none."""
        if self._preempted:
            return self._preempted.popleft()
        flow = self._next_flow()
        if flow is None:
            raise IndexError("nobody waits")
        self._now, request = self._flows[flow].popleft()
        self._tidy(flow)
        return request

    def discard(self, request: Request) -> None:
        """Take out a request, if it is here."""
        if request in self._preempted:
            self._preempted.remove(request)
            return
        flow = (request.submit.client, request.submit.priority)
        entries = self._flows.get(flow)
        if entries is not None:
            self._flows[flow] = deque(entry for entry in entries if entry[1] is not request)
            self._tidy(flow)

    def _next_flow(self) -> Flow | None:
        return min(self._flows, key=lambda flow: self._flows[flow][0][0], default=None)

    def _tidy(self, flow: Flow) -> None:
        """Nothing is kept of a flow without requests, so that clients who left cost nothing."""
        if not self._flows[flow]:
            del self._flows[flow]
            del self._last_tag[flow]
