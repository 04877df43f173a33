"""Memory that two processes map, and how the second one gets it.

Owns anonymous shared memory (a sealed memfd) and the little rendezvous that passes it over a unix socket. Neither has a
name in any file system, so nothing can be left behind, whichever process is killed and when; and the size is not bound
by the mount of /dev/shm, which containers keep at 64 MB. Seals keep a peer from shrinking what the other has mapped.
Knows nothing of what lies in the memory; the connected sockets serve as doorbells afterwards (`engine.ipc.doorbell`).
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
    """The process at the other end has closed its socket or is dead."""


class SharedMemory:
    """A stretch of memory that lives as long as any process maps it.

    Args:
        fd: a sealed memfd; this object owns it from here on.
        num_bytes: bytes to map.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.fd = fd
        self.num_bytes = num_bytes
        self.buffer = mmap.mmap(fd, num_bytes)

    @classmethod
    def create(cls, num_bytes: int) -> SharedMemory:
        """New memory, all zero. Pages are taken from the machine when first written."""
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
        """Map what a peer has sent. Takes over `fd`.

        Raises:
            ConfigError: the memory is smaller than `num_bytes`, or could still be shrunk under our feet.
        """
        size = os.fstat(fd).st_size
        if size < num_bytes or not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            os.close(fd)
            raise ConfigError(
                f"shared memory: {size} bytes given, allowed are sealed memory files of {num_bytes} or more"
            )
        return cls(fd, num_bytes)

    def close(self) -> None:
        """Give up the file; idempotent. The mapping itself goes when the last view of it does, so views stay valid."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where a peer finds the memory; part of what the two processes exchange through Ray. Picklable."""

    name: str
    """Name in the abstract socket namespace of this machine; unpredictable, gone with its owner."""
    version: int
    """Protocol version of the owner."""
    epoch: int
    num_bytes: int
    peer: int
    """Which of the expected peers the holder of this is, from 0."""


class Host:
    """Hands one shared memory to each of the expected peers, once, whenever they come.

    A short-lived thread answers, so that the owner may be busy (or stopped in a Ray call) when a peer opens.
    Only processes of the same user are answered.
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
        """What peer number `peer` needs to connect."""
        return Rendezvous(self._name, self._version, self._epoch, self._memory.num_bytes, peer)

    def missing(self) -> tuple[int, ...]:
        """Peers that have not come yet."""
        with self._changed:
            return tuple(peer for peer in range(self._num_peers) if peer not in self._sockets)

    def wait(self, timeout_s: float) -> bool:
        """Wait until all peers have connected; False if some have not by then."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._sockets) == self._num_peers, timeout_s)

    def socket_of(self, peer: int) -> socket.socket:
        """The connected socket of a peer that has come."""
        with self._changed:
            return self._sockets[peer]

    def close(self) -> None:
        """Stop answering; idempotent. Sockets that were handed out are their holders' to close, and closed here too."""
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
        connection.settimeout(_HANDSHAKE_S)
        try:
            if peer_uid(connection) != os.geteuid():
                return False
            magic, version, epoch, peer = _GREETING.unpack(_receive_exactly(connection, _GREETING.size))
            if (magic, version, epoch) != (_MAGIC, self._version, self._epoch) or peer not in self.missing():
                return False
            reply = _REPLY.pack(_MAGIC, self._version, self._epoch, self._memory.num_bytes)
            socket.send_fds(connection, [reply], [self._memory.fd])
        except (OSError, PeerGone):
            return False
        with self._changed:
            self._sockets[peer] = connection
            self._changed.notify_all()
        return True


def join(rendezvous: Rendezvous, *, version: int, timeout_s: float) -> tuple[SharedMemory, socket.socket]:
    """Connect to the owner of a shared memory and map it.

    Args:
        version: the protocol version of this process.
        timeout_s: seconds from now.

    Raises:
        ConfigError: the owner speaks another version, runs as another user, or its memory has the wrong size.
        PeerGone: the owner is gone, has closed this epoch, or already has this peer.
    """
    if rendezvous.version != version:
        raise ConfigError(
            f"buffer version: {rendezvous.version} given, this process speaks {version}; start both from one release"
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
        raise PeerGone(f"no owner answers for epoch {rendezvous.epoch} of this buffer: {error}") from None
    except BaseException:
        connection.close()
        raise


def peer_uid(connection: socket.socket) -> int:
    """User id of the process at the other end, as the kernel knows it."""
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
