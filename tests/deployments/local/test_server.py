"""What `paceline serve` says of a deployment that failed."""

from __future__ import annotations

import signal

import pytest

from deployments.local import server
from deployments.local.server import summarize

TRACEBACK = """The deployment failed to start 3 times in a row. Error:
ray::ServeReplica:paceline:Replica.initialize_and_get_metadata() (pid=1, ip=127.0.0.1)
  File "/somewhere/replica.py", line 40, in __init__
    folder = resolve_model(name)
engine.errors.ConfigError: model: 'x' has no config.json

"""


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (TRACEBACK, "engine.errors.ConfigError: model: 'x' has no config.json"),
        ("No node has enough CPUs.\nAdd one.", "No node has enough CPUs.\nAdd one."),
    ],
)
def test_the_error_is_said_without_its_traceback(message: str, said: str) -> None:
    assert summarize(message) == said


def test_signals_that_follow_do_not_interrupt_the_stop() -> None:
    """A terminal's Ctrl-C and a supervisor's SIGTERM may arrive together; Ray would run on without its parent."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    try:
        signal.signal(signal.SIGINT, server._raise_stopped)
        signal.signal(signal.SIGTERM, server._raise_draining)
        with pytest.raises(server._Stopped):
            signal.raise_signal(signal.SIGINT)
        for number in (*numbers, *numbers):
            signal.raise_signal(number)
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
