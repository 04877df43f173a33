"""The socket of rank 0: commands reach the engine, a slow replica blocks nobody, a dead one abandons its requests."""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Iterator

import pytest
from buffer_children import eventually

from engine.ipc.replica_socket import ShardSocket
from engine.ipc.wire import (
    HEADER,
    AbortCommand,
    DraftStatus,
    Event,
    SubmitCommand,
    decode_event,
    encode_frame,
    frame_len,
)
from engine.messages import SamplingParams, Submit

SUBMIT = Submit(request_id="r", prompt=(1, 2), sampling=SamplingParams())


class Served:
    """A socket with the calls it has made."""

    def __init__(self) -> None:
        self.submitted: list[Submit] = []
        self.aborted: list[str] = []
        self.abandoned = threading.Event()
        self.socket = ShardSocket(submit=self.submitted.append, abort=self.aborted.append, abandon=self.abandoned.set)


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.socket.close()


def connect(served: Served) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(10)
        connection.connect(served.socket.path)
    except BaseException:
        connection.close()
        raise
    return connection


def read_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = connection.recv(num_bytes - len(data))
        assert part, "the connection ended early"
        data += part
    return data


def read_event(connection: socket.socket) -> Event:
    return decode_event(read_exactly(connection, frame_len(read_exactly(connection, HEADER.size))))


def test_commands_reach_the_engine_in_order(served: Served) -> None:
    with connect(served) as replica:
        replica.sendall(encode_frame(SubmitCommand(submit=SUBMIT)) + encode_frame(AbortCommand(request_id="r")))
        assert eventually(lambda: served.aborted == ["r"], 10)
        assert served.submitted == [SUBMIT]
        assert not served.abandoned.is_set()
    assert served.abandoned.wait(10)


def test_only_processes_of_the_same_user_can_connect(served: Served) -> None:
    assert stat.S_IMODE(os.stat(served.socket.path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(os.path.dirname(served.socket.path)).st_mode) == 0o700


def test_a_second_replica_is_refused_and_no_file_is_left(served: Served) -> None:
    folder = os.path.dirname(served.socket.path)
    with connect(served):
        assert eventually(lambda: not os.path.exists(folder), 10)
        with pytest.raises(OSError, match="No such file"):
            connect(served).close()


def test_a_replica_that_reads_nothing_never_blocks_the_sender(served: Served) -> None:
    events = [DraftStatus(up=bool(number % 2), reason=str(number) * 10_000) for number in range(200)]
    with connect(served) as replica:
        replica.sendall(encode_frame(AbortCommand(request_id="r")))
        assert eventually(lambda: bool(served.aborted), 10)
        start = time.monotonic()
        for event in events:
            served.socket.send(event)
        assert time.monotonic() - start < 5
        assert [read_event(replica) for _ in events] == events


def test_nonsense_ends_the_connection(served: Served) -> None:
    with connect(served) as replica:
        replica.sendall(HEADER.pack(3) + b"\xc1\xc1\xc1")
        assert served.abandoned.wait(10)
        assert replica.recv(1) == b""


def test_close_ends_both_threads_though_no_replica_has_connected() -> None:
    before = set(threading.enumerate())
    made = Served()
    started = set(threading.enumerate()) - before
    assert len(started) == 2
    made.socket.close()
    assert eventually(lambda: not any(thread.is_alive() for thread in started), 10)
    assert not made.abandoned.is_set()


def test_close_sends_what_is_queued_first(served: Served) -> None:
    event = DraftStatus(up=True, reason="x" * 1_000_000)
    with connect(served) as replica:
        replica.sendall(encode_frame(AbortCommand(request_id="r")))
        assert eventually(lambda: bool(served.aborted), 10)
        served.socket.send(event)
        served.socket.close()
        assert read_event(replica) == event
        assert replica.recv(1) == b""


def test_events_without_a_replica_are_dropped(served: Served) -> None:
    served.socket.send(DraftStatus(up=True, reason="early"))
    time.sleep(0.05)
    with connect(served) as replica:
        replica.sendall(encode_frame(AbortCommand(request_id="r")))
        assert eventually(lambda: bool(served.aborted), 10)
        late = DraftStatus(up=False, reason="late")
        served.socket.send(late)
        assert read_event(replica) == late
