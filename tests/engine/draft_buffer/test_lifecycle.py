"""What happens when one process is killed, stops, restarts or never comes: one clear error in bounded time.

Nothing is left on the machine. A bound in milliseconds holds for the best of three tries, since the other tries may be
slowed down by other processes.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import ExitStack

import pytest
from buffer_children import (
    CHILDREN,
    NODE,
    child,
    drafts,
    echo,
    eventually,
    num_fds,
    responds_for_another_epoch,
    responds_then_hangs,
    serves_as_target,
    traces_left,
)
from draft_requests import ROWS, open_here

from engine.draft_buffer.layout import PROTOCOL_VERSION
from engine.draft_buffer.target_endpoint import DraftEndpoint, TargetEndpoint, open_draft_buffer
from engine.errors import DraftDown, EngineUnavailable
from engine.ipc.doorbell import Doorbell
from engine.ipc.shared_memory import join


def kill(pid: int, when: list[float]) -> None:
    when.append(time.monotonic())
    os.kill(pid, signal.SIGKILL)


def test_a_killed_draft_is_noticed_within_100_ms(target: TargetEndpoint) -> None:
    late = []
    for epoch in (4, 5, 6):
        endpoint = target.renew(epoch=epoch)
        with child(responds_then_hangs, endpoint.handle(), 1) as draft:
            endpoint.wait_open(20)
            endpoint.ask(ROWS, deadline_s=5)
            killed: list[float] = []
            killer = threading.Timer(0.05, kill, (draft.pid, killed))
            killer.start()
            with pytest.raises(DraftDown, match=f"draft of epoch {epoch} is dead"):
                endpoint.ask(ROWS, deadline_s=30)
            late.append(time.monotonic() - killed[0])
            killer.join()
        assert not endpoint.alive
        with pytest.raises(DraftDown):
            endpoint.ask(ROWS, deadline_s=30)
        endpoint.close()
    assert min(late) < 0.1, late


def test_a_draft_killed_between_steps_is_noticed_without_a_request(target: TargetEndpoint) -> None:
    with child(drafts, target.handle()) as draft:
        assert not target.alive
        target.wait_open(20)
        assert target.alive
        os.kill(draft.pid, signal.SIGKILL)
        assert eventually(lambda: not target.alive, 5)


def test_a_stopped_draft_is_dropped_at_the_deadline(target: TargetEndpoint) -> None:
    late = []
    for epoch in (4, 5, 6):
        endpoint = target.renew(epoch=epoch)
        with child(drafts, endpoint.handle()) as draft:
            endpoint.wait_open(20)
            endpoint.ask(ROWS, deadline_s=5)
            os.kill(draft.pid, signal.SIGSTOP)
            start = time.monotonic()
            with pytest.raises(
                DraftDown, match=r"has not responded within 0.1 s; its last heartbeat is \d+\.\d+ s old"
            ):
                endpoint.ask(ROWS, deadline_s=0.1)
            late.append(time.monotonic() - start - 0.1)
        endpoint.close()
    assert min(late) >= 0
    assert min(late) < 0.05, late


def test_a_new_epoch_works_after_a_death(target: TargetEndpoint) -> None:
    endpoint = target.renew(epoch=10)
    fds = []
    for epoch in range(11, 17):
        with child(drafts, endpoint.handle()) as draft:
            endpoint.wait_open(20)
            assert endpoint.ask(ROWS, deadline_s=5).epoch == endpoint.epoch
            os.kill(draft.pid, signal.SIGKILL)
            draft.join()
            with pytest.raises(DraftDown, match=f"draft of epoch {endpoint.epoch} is dead"):
                endpoint.ask(ROWS, deadline_s=5)
        endpoint = endpoint.renew(epoch=epoch)
        fds.append(num_fds(os.getpid()))
    assert max(fds) == fds[0], fds
    endpoint.close()


def test_a_response_of_another_epoch_is_refused(target: TargetEndpoint) -> None:
    with child(responds_for_another_epoch, target.handle()):
        target.wait_open(20)
        with pytest.raises(DraftDown, match="response epoch is 2, expected 3"):
            target.ask(ROWS, deadline_s=5)


def test_a_handle_of_an_old_epoch_opens_nothing(target: TargetEndpoint) -> None:
    old = target.handle()
    new = target.renew(epoch=4)
    with pytest.raises(EngineUnavailable, match="epoch 3"):
        open_draft_buffer(old, node_id=NODE, gpu_uuid=None)
    new.close()


def test_a_draft_that_never_opens_is_an_error_with_a_deadline(target: TargetEndpoint) -> None:
    start = time.monotonic()
    with pytest.raises(DraftDown, match=r"has not connected within 0\.05 s"):
        target.wait_open(0.05)
    assert time.monotonic() - start < 0.5
    assert not target.is_open


def test_a_request_before_the_draft_has_opened_is_an_error(target: TargetEndpoint) -> None:
    with pytest.raises(DraftDown, match="has not opened"):
        target.ask(ROWS, deadline_s=1)


class MuteDoorbell(Doorbell):
    """A doorbell whose own rings are all lost."""

    def ring(self) -> None:
        pass


def test_a_lost_ring_loses_no_step(target: TargetEndpoint) -> None:
    handle = target.handle()
    memory, connection = join(handle.rendezvous, version=PROTOCOL_VERSION, timeout_s=5)
    draft = DraftEndpoint(handle, memory, MuteDoorbell(connection))

    def serve() -> None:
        for _ in range(5):
            request = draft.wait(5)
            assert request is not None
            time.sleep(0.002)
            draft.respond(echo(request), draft_s=0.0)

    thread = threading.Thread(target=serve)
    thread.start()
    target.wait_open(5)
    start = time.monotonic()
    for _ in range(5):
        target.ask(ROWS, deadline_s=5)
    assert time.monotonic() - start < 4
    thread.join()
    draft.close()


def test_a_draft_waits_without_requests_and_then_learns_that_its_target_is_gone(target: TargetEndpoint) -> None:
    draft = open_here(target)
    target.wait_open(5)
    assert draft.wait(0.01) is None
    target.close()
    with pytest.raises(EngineUnavailable, match="target is gone"):
        draft.wait(5)
    draft.close()
    draft.close()


def test_a_draft_ends_by_itself_when_its_target_is_killed() -> None:
    ours, theirs = CHILDREN.Pipe()
    with child(serves_as_target, theirs) as killed, child(drafts, ours.recv()) as draft:
        assert ours.recv() == "running"
        os.kill(killed.pid, signal.SIGKILL)
        draft.join(10)
        assert draft.exitcode == 0
    ours.close()
    theirs.close()


def test_nothing_is_left_when_both_are_killed() -> None:
    before = traces_left()
    for kill_early in (True, False):
        ours, theirs = CHILDREN.Pipe()
        with ExitStack() as stack:
            target = stack.enter_context(child(serves_as_target, theirs))
            handle = ours.recv()
            sides = [target.pid]
            if not kill_early:
                sides.append(stack.enter_context(child(drafts, handle)).pid)
                assert ours.recv() == "running"
            for pid in sides:
                os.kill(pid, signal.SIGKILL)
        ours.close()
        theirs.close()
        assert eventually(lambda: set(traces_left()) <= set(before), 10)
