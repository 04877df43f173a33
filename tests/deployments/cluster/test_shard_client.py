"""Replica and shard 0 over a real unix socket: every request gets its deltas and its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.cluster.shard_client import ShardClient
from engine.errors import EngineError, EngineUnavailable, InvalidRequest
from engine.ipc.replica_socket import ShardSocket
from engine.ipc.wire import (
    HEADER,
    AbortCommand,
    DraftStatus,
    EngineFailed,
    StepDeltas,
    SubmitCommand,
    decode_command,
    decode_event,
    encode_frame,
    frame_len,
)
from engine.messages import Delta, ErrorKind, SamplingParams, Submit


class Echo:
    """A shard that emits a request's prompt, one token per step. With `holds` it never finishes a request."""

    def __init__(self) -> None:
        self.aborted: list[str] = []
        self.abandoned = 0
        self.holds = False
        self.socket = ShardSocket(submit=self._submit, abort=self.aborted.append, abandon=self._abandon)

    def _submit(self, submit: Submit) -> None:
        last = len(submit.prompt) - 1
        for index, token in enumerate(submit.prompt):
            reason = "stop" if index == last and not self.holds else None
            self.socket.send(
                StepDeltas((Delta(request_id=submit.request_id, token_ids=(token,), finish_reason=reason),))
            )

    def _abandon(self) -> None:
        self.abandoned += 1


def submit(name: str, *prompt: int) -> Submit:
    return Submit(request_id=name, prompt=prompt, sampling=SamplingParams())


@contextlib.asynccontextmanager
async def connected(echo: Echo) -> AsyncIterator[tuple[ShardClient, list[DraftStatus]]]:
    heard: list[DraftStatus] = []
    client = await ShardClient.connect(echo.socket.path, on_draft=heard.append)
    try:
        yield client, heard
    finally:
        await client.close()
        echo.socket.close()


async def tokens(client: ShardClient, request: Submit) -> list[int]:
    return [token async for delta in client.generate(request) for token in delta.token_ids]


def test_each_request_hears_its_own_tokens() -> None:
    async def run() -> None:
        async with connected(Echo()) as (client, _):
            got = await asyncio.gather(*(tokens(client, submit(f"r{i}", i, i + 1, i + 2)) for i in range(8)))
            assert got == [[i, i + 1, i + 2] for i in range(8)]
            assert client.num_requests == 0

    asyncio.run(run())


def test_leaving_early_aborts_and_a_finished_request_does_not() -> None:
    async def run() -> None:
        echo = Echo()
        async with connected(echo) as (client, _):
            await tokens(client, submit("whole", 1, 2))
            echo.holds = True
            stream = client.generate(submit("early", 1, 2, 3))
            await anext(stream)
            await stream.aclose()
            while not echo.aborted:
                await asyncio.sleep(0.01)
            assert echo.aborted == ["early"]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("kind", "field", "raised"),
    [("invalid_request", "grammar", InvalidRequest), ("internal", None, EngineError), (None, None, EngineError)],
)
def test_an_error_delta_is_raised_by_its_kind(
    kind: ErrorKind | None, field: str | None, raised: type[Exception]
) -> None:
    async def run() -> None:
        echo = Echo()
        echo.holds = True
        async with connected(echo) as (client, _):
            stream = client.generate(submit("r", 1))
            await anext(stream)
            refusal = Delta(
                request_id="r", token_ids=(), finish_reason="error", error="no", error_kind=kind, error_field=field
            )
            echo.socket.send(StepDeltas((refusal,)))
            with pytest.raises(raised, match=r"^no$") as caught:
                await anext(stream)
            assert type(caught.value) is raised
            assert getattr(caught.value, "field", None) == field
            assert (client.num_requests, echo.aborted) == (0, [])

    asyncio.run(run())


def test_an_abort_by_a_stopping_engine_ends_with_the_engine_s_reason() -> None:
    async def run() -> None:
        echo = Echo()
        echo.holds = True
        async with connected(echo) as (client, _):
            stream = client.generate(submit("r", 1))
            await anext(stream)
            echo.socket.send(StepDeltas((Delta(request_id="r", token_ids=(), finish_reason="abort"),)))
            echo.socket.send(EngineFailed("rank 1 is gone"))
            with pytest.raises(EngineUnavailable, match="rank 1 is gone"):
                await anext(stream)

    asyncio.run(run())


def test_a_replica_that_reads_late_holds_nobody_up_and_misses_nothing() -> None:
    """The first events fit into the kernel's buffer, one fits in part, the others are queued."""
    echo, connection = Echo(), socket.socket(socket.AF_UNIX)
    with connection:
        connection.connect(echo.socket.path)
        connection.sendall(encode_frame(SubmitCommand(submit("hello", 1))))
        stream = connection.makefile("rb")
        event = decode_event(stream.read(frame_len(stream.read(HEADER.size))))
        assert isinstance(event, StepDeltas)
        sent = [StepDeltas((Delta(request_id=str(i), token_ids=tuple(range(i % 977))),)) for i in range(3000)]
        assert sum(len(encode_frame(event)) for event in sent) > 2 << 20, "no buffer is that large"
        for step in sent:
            echo.socket.send(step)
        for step in sent:
            assert decode_event(stream.read(frame_len(stream.read(HEADER.size)))) == step
        stream.close()
    echo.socket.close()


def test_a_failed_engine_ends_every_request_and_refuses_new_ones() -> None:
    async def run() -> None:
        echo = Echo()
        echo.holds = True
        async with connected(echo) as (client, heard):
            waiting = [asyncio.create_task(tokens(client, submit(f"r{i}", 1))) for i in range(3)]
            await asyncio.sleep(0.1)
            echo.socket.send(DraftStatus(up=False, reason="killed"))
            echo.socket.send(EngineFailed("out of order"))
            for task in waiting:
                with pytest.raises(EngineUnavailable, match="out of order"):
                    await asyncio.wait_for(task, 5)
            with pytest.raises(EngineUnavailable):
                await anext(client.generate(submit("late", 1)))
            assert [status.reason for status in heard] == ["killed"]

    asyncio.run(run())


def test_a_replica_that_goes_away_takes_its_requests_with_it_and_leaves_no_file() -> None:
    async def run() -> None:
        echo = Echo()
        assert os.stat(echo.socket.path).st_mode & 0o777 == 0o600
        async with connected(echo):
            await asyncio.sleep(0.1)
            assert not os.path.exists(os.path.dirname(echo.socket.path))
        while not echo.abandoned:
            await asyncio.sleep(0.01)

    asyncio.run(run())


@settings(max_examples=60, deadline=None)
@given(garbage=st.binary(min_size=1, max_size=200))
def test_garbage_ends_the_connection_and_nothing_else(garbage: bytes) -> None:
    echo = Echo()
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(echo.socket.path)
        peer.sendall(garbage)
        peer.shutdown(socket.SHUT_WR)
        peer.settimeout(5)
        while peer.recv(4096):
            pass
    echo.socket.close()


@settings(max_examples=300, deadline=None)
@given(payload=st.binary(max_size=100))
def test_only_declared_messages_decode(payload: bytes) -> None:
    for decode, kinds in (
        (decode_command, (SubmitCommand, AbortCommand)),
        (decode_event, (StepDeltas, DraftStatus, EngineFailed)),
    ):
        with contextlib.suppress(EngineError):
            assert isinstance(decode(payload), kinds)


def test_a_frame_of_unbelievable_length_is_refused() -> None:
    with pytest.raises(EngineError, match="bytes"):
        frame_len(HEADER.pack(2**32 - 1))
    assert decode_command(encode_frame(SubmitCommand(submit("r", 1, 2)))[HEADER.size :]).submit.prompt == (1, 2)  # type: ignore[union-attr]
