"""Who may start a request now: the bound of the queue, each client's limits, and a fair share of a full queue.

Owns counts of requests in flight and what a refused client hears (429 and when to come back). Counts answers, not HTTP
requests: `n` and several prompts are as many. Does not know keys (`keys`), bodies or the engine.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from deployments.errors import RateLimited
from engine.errors import EngineUnavailable, InvalidRequest, QueueFull
from engine.messages import Priority

if TYPE_CHECKING:  # the command reads key files, and needs no grammar compiler for that
    from deployments.openai.requests import ChatBody, CompletionBody

MEMORY_S = 10.0
"""A refused client keeps its claim to a share for so long."""

LONGEST_RETRY_S = 60.0

DRAIN_RETRY_S = 5.0


def unheard(cause: str) -> None:
    """For refusals that nobody counts."""
    del cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """Whoever sends requests, and what it may do."""

    name: str = ""
    max_concurrent: int | None = None
    """Answers in flight."""
    requests_per_minute: int | None = None
    max_priority: Priority = "high"


ANONYMOUS = Client()


class Ticket:
    """Places in the queue; releasing them again changes nothing."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        if self._release is not None:
            release, self._release = self._release, None
            release()


class Admission:
    """Made once per replica; called in one event loop.

    Args:
        capacity: answers in flight, running and waiting.
        clock: monotonic seconds.
        on_refused: told the cause of each refusal, as metrics name it.
    """

    def __init__(
        self,
        capacity: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_refused: Callable[[str], None] = unheard,
    ) -> None:
        self.capacity = capacity
        self.accepts = True
        """False while the server drains: what runs goes on, nothing new comes in."""
        self._clock = clock
        self._on_refused = on_refused
        self._in_flight: Counter[str] = Counter()
        self._buckets: dict[str, tuple[float, float]] = {}  # client -> requests left, at which time
        self._refused_s: dict[str, float] = {}
        self._interval_s = 0.1  # between two places that become free, smoothed
        self._freed_s: float | None = None

    @property
    def num_in_flight(self) -> int:
        return self._in_flight.total()

    def enter(self, client: Client, num_answers: int) -> Ticket:
        """Take places for a request.

        Raises:
            QueueFull: no place, or more than the client's share of a queue that others want too.
            RateLimited: the client's own limits.
            EngineUnavailable: the server drains.
        """
        try:
            self._check(client, num_answers)
        except (QueueFull, EngineUnavailable) as error:
            self._on_refused(_cause(error))
            raise
        self._in_flight[client.name] += num_answers
        return Ticket(lambda: self._leave(client.name, num_answers))

    def _check(self, client: Client, num_answers: int) -> None:
        if not self.accepts:
            raise EngineUnavailable("The server is draining and takes no new requests; try again later")
        own = self._in_flight[client.name]
        if client.max_concurrent is not None and own + num_answers > client.max_concurrent:
            raise RateLimited(
                f"This key may have {client.max_concurrent} answers in flight; {own} are, {num_answers} more were "
                "asked for",
                retry_after_s=self._retry_after_s(1),
            )
        if self.num_in_flight + num_answers > self.capacity:
            self._refused_s[client.name] = self._clock()
            raise QueueFull(
                f"The server is at its capacity of {self.capacity} requests; try again later",
                retry_after_s=self._retry_after_s(self.num_in_flight // 4),
            )
        share = self.capacity // max(1, self._num_active(client.name))
        if own + num_answers > share and 2 * (self.num_in_flight + num_answers) > self.capacity:
            raise QueueFull(
                f"The server is busy, and this client has {own} of its {self.capacity} places; its share is {share}",
                retry_after_s=self._retry_after_s(max(1, own - share)),
            )
        self._take_from_bucket(client)

    def _num_active(self, name: str) -> int:
        """Clients with requests in flight, the one that asks, and those refused a moment ago."""
        now = self._clock()
        self._refused_s = {client: at_s for client, at_s in self._refused_s.items() if now - at_s < MEMORY_S}
        return len({client for client, count in self._in_flight.items() if count} | {name} | self._refused_s.keys())

    def _take_from_bucket(self, client: Client) -> None:
        """A bucket of one minute's requests that refills steadily."""
        if client.requests_per_minute is None:
            return
        now, size = self._clock(), float(client.requests_per_minute)
        left, at_s = self._buckets.get(client.name, (size, now))
        left = min(size, left + (now - at_s) * size / 60.0)
        if left < 1.0:
            self._buckets[client.name] = (left, now)
            raise RateLimited(
                f"This key may send {client.requests_per_minute} requests a minute",
                retry_after_s=(1.0 - left) * 60.0 / size,
            )
        self._buckets[client.name] = (left - 1.0, now)

    def _retry_after_s(self, num_places: int) -> float:
        """Until so many places are likely to have become free."""
        return min(LONGEST_RETRY_S, max(1.0, num_places * self._interval_s))

    def _leave(self, name: str, num_answers: int) -> None:
        self._in_flight[name] -= num_answers
        if self._in_flight[name] <= 0:
            del self._in_flight[name]
        now = self._clock()
        if self._freed_s is not None and self.num_in_flight:
            self._interval_s += 0.1 * (min(60.0, now - self._freed_s) / num_answers - self._interval_s)
        self._freed_s = now


def _cause(error: Exception) -> str:
    if isinstance(error, RateLimited):
        return "rate_limit"
    return "queue_full" if isinstance(error, QueueFull) else "unavailable"


def choose_priority(body: ChatBody | CompletionBody, client: Client) -> Priority:
    """What was asked for, or the highest that the client may have, up to `normal`.

    Raises:
        InvalidRequest: more was asked for than the client may have.
    """
    highest_first = get_args(Priority)
    wanted, allowed = body.priority or "normal", client.max_priority
    if highest_first.index(wanted) >= highest_first.index(allowed):
        return wanted
    if body.priority is not None:
        raise InvalidRequest(f"priority is {wanted!r}, but this key allows up to {allowed!r}", field="priority")
    return allowed
