"""The draft buffer over CUDA IPC, between two real processes on one GPU. The protocol itself is tested on the CPU."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.draft.messages import DraftRequestRow, DraftResponseRow
from engine.draft_buffer.layout import BufferSpec
from engine.draft_buffer.target_endpoint import (
    BufferHandle,
    TargetEndpoint,
    create_draft_buffer,
    gpu_uuid,
    open_draft_buffer,
)
from engine.errors import ConfigError, DraftDown, EngineUnavailable
from engine.sampling.row_sampling import RowSampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

NODE = "node-a"
SPEC = BufferSpec(max_rows=8, max_k=4, max_request_tokens=64, max_released=8, draft_vocab=32_000)
ROWS = [DraftRequestRow(key, 0, (1,), 4, RowSampling(1.0, 1.0, 0, 0, True)) for key in range(8)]
CHILDREN = multiprocessing.get_context("spawn")


def expected_probs(seq: int) -> torch.Tensor:
    """[max_rows, max_k, draft_vocab]: every value tells its step, row, position and column apart."""
    size = SPEC.max_rows * SPEC.max_k * SPEC.draft_vocab
    values = torch.arange(size, device="cuda", dtype=torch.float32) + seq
    return values.view(SPEC.max_rows, SPEC.max_k, SPEC.draft_vocab)


def drafts(handle: BufferHandle) -> None:
    """Writes the probabilities late in a busy stream, so that a missing wait shows."""
    device = torch.device("cuda", 0)
    end = open_draft_buffer(handle, node_id=NODE, gpu_uuid=gpu_uuid(device))
    busy = torch.randn(2048, 2048, device=device)
    try:
        while True:
            order = end.wait(5.0)
            if order is None:
                continue
            for _ in range(10):
                busy = (busy @ busy).clamp(-1, 1)
            end.probs.copy_(expected_probs(order.seq))
            end.views.token_ids.fill_(order.seq)
            end.read([end.views.token_ids])
            end.respond([DraftResponseRow((), (), True, num_on_device=row.k) for row in order.rows], draft_s=0.0)
    except EngineUnavailable:
        end.close()


@pytest.fixture
def target() -> Iterator[TargetEndpoint]:
    end = create_draft_buffer(SPEC, device="cuda", node_id=NODE, epoch=1)
    yield end
    end.close()


def start(target: TargetEndpoint) -> Any:
    process = CHILDREN.Process(target=drafts, args=(target.handle(),), daemon=True)
    process.start()
    target.wait_open(60)
    return process


def test_probabilities_of_each_step_are_read_without_a_copy_and_in_order(target: TargetEndpoint) -> None:
    process = start(target)
    address = target.probs.data_ptr()
    wrong = torch.zeros((), device="cuda", dtype=torch.int64)
    for seq in range(1, 201):
        target.ask(ROWS, deadline_s=30)
        # Queued, not synchronised: the next draft request must not let the draft overwrite what this still reads.
        wrong += (target.probs != expected_probs(seq)).sum()
        wrong += (target.drafted(8).token_ids != seq).sum()
    assert wrong.item() == 0
    assert target.probs.data_ptr() == address
    target.close()
    process.join(30)
    assert process.exitcode == 0


def test_ten_thousand_steps_hold_no_more_memory(target: TargetEndpoint) -> None:
    process = start(target)
    for _ in range(500):
        target.ask(ROWS[:1], deadline_s=30)
    free = torch.cuda.mem_get_info()[0]
    for _ in range(9500):
        target.ask(ROWS[:1], deadline_s=30)
    assert free - torch.cuda.mem_get_info()[0] < 1 << 20
    process.kill()
    process.join(30)


def test_restarts_after_a_kill_use_the_same_memory() -> None:
    end = create_draft_buffer(SPEC, device="cuda", node_id=NODE, epoch=1)
    reserved = torch.cuda.memory_reserved()
    address = end.probs.data_ptr()
    for epoch in (2, 3):
        process = start(end)
        end.ask(ROWS, deadline_s=30)
        os.kill(process.pid, signal.SIGKILL)
        process.join(30)
        with pytest.raises(DraftDown):
            end.ask(ROWS, deadline_s=30)
        end.close()  # As the drafter does when it loses the draft.
        end = end.renew(epoch=epoch)
        assert end.probs.data_ptr() == address
        assert torch.cuda.memory_reserved() == reserved
    end.close()


def test_expandable_segments_are_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(ConfigError, match="expandable_segments"):
        create_draft_buffer(SPEC, device="cuda", node_id=NODE, epoch=1)


def test_another_gpu_is_refused(target: TargetEndpoint) -> None:
    with pytest.raises(ConfigError, match="place the draft on the GPU of target shard 0"):
        open_draft_buffer(target.handle(), node_id=NODE, gpu_uuid="GPU-of-another-machine")
