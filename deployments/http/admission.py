"""Admission: the bound on requests in flight, the limits of each client, and fair shares of a full queue.

Owns the counts of choices in flight and the error of a refused client (429 with Retry-After). Counts choices, not HTTP
requests: a request with `n` or several prompts takes several places. Does not know keys (`keys`) or the engine.
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
"""Seconds for which a refused client still counts when shares are computed."""

LONGEST_RETRY_S = 60.0
"""Upper bound of Retry-After, in seconds."""


def ignore_refusal(cause: str) -> None:
    """Ignore a refusal."""
    del cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A sender of requests, and its limits."""

    name: str = ""
    """Name of its API key; empty without keys."""
    max_concurrent: int | None = None
    """Largest number of choices in flight; None for no limit."""
    requests_per_minute: int | None = None
    """Largest number of requests per minute; None for no limit."""
    max_priority: Priority = "high"
    """Highest priority that it may ask for."""


ANONYMOUS = Client()


class Ticket:
    """Places taken by one request. Releasing them twice has no effect."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        if self._release is not None:
            release, self._release = self._release, None
            release()


class Admission:
    """Created once per replica. All calls come from one event loop.

    Args:
        capacity: largest number of choices in flight, running and waiting.
        clock: returns monotonic seconds.
        on_refused: called with the cause of each refusal, as in `paceline_rejected_total`.
    """

    def __init__(
        self,
        capacity: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_refused: Callable[[str], None] = ignore_refusal,
    ) -> None:
        self.capacity = capacity
        """Largest number of choices in flight. May change at any time."""
        self.accepts = True
        """False while the server drains: running requests go on, new ones are refused."""
        self._clock = clock
        self._on_refused = on_refused
        self._in_flight: Counter[str] = Counter()
        self._buckets: dict[str, tuple[float, float]] = {}  # by client: requests left, and when that was computed
        self._refused_s: dict[str, float] = {}
        self._interval_s = 0.1  # smoothed time between two releases
        self._freed_s: float | None = None

    @property
    def num_in_flight(self) -> int:
        """Number of choices in flight."""
        return self._in_flight.total()

    def enter(self, client: Client, num_choices: int) -> Ticket:
        """Take one place for each choice of a request.

        Raises:
            QueueFull: the queue is full, or more than half full and the client exceeds its share.
            RateLimited: the client exceeds its own limits.
            EngineUnavailable: the server is draining.
        """
        try:
            self._check(client, num_choices)
        except (QueueFull, EngineUnavailable) as error:
            self._on_refused(_cause(error))
            raise
        self._in_flight[client.name] += num_choices
        return Ticket(lambda: self._leave(client.name, num_choices))

    def count_invalid(self) -> None:
        """Count a request that was refused for what it asks."""
        self._on_refused("invalid_request")

    def _check(self, client: Client, num_choices: int) -> None:
        if not self.accepts:
            raise EngineUnavailable("The server is draining and takes no new requests; try again later")
        held = self._in_flight[client.name]
        if client.max_concurrent is not None and held + num_choices > client.max_concurrent:
            raise RateLimited(
                f"This key may have {client.max_concurrent} choices in flight; {held} are, {num_choices} more were "
                "asked for",
                retry_after_s=self._retry_after_s(1),
            )
        if self.num_in_flight + num_choices > self.capacity:
            self._refused_s[client.name] = self._clock()
            raise QueueFull(
                f"The server is at its capacity of {self.capacity} requests; try again later",
                retry_after_s=self._retry_after_s(self.num_in_flight // 4),
            )
        share = self.capacity // max(1, self._num_active(client.name))
        if held + num_choices > share and 2 * (self.num_in_flight + num_choices) > self.capacity:
            raise QueueFull(
                f"The server is busy, and this client has {held} of its {self.capacity} places; its share is {share}",
                retry_after_s=self._retry_after_s(max(1, held - share)),
            )
        self._take_from_bucket(client)

    def _num_active(self, name: str) -> int:
        """Number of clients that compete: those in flight, the one that asks, and those refused recently."""
        now = self._clock()
        self._refused_s = {client: at_s for client, at_s in self._refused_s.items() if now - at_s < MEMORY_S}
        return len({client for client, count in self._in_flight.items() if count} | {name} | self._refused_s.keys())

    def _take_from_bucket(self, client: Client) -> None:
        """Take a token from the client's bucket, which holds one minute's requests and refills steadily."""
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
        """Seconds until this many places have probably become free."""
        return min(LONGEST_RETRY_S, max(1.0, num_places * self._interval_s))

    def _leave(self, name: str, num_choices: int) -> None:
        self._in_flight[name] -= num_choices
        if self._in_flight[name] <= 0:
            del self._in_flight[name]
        now = self._clock()
        if self._freed_s is not None and self.num_in_flight:
            self._interval_s += 0.1 * (min(60.0, now - self._freed_s) / num_choices - self._interval_s)
        self._freed_s = now


def _cause(error: Exception) -> str:
    if isinstance(error, RateLimited):
        return "rate_limit"
    return "queue_full" if isinstance(error, QueueFull) else "unavailable"


def choose_priority(body: ChatBody | CompletionBody, client: Client) -> Priority:
    """The priority of a request: as asked for, else `normal` or the highest that the client is allowed.

    Raises:
        InvalidRequest: the body asks for more than the client is allowed.
    """
    highest_first = get_args(Priority)
    wanted, allowed = body.priority or "normal", client.max_priority
    if highest_first.index(wanted) >= highest_first.index(allowed):
        return wanted
    if body.priority is not None:
        raise InvalidRequest(f"priority is {wanted!r}, but this key allows up to {allowed!r}", field="priority")
    return allowed
