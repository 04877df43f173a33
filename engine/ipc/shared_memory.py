"""Memory that two processes map, and how the second process gets it.

Owns anonymous shared memory (a sealed memfd) and the rendezvous that passes it over a unix socket. Neither has a name
in a file system, so nothing is left behind when a process is killed. The size does not depend on the mount of /dev/shm,
which containers limit to 64 MB. Seals prevent a peer from shrinking memory that is mapped. Knows nothing of the
contents. The connected sockets serve as doorbells afterwards (`engine.ipc.doorbell`).
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import socket
import struct
import threading
import time
from dataclasses import dataclass

from engine.errors import ConfigError

_GREETING = struct.Struct("<8sqqq")  # magic, protocol version, epoch, peer number
_REPLY = struct.Struct("<8sqqq")  # magic, protocol version, epoch, bytes of the memory
_MAGIC = b"paceline"
_HANDSHAKE_S = 5.0
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class PeerGone(Exception):
    """The peer process has closed its socket or is dead."""


class SharedMemory:
    """Memory that exists as long as a process maps it.

    Args:
        fd: a sealed memfd. This object closes it.
        num_bytes: number of bytes to map.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.fd = fd
        self.num_bytes = num_bytes
        self.buffer = mmap.mmap(fd, num_bytes)

    @classmethod
    def create(cls, num_bytes: int) -> SharedMemory:
        """New memory, filled with zeros. A page takes physical memory when it is first written."""
        fd = os.memfd_create("paceline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, num_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, num_bytes)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def adopt(cls, fd: int, num_bytes: int) -> SharedMemory:
        """Map the memory that a peer has sent.

        Args:
            fd: the peer's memfd. The new object closes it.
            num_bytes: number of bytes to map.

        Raises:
            ConfigError: the memory is smaller than `num_bytes`, or is not sealed against shrinking.
        """
        size = os.fstat(fd).st_size
        if size < num_bytes or not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            os.close(fd)
            raise ConfigError(
                f"shared memory: {size} bytes given, allowed are sealed memory files of {num_bytes} or more"
            )
        return cls(fd, num_bytes)

    def close(self) -> None:
        """Close the file descriptor. Idempotent. The mapping is released with its last view, so views stay valid."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where a peer finds the memory. Part of the handle that crosses by Ray; picklable."""

    name: str
    """Random name in the abstract socket namespace of this machine. It disappears with its owner."""
    version: int
    """Protocol version of the owner."""
    epoch: int
    """Epoch of the owner. Another epoch is refused."""
    num_bytes: int
    """Size of the memory in bytes."""
    peer: int
    """Index of the peer that this rendezvous is for, from 0."""


class Host:
    """Passes one shared memory to each of the expected peers, once per peer.

    A thread accepts the peers until all have connected, so the owner may be busy meanwhile. Only processes of the same
    user are accepted.

    Args:
        memory: the memory to pass. The caller closes it.
        version: protocol version of the owner.
        epoch: epoch of the owner.
        num_peers: number of expected peers.
    """

    def __init__(self, memory: SharedMemory, *, version: int, epoch: int, num_peers: int) -> None:
        self._memory = memory
        self._version = version
        self._epoch = epoch
        self._name = f"paceline-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + self._name)
        self._listener.listen(num_peers + 8)
        self._sockets: dict[int, socket.socket] = {}
        self._num_peers = num_peers
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="paceline-rendezvous", daemon=True)
        self._thread.start()

    def rendezvous(self, peer: int) -> Rendezvous:
        """The argument of `join` in the process of peer number `peer`."""
        return Rendezvous(self._name, self._version, self._epoch, self._memory.num_bytes, peer)

    def missing(self) -> tuple[int, ...]:
        """Peers that have not connected yet. A peer whose `join` has returned is not among them."""
        with self._changed:
            return tuple(peer for peer in range(self._num_peers) if peer not in self._sockets)

    def wait(self, timeout_s: float) -> bool:
        """Wait until all peers have connected; False if some have not after `timeout_s` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._sockets) == self._num_peers, timeout_s)

    def socket_of(self, peer: int) -> socket.socket:
        """The socket of a peer that has connected.

        Raises:
            KeyError: the peer has not connected.
        """
        with self._changed:
            return self._sockets[peer]

    def close(self) -> None:
        """Stop accepting peers, and close all sockets. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(_HANDSHAKE_S)
        for connection in self._sockets.values():
            connection.close()

    def _serve(self) -> None:
        with self._listener:
            while not self._closed and self.missing():
                try:
                    connection, _ = self._listener.accept()
                except OSError:
                    return
                if not self._welcome(connection):
                    connection.close()

    def _welcome(self, connection: socket.socket) -> bool:
        """Check a greeting, then pass the memory and register the peer; False for anybody who is not expected."""
        connection.settimeout(_HANDSHAKE_S)
        try:
            if peer_uid(connection) != os.geteuid():
                return False
            magic, version, epoch, peer = _GREETING.unpack(_receive_exactly(connection, _GREETING.size))
            if (magic, version, epoch) != (_MAGIC, self._version, self._epoch) or peer not in self.missing():
                return False
            reply = _REPLY.pack(_MAGIC, self._version, self._epoch, self._memory.num_bytes)
            # Under the lock: once the peer has its reply, nobody sees it as missing.
            with self._changed:
                socket.send_fds(connection, [reply], [self._memory.fd])
                self._sockets[peer] = connection
                self._changed.notify_all()
        except (OSError, PeerGone):
            return False
        return True


def join(rendezvous: Rendezvous, *, version: int, timeout_s: float) -> tuple[SharedMemory, socket.socket]:
    """Connect to the owner of a shared memory and map it.

    Args:
        rendezvous: from the owner.
        version: protocol version of this process.
        timeout_s: seconds from now.

    Returns:
        The mapped memory, and the socket connected to the owner. The caller closes both.

    Raises:
        ConfigError: the owner has another version or user, or its memory has the wrong size.
        PeerGone: the owner is gone, has closed this epoch, or already has this peer.
    """
    if rendezvous.version != version:
        raise ConfigError(
            f"buffer version: {rendezvous.version} given, this process has {version}; start both from one release"
        )
    deadline = time.monotonic() + timeout_s
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(max(timeout_s, 0.001))
        connection.connect("\0" + rendezvous.name)
        if (uid := peer_uid(connection)) != os.geteuid():
            raise ConfigError(f"buffer owner: runs as user {uid}, allowed is {os.geteuid()}, the user of this process")
        connection.sendall(_GREETING.pack(_MAGIC, version, rendezvous.epoch, rendezvous.peer))
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        reply, fds, _, _ = socket.recv_fds(connection, _REPLY.size, 1)
        if len(reply) != _REPLY.size or len(fds) != 1:
            raise PeerGone(f"the owner of the buffer refused peer {rendezvous.peer} of epoch {rendezvous.epoch}")
        return SharedMemory.adopt(fds[0], rendezvous.num_bytes), connection
    except OSError as error:
        connection.close()
        raise PeerGone(f"no owner responds for epoch {rendezvous.epoch} of this buffer: {error}") from None
    except BaseException:
        connection.close()
        raise


def peer_uid(connection: socket.socket) -> int:
    """User id of the peer process, from the kernel."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def _receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    received = b""
    while len(received) < num_bytes:
        part = connection.recv(num_bytes - len(received))
        if not part:
            raise PeerGone("closed during the greeting")
        received += part
    return received
