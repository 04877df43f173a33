"""The trainer's process: `python -m distill.online NUMBER_OF_SOCKET`, started by the draft's process.

Owns the process's priority and its end. It takes the lowest priority before it imports torch, and ends with the thread
that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys

_PR_SET_PDEATHSIG = 1


def take_lowest_priority() -> None:
    """Run only on CPUs that nothing else wants, where the system has that; at niceness 19 everywhere."""
    with contextlib.suppress(OSError):
        os.nice(19)
    if hasattr(os, "SCHED_IDLE"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def end_with(parent: int) -> None:
    """Ask the system to kill this process when its parent ends, also while it is paused. Only Linux can."""
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # It ended before the call.
            raise SystemExit(1)


def main(number: int) -> None:
    """Train until the other end of the socket closes."""
    take_lowest_priority()
    end_with(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=number)

    import torch  # After the priority is set: this takes seconds.

    from distill.online.session import serve

    torch.set_num_threads(1)
    serve(connection)


if __name__ == "__main__":
    main(int(sys.argv[1]))
