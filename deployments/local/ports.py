"""TCP ports of a local server: those that a user names must be free, those that are internal are chosen.

Knows sockets only.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import random
import socket

from deployments.local.machine import listener
from engine.errors import ConfigError, EngineUnavailable

LOOPBACK = "127.0.0.1"
_CHOSEN = range(24_000, 32_000)
"""Ports to choose from: above those of Ray's workers and clients, below those that the kernel gives to outgoing
connections. One of the latter could take a port between its choice and its use."""
_NUM_TRIES = 100


def free_port(preferred: int = 0) -> int:
    """`preferred` if nobody listens there, else any free port on loopback."""
    (port,) = free_ports(preferred)
    return port


def free_ports(*preferred: int) -> list[int]:
    """Distinct free ports on loopback: each preferred one if nobody listens there, else any. 0 is any.

    Raises:
        EngineUnavailable: there is no free port.
    """
    ports = []
    with contextlib.ExitStack() as probes:  # held together, so that no port is found twice
        for wanted in preferred:
            for port in itertools.chain((wanted,) if wanted else (), random.sample(_CHOSEN, _NUM_TRIES), (0,)):
                probe = probes.enter_context(socket.socket())
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                with contextlib.suppress(OSError):
                    probe.bind((LOOPBACK, port))
                    probe.listen(1)  # two sockets may be bound to one port, but only one can listen there
                    ports.append(int(probe.getsockname()[1]))
                    break
            else:
                raise EngineUnavailable("no free port on loopback")
    return ports


def check_port(setting: str, host: str, port: int, remedy: str) -> None:
    """Whether a server can listen on an address.

    Args:
        setting: name of the port's setting, for the message.
        remedy: what to do about it, for the message.

    Raises:
        ConfigError: somebody listens there, or the address is not to be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        reason = f"cannot be listened on: {error.strerror}"
        if error.errno == errno.EADDRINUSE:
            owner = listener(port)
            reason = f"is in use by {owner or 'another process'}"
        raise ConfigError(f"{setting}: {host}:{port} {reason}; {remedy}") from None
