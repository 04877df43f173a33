"""The handle and the payload in host memory: sizes, places, and dtypes."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle

import pytest
import torch
from buffer_children import NODE, SPEC

from engine.draft_buffer.layout import block_bytes
from engine.draft_buffer.payload import HostPayload, Views, host_bytes
from engine.draft_buffer.target_endpoint import TargetEndpoint
from engine.ipc.shared_memory import SharedMemory


def test_the_payload_starts_on_the_page_after_the_control_block() -> None:
    on_gpu, on_host = host_bytes(SPEC, on_gpu=True), host_bytes(SPEC, on_gpu=False)
    assert on_gpu % 4096 == 0
    assert block_bytes(SPEC) <= on_gpu < block_bytes(SPEC) + 4096
    assert on_host - on_gpu == SPEC.payload_bytes


@pytest.mark.parametrize(("itemsize", "dtype"), [(2, torch.bfloat16), (4, torch.float32)])
def test_probabilities_and_features_share_the_payload_without_overlap(itemsize: int, dtype: torch.dtype) -> None:
    spec = dataclasses.replace(SPEC, feature_rows=3, feature_width=5, feature_itemsize=itemsize)
    with contextlib.closing(SharedMemory.create(host_bytes(spec, on_gpu=False))) as memory:
        payload = HostPayload(memory, spec)
        views = Views.of(payload.memory, spec)
        probs, features = views.probs, views.features
        assert features is not None
        assert (probs.shape, probs.dtype) == ((4, 5, 300), torch.float32)
        assert (features.shape, features.dtype) == ((3, 5), dtype)
        probs.fill_(1.5)
        features.fill_(2.5)
        assert (probs == 1.5).all()
        assert (features == 2.5).all()
        assert not any(memory.buffer[: block_bytes(spec)]), "the payload is after the control block"


def test_results_are_read_to_the_host_with_their_values_and_types() -> None:
    tensors = [torch.tensor([[1, 2**31 - 1]]), torch.tensor([0.25, -3.5]), torch.tensor([-7], dtype=torch.int32)]
    with contextlib.closing(SharedMemory.create(host_bytes(SPEC, on_gpu=False))) as memory:
        read = HostPayload(memory, SPEC).read(tensors)
    assert [array.tolist() for array in read] == [[[1, 2**31 - 1]], [0.25, -3.5], [-7]]
    assert [array.dtype.name for array in read] == ["int64", "float32", "int32"]


def test_a_spec_without_features_has_none() -> None:
    assert Views.of(torch.zeros(SPEC.payload_bytes, dtype=torch.uint8), SPEC).features is None


def test_a_handle_says_where_the_buffer_is_and_survives_pickling(target: TargetEndpoint) -> None:
    handle = target.handle()
    assert pickle.loads(pickle.dumps(handle)) == handle
    assert (handle.transport, handle.node_id, handle.gpu_uuid, handle.cuda) == ("shared_memory", NODE, None, None)
    assert (handle.epoch, handle.spec) == (target.epoch, SPEC)
    assert handle.rendezvous.num_bytes == host_bytes(SPEC, on_gpu=False)
