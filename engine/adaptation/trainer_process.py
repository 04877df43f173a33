"""The trainer as a child process: started, fed, paused and ended.

Owns the process, its socket and what waits to be sent. The trainer is paused by SIGSTOP and goes on by SIGCONT, so it
needs no code for it and stands still wherever it is. It gives itself the lowest priority, and dies with this process.
Does not know when it should run (`governor`), nor what it computes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence

import psutil

from engine.adaptation.messages import (
    Document,
    FrameReader,
    FromTrainer,
    Setup,
    ToTrainer,
    decode_from_trainer,
    frame,
)
from engine.errors import EngineError

TRAINER = (sys.executable, "-m", "distill.online")
"""The command of the trainer. It gets the number of its socket as last argument."""
_END_TIMEOUT_S = 5.0
_log = logging.getLogger(__name__)


class TrainerProcess:
    """A running trainer. It is paused at first.

    Args:
        setup: first message.
        on_message: called with each message of the trainer, in a thread of this class.
        max_pending_bytes: bound of the documents that wait to be sent; the oldest ones are dropped.
        command: starts a trainer.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        on_message: Callable[[FromTrainer], None],
        max_pending_bytes: int,
        command: Sequence[str] = TRAINER,
    ) -> None:
        self._on_message = on_message
        self._max_pending_bytes = max_pending_bytes
        self._pending: deque[tuple[bytes, bool]] = deque([(frame(setup), False)])
        self._pending_bytes = 0
        self._changed = threading.Condition()
        self._is_closed = False
        self._socket, theirs = socket.socketpair()
        try:
            # One thread; in a group of its own, so that Ctrl-C at a terminal reaches the server alone.
            env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=env,
                process_group=0,
            )
        finally:
            theirs.close()
        self._observed = psutil.Process(self._process.pid)
        self._used_s = 0.0
        self.is_paused = False
        """Whether it stands still."""
        self.pause()
        for target in (self._send_all, self._receive_all):
            threading.Thread(target=target, name=f"trainer{target.__name__}", daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    @property
    def used_s(self) -> float:
        """CPU time of the process so far, in seconds."""
        with contextlib.suppress(psutil.Error):
            times = self._observed.cpu_times()
            self._used_s = times.user + times.system
        return self._used_s

    def pause(self) -> None:
        """Stop the process where it is. Idempotent."""
        if not self.is_paused:
            self.is_paused = True
            self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the process go on. Idempotent."""
        if self.is_paused:
            self.is_paused = False
            self._process.send_signal(signal.SIGCONT)

    def send(self, message: ToTrainer) -> None:
        """Send a message when the trainer reads. Never waits."""
        is_document = isinstance(message, Document)
        with self._changed:
            self._pending.append((frame(message), is_document))
            self._pending_bytes += len(self._pending[-1][0]) if is_document else 0
            while self._pending_bytes > self._max_pending_bytes:
                oldest = next(index for index, (_, dropped) in enumerate(self._pending) if dropped)
                self._pending_bytes -= len(self._pending[oldest][0])
                del self._pending[oldest]
            self._changed.notify()

    def close(self) -> None:
        """End the process. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._process.kill()  # Also ends a paused process. What it writes is renamed into place when complete.
        self._process.wait(_END_TIMEOUT_S)

    def _send_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._is_closed)
                if self._is_closed:
                    return
                data, is_document = self._pending.popleft()
                self._pending_bytes -= len(data) if is_document else 0
            try:
                self._socket.sendall(data)
            except OSError:
                return

    def _receive_all(self) -> None:
        reader = FrameReader(self._socket)
        try:
            while not reader.is_closed:
                for body in reader.read():
                    self._on_message(decode_from_trainer(body))
        except (OSError, EngineError) as error:
            if not self._is_closed:
                _log.warning("the trainer's messages end: %s", error)
        finally:
            self._socket.close()
