"""The unix socket of rank 0: commands come in, and one message of deltas per step goes out.

Owns the socket, which accepts one replica only, a reading thread, and a writing thread for bytes that the kernel does
not accept at once. A slow replica or a full socket buffer never blocks the step loop. When the replica disconnects, all
its requests are abandoned. Knows no engine, only the callables it is given.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable

from engine.errors import EngineError
from engine.ipc.wire import HEADER, AbortCommand, Event, SubmitCommand, decode_command, encode_frame, frame_len
from engine.messages import Submit

_log = logging.getLogger(__name__)


class ShardSocket:
    """Serves one replica, the first one that connects.

    Args:
        submit: starts a request. Called in the reading thread.
        abort: ends the request with this id. Called in the reading thread.
        abandon: ends all requests. Called in the reading thread when the replica has disconnected.
    """

    def __init__(
        self, *, submit: Callable[[Submit], None], abort: Callable[[str], None], abandon: Callable[[], None]
    ) -> None:
        self._submit = submit
        self._abort = abort
        self._abandon = abandon
        self._folder = tempfile.mkdtemp(prefix="paceline-")  # mode 0700
        self.path = os.path.join(self._folder, secrets.token_hex(8))
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        os.chmod(self.path, 0o600)
        self._listener.listen(1)
        self._connection: socket.socket | None = None
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # orders the bytes that go to the kernel and to the outbox
        self._num_queued = 0
        for target, name in ((self._serve, "shard-socket-read"), (self._write, "shard-socket-write")):
            threading.Thread(target=target, name=name, daemon=True).start()

    def send(self, event: Event) -> None:
        """Send what the kernel accepts at once, and queue the rest. Never blocks. Dropped when no replica is connected.

        The writing thread is woken only when something is queued: waking it costs a context switch during a step.
        """
        data = encode_frame(event)
        with self._lock:
            connection = self._connection
            if self._num_queued == 0 and connection is not None:
                data = data[_send_now(connection, data) :]
            if data:
                self._num_queued += 1
                self._outbox.put(data)

    def close(self) -> None:
        """Stop both threads after everything queued is written. Idempotent."""
        self._outbox.put(None)
        self._stop_listening()

    def _serve(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # closed before a replica connected
            return
        self._stop_listening()  # removes the socket file, so that nothing is left when this process is killed
        self._connection = connection
        try:
            self._read(connection)
        except (EngineError, OSError) as error:
            _log.warning("replica connection ends: %s", error)
        finally:
            self._connection = None
            connection.close()
            self._abandon()

    def _stop_listening(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self, connection: socket.socket) -> None:
        with connection.makefile("rb") as stream:
            while header := stream.read(HEADER.size):
                if len(header) < HEADER.size:
                    return
                command = decode_command(stream.read(frame_len(header)))
                if isinstance(command, SubmitCommand):
                    self._submit(command.submit)
                elif isinstance(command, AbortCommand):
                    self._abort(command.request_id)

    def _write(self) -> None:
        while (data := self._outbox.get()) is not None:
            connection = self._connection
            if connection is not None:
                with contextlib.suppress(OSError):
                    connection.sendall(data)
            with self._lock:
                self._num_queued -= 1
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _send_now(connection: socket.socket, data: bytes) -> int:
    """Number of bytes sent without blocking. The reading thread handles a broken connection."""
    try:
        return connection.send(data, socket.MSG_DONTWAIT)
    except OSError:
        return 0
