"""Which replica gets a request: the least loaded of all nodes, or the one that holds the session's prefix cache.

Owns the choice inside Serve's proxy. Serve's own router prefers replicas of the proxy's node, so one entry node would
use only its own replicas while the others are idle. Requests with a session header go to a fixed replica as long as
that one is not overloaded: a multi-turn conversation then finds its KV blocks in the prefix cache. Knows no token and
no text.

The replica of a session is chosen by rendezvous hashing (Thaler and Ravishankar 1998): each replica gets a score from a
hash of session and replica, and the highest score wins. When a replica goes, only its own sessions move.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence

from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

ROUTER_PATH = "deployments.fleet.request_router.LoadRouter"

MAX_LOAD_RATIO = 1.25
"""A session leaves its replica while that one's load is above this multiple of the mean."""

SLACK_REQUESTS = 2
"""Requests by which a replica may exceed that limit, so that an almost idle fleet keeps its sessions together."""

CHOICE_S = 0.5
"""Seconds for which a choice counts as load before its request is sent. Serve may send the request elsewhere."""


def preferred_replica(session: str, loads: Mapping[str, int]) -> str | None:
    """The replica that serves a session.

    Args:
        session: the session's name; empty where the request has none.
        loads: requests in flight by replica id.

    Returns:
        The id of the replica, or None where the least loaded one should serve the request.
    """
    if not session or not loads:
        return None
    chosen = max(loads, key=lambda replica: _score(session, replica))
    mean = sum(loads.values()) / len(loads)
    return chosen if loads[chosen] <= MAX_LOAD_RATIO * mean + SLACK_REQUESTS else None


def _score(session: str, replica: str) -> bytes:
    return hashlib.blake2b(f"{session}\0{replica}".encode(), digest_size=8).digest()


class LoadRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]  # Ray is untyped
    """Serve's request router interface over `preferred_replica`.

    Load is what this proxy has in flight, counted here: Serve's cache of queue lengths has no entry for a replica that
    this proxy has not used lately, and such a replica would never be the least loaded one. A request counts from the
    choice on, because Serve chooses for all requests that have arrived together before it sends the first of them.
    """

    def initialize_state(self) -> None:
        """Called once by Serve with `request_router_kwargs`; there are none."""
        self._in_flight: Counter[str] = Counter()
        self._chosen: defaultdict[str, deque[float]] = defaultdict(deque)  # by replica: times of choices not sent yet

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Called by Serve when a request goes to a replica."""
        super().on_send_request(replica_id)
        self._in_flight[replica_id.unique_id] += 1
        if chosen := self._chosen[replica_id.unique_id]:
            chosen.popleft()

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called by Serve when a request has ended, with a response or an error."""
        super().on_request_completed(replica_id, internal_request_id)
        self._in_flight[replica_id.unique_id] -= 1

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve when replicas come and go."""
        super().update_replicas(replicas)
        names = {replica.replica_id.unique_id for replica in replicas}
        for known in (self._in_flight, self._chosen):
            for name in known.keys() - names:
                del known[name]

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> Sequence[list[RunningReplica]]:
        """Ranks of one replica each. Serve takes the first one that has room.

        Args:
            candidate_replicas: every running replica of the deployment, on all nodes.
            pending_request: the request to place; None where Serve looks for the next one by itself.
        """
        session = pending_request.metadata.session_id if pending_request is not None else ""
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads = {name: self._load(name) for name in by_id}
        preferred = preferred_replica(session, loads)
        ranked = sorted(by_id, key=lambda name: (name != preferred, loads[name], _score(session, name)))
        if ranked:
            self._chosen[ranked[0]].append(self._now_s())
        return [[by_id[name]] for name in ranked]

    def _load(self, name: str) -> int:
        chosen, oldest_s = self._chosen[name], self._now_s() - CHOICE_S
        while chosen and chosen[0] < oldest_s:
            chosen.popleft()
        return self._in_flight[name] + len(chosen)

    @staticmethod
    def _now_s() -> float:
        return time.monotonic()
