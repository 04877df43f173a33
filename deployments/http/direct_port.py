"""The direct port: an HTTP server in the replica's event loop that bypasses Serve's proxy.

Owns the listening socket and the server. Serve's proxy pickles every chunk, which costs more than generating it; here
the application writes to the socket. Replicas of one node may listen on the same port: the kernel distributes the
connections. Knows no route.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from engine.errors import ConfigError

KEEP_ALIVE_S = 90
"""Seconds after which an idle connection is closed, as in Serve's proxy."""
BACKLOG = 2048
_log = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """A uvicorn server that installs no signal handlers, because Ray manages the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class DirectHttp:
    """Listens from `open` until `close`.

    Args:
        app: the application that Serve also mounts. Serve runs its lifespan events.
        host, port: address to listen on.
    """

    def __init__(self, app: ASGIApp, *, host: str, port: int) -> None:
        self._host = host
        self._port = port
        config = uvicorn.Config(
            app,
            lifespan="off",
            access_log=False,
            log_config=None,
            proxy_headers=False,  # access control uses the peer address, which a client must not be able to forge
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Start listening, in the running event loop.

        Raises:
            ConfigError: the address cannot be bound.
        """
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind((self._host, self._port))
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise ConfigError(f"direct_port: cannot listen on {self._host}:{self._port}: {error}") from None
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        _log.info("listening on %s:%d", self._host, self._port)

    async def close(self) -> None:
        """Stop listening. Open connections have one second to end. Calling it twice has no effect."""
        self._server.should_exit = True
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
