"""Drafts through the draft buffer between two processes: values, latency, memory over many steps, and a killed draft.

Over CUDA IPC on a GPU, over shared host memory in a dry run.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import statistics
import time
from typing import Any

import psutil
import torch

from bench.gpu.lab import CheckFailed, Lab
from engine.draft.messages import DraftRequestRow, DraftResponseRow
from engine.draft_buffer.layout import BufferSpec
from engine.draft_buffer.target_endpoint import (
    BufferHandle,
    TargetEndpoint,
    create_draft_buffer,
    gpu_uuid,
    open_draft_buffer,
)
from engine.errors import DraftDown, EngineUnavailable
from engine.sampling.row_sampling import RowSampling

NODE = "bench"
SPEC = BufferSpec(max_rows=32, max_k=5, max_request_tokens=64, max_released=8, draft_vocab=32_000)
ROWS = [DraftRequestRow(key, 0, (1,), 5, RowSampling(1.0, 1.0, 0, 0, False)) for key in range(32)]
MAX_GROWTH = 16 << 20


def handoff(lab: Lab) -> dict[str, Any]:
    """Latency, and the three checks."""
    endpoint = create_draft_buffer(SPEC, device=lab.device, node_id=NODE, epoch=1)
    process = _start(endpoint)
    seconds: list[float] = []
    wrong = torch.zeros((), dtype=torch.int64, device=lab.device)
    num_steps = lab.pick(10_000, 60)
    used = 0
    for step in range(1, num_steps + 1):
        begin = time.perf_counter()
        response = endpoint.ask(ROWS, deadline_s=30.0)
        seconds.append(time.perf_counter() - begin)
        if lab.device.type == "cuda":
            wrong += (endpoint.drafted(len(ROWS)).token_ids != step % 1000).sum()
        else:
            wrong += sum(row.token_ids != (step % 1000,) * 5 for row in response.rows)
        wrong += (endpoint.probs[:, :, step % 1000] != step).sum()
        if step == num_steps // 10:
            used = _used_bytes(lab)
        if lab.left_s < -30:
            break
    growth = _used_bytes(lab) - used
    if int(wrong):
        raise CheckFailed(f"{int(wrong)} values of drafts are not those that the draft wrote")
    if growth > MAX_GROWTH:
        raise CheckFailed(f"{growth} bytes more in use after {len(seconds)} steps")
    restart_s = _kill_and_renew(endpoint, process)
    return {
        "steps": len(seconds),
        "round_trip_p50_s": statistics.median(seconds),
        "round_trip_p99_s": sorted(seconds)[int(0.99 * len(seconds))],
        "growth_bytes": growth,
        "restart_s": restart_s,
    }


def _kill_and_renew(endpoint: TargetEndpoint, process: Any) -> float:
    """Seconds from a killed draft to the first response of the next one, over the same memory."""
    address = endpoint.probs.data_ptr()
    os.kill(process.pid, signal.SIGKILL)
    process.join(30.0)
    begin = time.perf_counter()
    with contextlib.suppress(DraftDown):
        endpoint.ask(ROWS, deadline_s=30.0)
        raise CheckFailed("a killed draft responded")
    endpoint.close()
    renewed = endpoint.renew(epoch=2)
    if renewed.handle().transport == "cuda_ipc" and renewed.probs.data_ptr() != address:
        raise CheckFailed("a new draft got other memory")
    process = _start(renewed)
    renewed.ask(ROWS, deadline_s=60.0)
    seconds = time.perf_counter() - begin
    renewed.close()
    process.join(30.0)
    process.kill()
    return seconds


def _start(endpoint: TargetEndpoint) -> Any:
    process = multiprocessing.get_context("spawn").Process(target=_drafts, args=(endpoint.handle(),), daemon=True)
    process.start()
    endpoint.wait_open(120.0)
    return process


def _used_bytes(lab: Lab) -> int:
    if lab.device.type != "cuda":
        info = psutil.Process().memory_info()
        return int(info.rss - info.shared)
    free, total = torch.cuda.mem_get_info(lab.device)
    return int(total - free)


def _drafts(handle: BufferHandle) -> None:
    """A draft that writes the number of its request everywhere."""
    device = torch.device("cuda" if handle.cuda is not None else "cpu")
    endpoint = open_draft_buffer(handle, node_id=NODE, gpu_uuid=gpu_uuid(device))
    with contextlib.suppress(EngineUnavailable):
        while True:
            request = endpoint.wait(1.0)
            if request is None:
                continue
            token = request.seq % 1000
            endpoint.views.token_ids.fill_(token)
            endpoint.views.probs[:, :, token] = request.seq
            endpoint.read([endpoint.views.token_ids])
            told = () if endpoint.on_device else (token,) * 5
            drafted = DraftResponseRow(told, (), True, num_on_device=5 if endpoint.on_device else 0)
            endpoint.respond([drafted] * len(request.rows), draft_s=0.0)
    endpoint.close()
