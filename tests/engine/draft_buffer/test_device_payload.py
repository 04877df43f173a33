"""The protocol over device memory: tokens cross in it, events order the two streams, the host sees counts.

The device memory is a small fake: one tensor that both ends map, and events that note when they are recorded and waited
for. The endpoints, the control block and the doorbells are the real ones.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from buffer_children import NODE, SPEC
from draft_requests import OPTIONS, ROWS

from engine.draft.messages import DraftRequest, DraftResponse, DraftResponseRow
from engine.draft_buffer.draft_endpoint import DraftEndpoint, open_draft_buffer
from engine.draft_buffer.target_endpoint import TargetEndpoint
from engine.sampling.staging import to_host

DRAFTED = torch.tensor([[5, 6, 7, 8, 9], [1, 2, 3, 0, 0]], dtype=torch.int32)


class FakeDevice:
    """Memory that both ends map, and a log of the events on their streams."""

    def __init__(self) -> None:
        self.memory = torch.zeros(SPEC.payload_bytes, dtype=torch.uint8)
        self.device = torch.device("cpu")
        self.log: list[str] = []
        self.on_record: Callable[[str], None] = lambda event: None

    def record(self, event: str) -> None:
        self.on_record(event)
        self.log.append(f"record {event}")

    def payload(self) -> Any:
        return TargetSide(self)


class TargetSide:
    """As `CudaTargetPayload`."""

    export = object()

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.memory = device.memory

    def publish(self) -> None:
        self._device.record("asked")

    def acquire(self) -> None:
        self._device.log.append("wait responded")


class DraftSide:
    """As `CudaDraftPayload`."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.memory = device.memory

    def publish(self) -> None:
        self._device.record("responded")

    def acquire(self) -> None:
        self._device.log.append("wait asked")

    def read(self, tensors: Sequence[torch.Tensor]) -> Any:
        self.publish()
        self._device.log.append("host reads")
        return to_host(tensors)

    def close(self) -> None:
        self._device.log.append("unmap")


def connected() -> tuple[FakeDevice, TargetEndpoint, DraftEndpoint]:
    device: Any = FakeDevice()
    target = TargetEndpoint(SPEC, block=device, node_id=NODE, epoch=1, spin_s=0.0)
    handle = dataclasses.replace(target.handle(), gpu_uuid="GPU-1")
    draft = open_draft_buffer(handle, node_id=NODE, gpu_uuid="GPU-1", map_cuda=lambda export, uuid: DraftSide(device))
    target.wait_open(5)
    return device, target, draft


def ask(
    target: TargetEndpoint, draft: DraftEndpoint, rows: Any, respond: Callable[[DraftRequest], list[DraftResponseRow]]
) -> DraftResponse:
    def serve() -> None:
        request = draft.wait(5)
        assert request is not None
        draft.respond(respond(request), draft_s=0.0)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        return target.ask(rows, deadline_s=5)
    finally:
        thread.join()


def test_drafts_cross_in_device_memory_and_the_host_sees_their_number() -> None:
    device, target, draft = connected()
    seen: list[list[int]] = []
    device.on_record = lambda event: seen.append(draft.views.new_tokens[:6].tolist())

    def respond(request: DraftRequest) -> list[DraftResponseRow]:
        assert draft.on_device
        assert draft.views.new_tokens[:6].tolist() == [1, 2, 3, 1, 2, 3]
        draft.views.token_ids[:2] = DRAFTED
        draft.views.confidences[:2] = 0.5
        (ids,) = draft.read([draft.views.token_ids[:2]])
        assert ids.tolist() == DRAFTED.tolist()
        return [DraftResponseRow((), (), True, num_on_device=5), DraftResponseRow((), (), num_on_device=3)]

    response = ask(target, draft, ROWS, respond)
    assert [(row.token_ids, row.confidences, row.num_on_device) for row in response.rows] == [((), (), 5), ((), (), 3)]
    assert seen[0] == [1, 2, 3, 1, 2, 3], "the order is in the memory before its event"
    assert device.log == ["record asked", "wait asked", "record responded", "host reads", "wait responded"]
    assert not target._block._arrays.token_ids.any(), "no drafted id is in host memory"
    assert not target._block._arrays.confidences.any()
    drafted = target.drafted(2)
    assert torch.equal(drafted.token_ids, DRAFTED.long())
    assert drafted.confidences.data_ptr() == draft.views.confidences.data_ptr()
    assert drafted.probs.data_ptr() == draft.views.probs.data_ptr()
    draft.close()
    target.close()
    assert device.log[-1] == "unmap"


def test_a_response_that_nothing_was_read_for_is_published_all_the_same() -> None:
    device, target, draft = connected()
    for _ in range(2):
        device.log.clear()
        ask(target, draft, ROWS, lambda request: [DraftResponseRow(reason="catch_up")] * 2)
        assert device.log == ["record asked", "wait asked", "record responded", "wait responded"]
    draft.close()
    target.close()


def test_tokens_of_a_request_with_options_are_on_the_host_as_well() -> None:
    """Its masks and penalties at later positions depend on them, and they are made on the host."""
    _, target, draft = connected()
    rows = [dataclasses.replace(ROWS[0], options=OPTIONS), ROWS[1]]

    def respond(request: DraftRequest) -> list[DraftResponseRow]:
        told = [(5, 6, 7, 8, 9) if row.options is not None else () for row in request.rows]
        return [DraftResponseRow(ids, (), num_on_device=5) for ids in told]

    response = ask(target, draft, rows, respond)
    assert [row.token_ids for row in response.rows] == [(5, 6, 7, 8, 9), ()]
    draft.close()
    target.close()


def test_an_id_outside_the_vocabulary_never_reaches_the_embedding() -> None:
    _, target, draft = connected()
    draft.views.token_ids[0] = torch.tensor([-1, -(2**31), SPEC.vocab, 2**31 - 1, 7], dtype=torch.int32)
    last = SPEC.vocab - 1
    drafted = target.drafted(1).token_ids
    assert drafted.tolist() == [[0, 0, last, last, 7]]
    draft.views.token_ids[0] = 3
    assert drafted.tolist() == [[0, 0, last, last, 7]], "a hung draft that still writes changes nothing"
    draft.close()
    target.close()


@pytest.mark.parametrize("num_on_device", [6, 99])
def test_more_tokens_than_asked_for_are_refused(num_on_device: int) -> None:
    _, target, draft = connected()

    def respond(request: DraftRequest) -> list[DraftResponseRow]:
        with pytest.raises(ValueError, match="allowed are 5"):
            draft.respond([DraftResponseRow(num_on_device=num_on_device)] * 2, draft_s=0.0)
        return [DraftResponseRow()] * 2

    ask(target, draft, ROWS, respond)
    draft.close()
    target.close()


def test_the_target_works_while_the_draft_computes() -> None:
    _, target, draft = connected()
    was_asked, has_worked = threading.Event(), threading.Event()

    def work() -> None:
        assert was_asked.wait(5), "the draft has its request before the target does anything else"
        has_worked.set()

    def respond(request: DraftRequest) -> list[DraftResponseRow]:
        was_asked.set()
        assert has_worked.wait(5), "the target does not wait for the response first"
        return [DraftResponseRow() for _ in request.rows]

    target.meanwhile = work
    assert len(ask(target, draft, ROWS, respond).rows) == len(ROWS)
    draft.close()
    target.close()


def test_a_tree_travels_in_the_message_and_its_distributions_in_device_memory() -> None:
    _, target, draft = connected()
    tree = DraftResponseRow((5, 6, 7), (0.5, 0.25, 0.125), True, parents=(-1, -1, 0))

    def respond(request: DraftRequest) -> list[DraftResponseRow]:
        draft.views.probs[0, 0] = 0.25
        return [tree, DraftResponseRow((1,), (0.75,))]

    response = ask(target, draft, ROWS, respond)
    assert response.rows == (tree, DraftResponseRow((1,), (0.75,)))
    assert (target.probs[0, 0] == 0.25).all()
    draft.close()
    target.close()
