"""Code of the child processes in the tests of the draft buffer and the forward ring, and how they are started.

Child processes are forked from a fork server that has imported torch, so each one starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.core.step import ForwardInput
from engine.draft.messages import DraftRequest, DraftResponseRow
from engine.draft_buffer.layout import BufferSpec
from engine.draft_buffer.target_endpoint import BufferHandle, DraftEndpoint, create_draft_buffer, open_draft_buffer
from engine.errors import EngineUnavailable
from engine.ipc.forward_broadcast import ForwardHandle, ForwardReceiver, ForwardRingSpec, ForwardSender

NODE = "node-a"
SPEC = BufferSpec(
    max_rows=4, max_k=5, max_request_tokens=64, max_released=8, draft_vocab=300, target_vocab=1000, max_options=2048
)
CHILDREN = multiprocessing.get_context("forkserver")
CHILDREN.set_forkserver_preload(["torch", "engine.draft_buffer.target_endpoint", "engine.ipc.forward_broadcast"])


@contextlib.contextmanager
def child(target: Any, *args: Any) -> Iterator[Any]:
    """A child process that is killed at the end of the block."""
    process = CHILDREN.Process(target=target, args=args, daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join(10)
        process.close()


def echo(request: DraftRequest) -> list[DraftResponseRow]:
    """Draft tokens that count up from the row's key."""
    return [
        DraftResponseRow(tuple((row.key + i) % 1000 for i in range(row.k)), (0.5,) * row.k, has_probs=True)
        for row in request.rows
    ]


def drafts(handle: BufferHandle, compute: Callable[[DraftEndpoint, DraftRequest], None] | None = None) -> None:
    """A healthy draft: calls `compute` and responds, until its target is gone."""
    endpoint = open_draft_buffer(handle, node_id=NODE, gpu_uuid=None)
    with contextlib.suppress(EngineUnavailable):
        while True:
            request = endpoint.wait(1.0)
            if request is not None:
                if compute is not None:
                    compute(endpoint, request)
                endpoint.respond(echo(request), draft_s=0.0)
    endpoint.close()


def responds_then_hangs(handle: BufferHandle, num_steps: int) -> None:
    """A draft that responds `num_steps` times, then hangs."""
    endpoint = open_draft_buffer(handle, node_id=NODE, gpu_uuid=None)
    for _ in range(num_steps):
        request = endpoint.wait(10.0)
        endpoint.respond(echo(request), draft_s=0.0)
    time.sleep(60)


def random_bits(seed: int) -> torch.Tensor:
    """[max_rows, max_k, draft_vocab] int32: random bit patterns, NaN and denormals included."""
    generator = torch.Generator().manual_seed(seed)
    shape = (SPEC.max_rows, SPEC.max_k, SPEC.draft_vocab)
    return torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64).to(torch.int32)


def writes_random_probs(handle: BufferHandle) -> None:
    """A draft that fills the probabilities with random bits, seeded by the request's sequence number."""
    drafts(handle, lambda endpoint, request: endpoint.probs.view(torch.int32).copy_(random_bits(request.seq)))


def responds_for_another_epoch(handle: BufferHandle) -> None:
    """A draft that writes an older epoch into an otherwise correct response."""
    endpoint = open_draft_buffer(handle, node_id=NODE, gpu_uuid=None)
    request = endpoint.wait(10.0)
    endpoint._block.epoch = handle.epoch - 1
    endpoint.respond(echo(request), draft_s=0.0)
    time.sleep(60)


def serves_as_target(pipe: Connection) -> None:
    """A target that sends requests forever. Sends its handle through the pipe first, then "running"."""
    endpoint = create_draft_buffer(SPEC, device="cpu", node_id=NODE, epoch=1)
    pipe.send(endpoint.handle())
    endpoint.wait_open(20.0)
    pipe.send("running")
    while True:
        endpoint.ask((), deadline_s=10.0)


def random_forward_input(step_id: int, spec: ForwardRingSpec) -> ForwardInput:
    """A random forward input within the capacities, seeded by the step id."""
    rng = np.random.default_rng(step_id)
    num_rows, num_logits = rng.integers(0, spec.max_rows + 1, 2)
    num_spans = rng.integers(0, spec.max_spans + 1)
    width = rng.integers(0, spec.max_blocks_per_span + 1)

    def some(*shape: int) -> np.ndarray:
        return rng.integers(-(2**31), 2**31, shape).astype(np.int32)

    return ForwardInput(
        some(num_rows),
        some(num_rows),
        some(num_rows),
        some(num_spans),
        some(num_spans),
        some(num_spans, width),
        some(num_logits),
        tokens_from_rank_0=bool(rng.integers(2)),
        adapters=rng.integers(1, 2**31, num_spans).astype(np.int32) if num_spans and rng.integers(2) else None,
    )


def forward_inputs_equal(one: ForwardInput, other: ForwardInput) -> bool:
    names = [name for name in ForwardInput.__slots__ if name != "tree"]
    trees = [() if part.tree is None else (part.tree.num_slots, part.tree.ancestors) for part in (one, other)]
    return (
        all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)
        and len(trees[0]) == len(trees[1])
        and all(np.array_equal(mine, theirs) for mine, theirs in zip(*trees, strict=True))
        and one.block_tables.shape == other.block_tables.shape
    )


def checks_forward_inputs(handle: ForwardHandle, pipe: Connection, pause_s: float) -> None:
    """A shard that compares every forward input with the expected one, and sends how many it received."""
    receiver = ForwardReceiver.open(handle, node_id=NODE)
    num_seen = 0
    while not receiver.closed:
        message = receiver.receive(1.0)
        if message is not None:
            step_id, forward_input = message
            if not forward_inputs_equal(forward_input, random_forward_input(step_id, handle.spec)):
                pipe.send(f"step {step_id} differs")
            num_seen += 1
            time.sleep(pause_s)
    pipe.send(num_seen)


def receives_nothing(handle: ForwardHandle) -> None:
    """A shard that opens the ring and hangs."""
    receiver = ForwardReceiver.open(handle, node_id=NODE)
    time.sleep(60)
    receiver.close()


def sends_two_steps(spec: ForwardRingSpec, pipe: Connection) -> None:
    """Rank 0: sends two steps, then hangs."""
    sender = ForwardSender(spec, num_receivers=1, node_id=NODE)
    pipe.send(sender.handle(1))
    sender.wait_open(20.0)
    for step_id in (7, 8):
        sender.send(step_id, random_forward_input(step_id, spec), deadline_s=1.0)
    time.sleep(60)


def num_fds(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def resident_bytes(pid: int) -> int:
    """Resident memory without shared mappings, which grow when their pages are first used."""
    pages = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")


def traces_left() -> list[str]:
    """Names of listening sockets and of files in /dev/shm that belong to Paceline."""
    sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines() if "@paceline-" in line]
    listening = [fields[-1] for fields in sockets if fields[3] == "00010000"]
    return listening + [name for name in os.listdir("/dev/shm") if "paceline" in name]


def eventually(condition: Any, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


if sys.platform != "linux":
    raise RuntimeError("these tests read /proc")
