"""How one process wakes another one that waits for a word in shared memory to change.

Owns the ring (one byte on a connected unix socket), the wait (spin briefly, then sleep in poll) and the detection of a
dead peer (end of file). Only the word in memory decides; the byte is a hint. A lost byte delays the waiter by at most
one poll slice, and an extra byte costs one look at the word. Knows nothing of the memory's layout: the waiter passes a
predicate.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable

from engine.ipc.shared_memory import PeerGone

DEFAULT_SPIN_S = 50e-6
"""About the time of one sleep and wake-up in poll. A longer spin takes CPU time from a peer on the same core."""
_SLICE_S = 0.05
"""Longest sleep in poll before the predicate is checked again, in seconds."""


class Doorbell:
    """One end of a connected pair. Only one thread may use it at a time.

    Args:
        connection: connected AF_UNIX stream socket. The doorbell closes it.
        spin_s: seconds to spin before sleeping; 0 sleeps at once.
    """

    def __init__(self, connection: socket.socket, *, spin_s: float = DEFAULT_SPIN_S) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._spin_s = spin_s
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._gone = False

    def ring(self) -> None:
        """Wake the peer. The caller must have written the word before.

        Raises:
            PeerGone: the peer has closed its socket.
        """
        try:
            self._connection.send(b"\1", socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return  # The socket buffer is full of unread rings, so the peer wakes anyway.
        except OSError as error:
            self._gone = True
            raise PeerGone(str(error)) from None

    def wait(self, ready: Callable[[], bool], *, timeout_s: float) -> bool:
        """Wait until `ready()` is true; False if it is not after `timeout_s` seconds. Errors of `ready` pass through.

        Raises:
            PeerGone: the peer's socket is closed and `ready()` is still false.
        """
        now = time.monotonic()
        deadline = now + timeout_s
        if self._spin(ready, min(now + self._spin_s, deadline)):
            return True
        while True:
            remaining_s = deadline - time.monotonic()
            if remaining_s > 0:
                self._poll.poll(min(remaining_s, _SLICE_S) * 1000)
            alive = self.alive
            if ready():
                return True
            if not alive:
                raise PeerGone("its socket is closed")
            if remaining_s <= 0:
                return False

    @property
    def alive(self) -> bool:
        """Whether the peer's socket is open. Discards the rings that have arrived."""
        while not self._gone:
            try:
                self._gone = not self._connection.recv(4096)
            except BlockingIOError:
                return True
            except OSError:
                self._gone = True
        return False

    def close(self) -> None:
        """Close the socket; the peer notices at once. Idempotent."""
        self._gone = True
        self._connection.close()

    def _spin(self, ready: Callable[[], bool], until: float) -> bool:
        while not ready():
            if time.monotonic() >= until:
                return False
            os.sched_yield()  # Lets the peer run where the two share a core.
        return True
