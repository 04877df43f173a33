"""The doorbell: the word in memory decides, the byte only wakes, and a dead peer is noticed at once."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from engine.ipc.doorbell import Doorbell
from engine.ipc.shared_memory import PeerGone


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
    ringer = threading.Thread(target=lambda: [theirs.ring() for _ in range(20_000)], daemon=True)
    ringer.start()
    ringer.join(60)
    assert not ringer.is_alive()
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


def test_a_word_written_before_death_still_counts(pair: tuple[Doorbell, Doorbell]) -> None:
    ours, theirs = pair
    word: list[int] = []
    thread = later(0.02, lambda: word.append(1), theirs.close)
    assert ours.wait(lambda: bool(word), timeout_s=5)
    thread.join()


def test_a_zero_timeout_checks_once(pair: tuple[Doorbell, Doorbell]) -> None:
    ours, _ = pair
    assert not ours.wait(lambda: False, timeout_s=0)
    assert not ours.wait(lambda: False, timeout_s=-1)
    assert ours.wait(lambda: True, timeout_s=-1)


def test_errors_of_the_predicate_pass_through(pair: tuple[Doorbell, Doorbell]) -> None:
    with pytest.raises(ZeroDivisionError):
        pair[0].wait(lambda: 1 // 0 == 0, timeout_s=1)
