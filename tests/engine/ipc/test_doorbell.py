"""The doorbell and the rendezvous: the word in memory decides, the byte only wakes, and death is noticed at once."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from engine.errors import ConfigError
from engine.ipc.doorbell import Doorbell
from engine.ipc.shared_memory import Host, PeerGone, SharedMemory, join


@pytest.fixture(params=[0.0, 50e-6], ids=["sleep", "spin"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Doorbell, Doorbell]]:
    ours, theirs = socket.socketpair()
    bells = Doorbell(ours, spin_s=request.param), Doorbell(theirs, spin_s=request.param)
    yield bells
    for bell in bells:
        bell.close()


def later(delay_s: float, *actions: object) -> threading.Thread:
    def run() -> None:
        time.sleep(delay_s)
        for action in actions:
            action()  # type: ignore[operator]

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_ring_wakes_the_waiter_long_before_the_next_slice(pair: tuple[Doorbell, Doorbell]) -> None:
    ours, theirs = pair
    word: list[float] = []
    late = []
    for _ in range(5):
        word.clear()
        thread = later(0.005, lambda: word.append(time.monotonic()), theirs.ring)
        assert ours.wait(lambda: bool(word), timeout_s=5)
        late.append(time.monotonic() - word[0])
        thread.join()
    assert min(late) < 0.01


def test_a_lost_byte_costs_one_slice_and_no_step(pair: tuple[Doorbell, Doorbell]) -> None:
    ours, _ = pair
    word: list[float] = []
    thread = later(0.005, lambda: word.append(time.monotonic()))
    assert ours.wait(lambda: bool(word), timeout_s=60)
    assert time.monotonic() - word[0] < 5
    thread.join()


def test_rings_without_a_word_do_not_count(pair: tuple[Doorbell, Doorbell]) -> None:
    ours, theirs = pair
    for _ in range(100):
        theirs.ring()
    start = time.monotonic()
    assert not ours.wait(lambda: False, timeout_s=0.08)
    assert 0.08 <= time.monotonic() - start < 5


def test_unread_rings_never_block_the_ringer(pair: tuple[Doorbell, Doorbell]) -> None:
    ours, theirs = pair
    start = time.monotonic()
    for _ in range(20_000):
        theirs.ring()
    assert time.monotonic() - start < 2
    assert ours.wait(lambda: True, timeout_s=0)
    assert ours.alive


def test_death_ends_a_wait_at_once(pair: tuple[Doorbell, Doorbell]) -> None:
    ours, theirs = pair
    thread = later(0.02, theirs.close)
    start = time.monotonic()
    with pytest.raises(PeerGone):
        ours.wait(lambda: False, timeout_s=5)
    assert time.monotonic() - start < 2.5
    assert not ours.alive
    with pytest.raises(PeerGone):
        ours.ring()
    thread.join()


def test_what_was_announced_before_death_still_counts(pair: tuple[Doorbell, Doorbell]) -> None:
    ours, theirs = pair
    word: list[int] = []
    thread = later(0.02, lambda: word.append(1), theirs.close)
    assert ours.wait(lambda: bool(word), timeout_s=5)
    thread.join()


def test_a_zero_timeout_only_looks(pair: tuple[Doorbell, Doorbell]) -> None:
    ours, _ = pair
    assert not ours.wait(lambda: False, timeout_s=0)
    assert not ours.wait(lambda: False, timeout_s=-1)
    assert ours.wait(lambda: True, timeout_s=-1)


def test_errors_of_the_predicate_pass_through(pair: tuple[Doorbell, Doorbell]) -> None:
    with pytest.raises(ZeroDivisionError):
        pair[0].wait(lambda: 1 // 0 == 0, timeout_s=1)


@pytest.fixture
def host() -> Iterator[tuple[Host, SharedMemory]]:
    memory = SharedMemory.create(4096)
    host = Host(memory, version=3, epoch=5, num_peers=2)
    yield host, memory
    host.close()
    memory.close()


def test_both_sides_map_the_same_memory(host: tuple[Host, SharedMemory]) -> None:
    for peer in (1, 0):
        memory, connection = join(host[0].rendezvous(peer), version=3, timeout_s=5)
        memory.buffer[peer] = 40 + peer
        memory.close()
        connection.close()
    assert host[0].wait(5)
    assert host[1].buffer[:2] == bytes([40, 41])


def test_an_intruder_does_not_keep_the_peer_out(host: tuple[Host, SharedMemory]) -> None:
    with socket.socket(socket.AF_UNIX) as intruder:
        intruder.connect("\0" + host[0].rendezvous(0).name)
        intruder.sendall(b"\xff" * 64)
        memory, connection = join(host[0].rendezvous(0), version=3, timeout_s=5)
        assert host[0].missing() == (1,)
        memory.close()
        connection.close()


def test_a_place_is_given_once(host: tuple[Host, SharedMemory]) -> None:
    memory, connection = join(host[0].rendezvous(0), version=3, timeout_s=5)
    with pytest.raises(PeerGone, match="refused peer 0 of epoch 5"):
        join(host[0].rendezvous(0), version=3, timeout_s=5)
    memory.close()
    connection.close()


def test_another_version_is_refused(host: tuple[Host, SharedMemory]) -> None:
    with pytest.raises(ConfigError, match="version: 3 given, this process speaks 4"):
        join(host[0].rendezvous(0), version=4, timeout_s=5)


def test_a_closed_host_answers_nobody(host: tuple[Host, SharedMemory]) -> None:
    rendezvous = host[0].rendezvous(0)
    start = time.monotonic()
    host[0].close()
    assert time.monotonic() - start < 1
    with pytest.raises(PeerGone, match="epoch 5"):
        join(rendezvous, version=3, timeout_s=5)


def test_memory_cannot_be_shrunk_under_a_peer(host: tuple[Host, SharedMemory]) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(host[1].fd, 0)


def test_memory_of_the_wrong_size_or_without_seals_is_refused() -> None:
    small = SharedMemory.create(4096)
    with pytest.raises(ConfigError, match="4096 bytes given"):
        SharedMemory.adopt(os.dup(small.fd), 8192)
    small.close()
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, 4096)
    with pytest.raises(ConfigError, match="sealed"):
        SharedMemory.adopt(unsealed, 4096)
