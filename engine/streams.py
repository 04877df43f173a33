"""Hands each step's deltas to whoever serves the clients: one message a step, never one a token.

Owns nothing but the way out. The sink is a callable: a unix socket in a shard process, a list in a test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.request import Delta

Sink = Callable[[tuple[Delta, ...]], None]


class Streams:
    """Phase five of the step.

    Args:
        sink: takes one step's deltas; must not block.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def publish(self, deltas: Sequence[Delta]) -> None:
        if deltas:
            self._sink(tuple(deltas))
