"""Responses that are kept in memory, so that a later request can fetch or continue them.

Owns the bounds, and that a client finds only its own responses. Bounds hold for each client, so no client drives out
the responses of another one. Does not know HTTP or how a response is generated.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from deployments.errors import ResponseNotFound
from deployments.settings import StoredResponsesSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A response and the conversation that it ends."""

    response_id: str
    response: bytes
    """The response as JSON."""
    input_items: tuple[bytes, ...]
    """The input items as JSON, with those of the responses that it continues."""
    output_items: tuple[bytes, ...]
    """The output items as JSON."""

    @property
    def conversation(self) -> tuple[bytes, ...]:
        """All items as JSON, to be continued."""
        return self.input_items + self.output_items

    @property
    def num_bytes(self) -> int:
        """Bytes of the response and of its whole conversation."""
        return len(self.response) + sum(map(len, self.conversation))


@dataclass(frozen=True, slots=True)
class _Entry:
    stored: StoredResponse
    num_bytes: int
    at_s: float
    """When it was stored."""


class ResponseStore:
    """The stored responses of one replica. Safe in threads.

    Args:
        settings: the bounds.
        clock: returns monotonic seconds.
    """

    def __init__(self, settings: StoredResponsesSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[str, OrderedDict[str, _Entry]] = {}  # by client
        self._num_bytes: dict[str, int] = {}  # by client

    def put(self, client: str, stored: StoredResponse) -> None:
        """Store a response of a client. Its oldest responses give way where the bounds require it."""
        with self._lock:
            for name in list(self._entries):
                self._drop_old(name)
            entries = self._entries.setdefault(client, OrderedDict())
            self._drop(client, stored.response_id)
            entries[stored.response_id] = _Entry(stored, stored.num_bytes, self._clock())
            self._num_bytes[client] = self._num_bytes.get(client, 0) + stored.num_bytes
            while entries and (
                len(entries) > self._settings.max_responses or self._num_bytes[client] > self._settings.max_bytes
            ):
                self._drop(client, next(iter(entries)))

    def get(self, client: str, response_id: str) -> StoredResponse:
        """A response of a client. Raises ResponseNotFound."""
        with self._lock:
            self._drop_old(client)
            entry = self._of(client).get(response_id)
        if entry is None:
            raise _not_found(response_id)
        return entry.stored

    def delete(self, client: str, response_id: str) -> None:
        """Remove a response of a client. Raises ResponseNotFound."""
        self.get(client, response_id)
        with self._lock:
            self._drop(client, response_id)

    def num_bytes(self, client: str) -> int:
        """Bytes that the responses of a client hold."""
        return self._num_bytes.get(client, 0)

    def _drop_old(self, client: str) -> None:
        oldest_s = self._clock() - self._settings.max_age_s
        for response_id in [key for key, entry in self._of(client).items() if entry.at_s < oldest_s]:
            self._drop(client, response_id)

    def _of(self, client: str) -> OrderedDict[str, _Entry]:
        """The responses of a client, oldest first."""
        return self._entries.get(client, OrderedDict())

    def _drop(self, client: str, response_id: str) -> None:
        entry = self._of(client).pop(response_id, None)
        if entry is not None:
            self._num_bytes[client] -= entry.num_bytes


def _not_found(response_id: str) -> ResponseNotFound:
    return ResponseNotFound(
        f"No response {response_id[:100]!r} is stored here. A response is kept for a limited time, by the replica that "
        "generated it and for its API key; send the whole conversation as input",
        field="response_id",
    )
