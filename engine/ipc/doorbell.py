"""How one process wakes another that waits for a word in shared memory to change.

Owns the ring (one byte on a connected unix socket), the wait (spin briefly, then sleep in poll) and the notice of a
peer's death (end of file). The word in memory is the truth and the byte only a hint: a lost byte costs at most one
slice of waiting, a superfluous one a glance. Knows nothing of the memory's layout; the waiter says what `ready` is.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable

from engine.ipc.shared_memory import PeerGone

DEFAULT_SPIN_S = 50e-6
"""About one sleep and wake-up in poll: less never catches a quick answer, more takes the core the peer computes on."""
_SLICE_S = 0.05
"""The word is looked at again after this long without a byte."""


class Doorbell:
    """One end of a connected pair. Not for use by several threads at once.

    Args:
        connection: connected AF_UNIX stream socket; owned from here on.
        spin_s: seconds to watch the word before sleeping; 0 sleeps at once.
    """

    def __init__(self, connection: socket.socket, *, spin_s: float = DEFAULT_SPIN_S) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._spin_s = spin_s
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._gone = False

    def ring(self) -> None:
        """Wake the peer. The caller has written the word before this.

        Raises:
            PeerGone: nobody is there to wake.
        """
        try:
            self._connection.send(b"\1", socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return  # So many unread rings lie there that the peer will wake anyway.
        except OSError as error:
            self._gone = True
            raise PeerGone(str(error)) from None

    def wait(self, ready: Callable[[], bool], *, timeout_s: float) -> bool:
        """Wait until `ready()` is true; False if it is not after `timeout_s` seconds.

        Raises:
            PeerGone: the peer's socket is closed and `ready()` is still false.
            Whatever `ready` raises.
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
        """Whether the peer's socket is open. Takes the rings that have arrived."""
        while not self._gone:
            try:
                self._gone = not self._connection.recv(4096)
            except BlockingIOError:
                return True
            except OSError:
                self._gone = True
        return False

    def close(self) -> None:
        """Idempotent. The peer notices at once."""
        self._gone = True
        self._connection.close()

    def _spin(self, ready: Callable[[], bool], until: float) -> bool:
        while not ready():
            if time.monotonic() >= until:
                return False
            os.sched_yield()  # Lets the peer run where the two share a core.
        return True
