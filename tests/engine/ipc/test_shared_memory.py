"""The rendezvous: each expected peer gets the memory once, and nobody else gets it."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator

import pytest

from engine.errors import ConfigError
from engine.ipc.shared_memory import Host, PeerGone, Rendezvous, SharedMemory, join


@pytest.fixture
def host() -> Iterator[tuple[Host, SharedMemory]]:
    memory = SharedMemory.create(4096)
    host = Host(memory, version=3, epoch=5, num_peers=2)
    yield host, memory
    host.close()
    memory.close()


@contextlib.contextmanager
def joined(rendezvous: Rendezvous) -> Iterator[SharedMemory]:
    """The memory of a peer that stays connected during the block."""
    memory, connection = join(rendezvous, version=3, timeout_s=5)
    with contextlib.closing(memory), connection:
        yield memory


def test_both_processes_map_the_same_memory(host: tuple[Host, SharedMemory]) -> None:
    for peer in (1, 0):
        with joined(host[0].rendezvous(peer)) as memory:
            memory.buffer[peer] = 40 + peer
    assert host[0].wait(5)
    assert host[1].buffer[:2] == bytes([40, 41])


def test_a_peer_that_has_joined_is_never_seen_as_missing() -> None:
    """The host registers the peer before anybody can ask for it, however slow its thread is."""
    with contextlib.closing(SharedMemory.create(4096)) as memory:
        for _ in range(50):
            host = Host(memory, version=3, epoch=5, num_peers=2)
            with contextlib.closing(host), joined(host.rendezvous(1)):
                assert host.missing() == (0,)
                assert host.socket_of(1).fileno() >= 0


def test_an_intruder_does_not_keep_the_peer_out(host: tuple[Host, SharedMemory]) -> None:
    with socket.socket(socket.AF_UNIX) as intruder:
        intruder.connect("\0" + host[0].rendezvous(0).name)
        intruder.sendall(b"\xff" * 64)
        with joined(host[0].rendezvous(0)):
            assert host[0].missing() == (1,)


def test_each_peer_is_accepted_once(host: tuple[Host, SharedMemory]) -> None:
    with joined(host[0].rendezvous(0)), pytest.raises(PeerGone, match="refused peer 0 of epoch 5"):
        join(host[0].rendezvous(0), version=3, timeout_s=5)


@pytest.mark.parametrize("peer", [-1, 2])
def test_a_peer_just_out_of_range_is_refused(host: tuple[Host, SharedMemory], peer: int) -> None:
    with pytest.raises(PeerGone, match=f"refused peer {peer} of epoch 5"):
        join(host[0].rendezvous(peer), version=3, timeout_s=5)


def test_another_version_is_refused(host: tuple[Host, SharedMemory]) -> None:
    with pytest.raises(ConfigError, match="version: 3 given, this process has 4"):
        join(host[0].rendezvous(0), version=4, timeout_s=5)


def test_a_closed_host_accepts_nobody(host: tuple[Host, SharedMemory]) -> None:
    rendezvous = host[0].rendezvous(0)
    start = time.monotonic()
    host[0].close()
    assert time.monotonic() - start < 1
    with pytest.raises(PeerGone, match="epoch 5"):
        join(rendezvous, version=3, timeout_s=5)


def test_mapped_memory_cannot_be_shrunk(host: tuple[Host, SharedMemory]) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(host[1].fd, 0)


def test_memory_of_the_wrong_size_or_without_seals_is_refused() -> None:
    with contextlib.closing(SharedMemory.create(4096)) as small:
        with pytest.raises(ConfigError, match="4096 bytes given"):
            SharedMemory.adopt(os.dup(small.fd), 4097)
        SharedMemory.adopt(os.dup(small.fd), 4096).close()
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, 4096)
    with pytest.raises(ConfigError, match="sealed"):
        SharedMemory.adopt(unsealed, 4096)


def memory_files() -> set[str]:
    """Descriptors of shared memory that this process has open."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            if "memfd:paceline" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(name)
    return found


def test_closed_memory_gives_its_descriptor_back_and_views_stay_valid() -> None:
    memory = SharedMemory.create(4096)
    view = memoryview(memory.buffer)
    opened = memory_files()
    memory.close()
    memory.close()
    assert len(opened - memory_files()) == 1, "the mapping may have one of its own"
    view[0] = 7
    assert view[0] == 7


def test_memory_that_the_system_refuses_leaves_no_descriptor() -> None:
    before = memory_files()
    with pytest.raises((OSError, ValueError)):
        SharedMemory.create(1 << 62)
    assert memory_files() <= before
