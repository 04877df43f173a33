"""What `paceline serve` says of a deployment that failed."""

from __future__ import annotations

import pytest

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
