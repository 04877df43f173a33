"""The GPU side of a buffer: one dedicated allocation that two processes map, and the events that order their work.

Owns the allocation, its export and opening through CUDA IPC, the two interprocess events and the refusal of allocator
settings that break IPC. Exported once and opened once per draft process; nothing here runs per step but two event
calls. Knows nothing of orders and answers (`engine.draft_buffer.control_block`).

    target's stream    reads probs | record asked  ......................  wait answered | reads probs
    draft's stream                   wait asked | writes probs | record answered
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing import reductions

from engine.errors import ConfigError

_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_MIN_BYTES = 2 * 1024 * 1024
"""Smallest allocation that does not share a 2 MiB block of the caching allocator with small tensors."""


@dataclass(frozen=True, slots=True)
class CudaExport:
    """What the opener needs; picklable."""

    rebuild: tuple[tuple[str, Any], ...]
    """Arguments of torch's rebuild_cuda_tensor, by name."""
    asked_event: bytes
    answered_event: bytes


def refuse_expandable_segments(environ: Mapping[str, str] = os.environ) -> None:
    """Expandable segments are shared through pidfd_getfd, which unprivileged containers forbid.

    Raises:
        ConfigError: an allocator variable turns them on.
    """
    for variable in _ALLOCATOR_VARIABLES:
        for option in environ.get(variable, "").split(","):
            name, _, value = option.partition(":")
            if name.strip() == "expandable_segments" and value.strip().lower() != "false":
                raise ConfigError(
                    f"{variable}: {environ[variable]!r} given; CUDA IPC does not work with expandable segments: "
                    "remove expandable_segments from it, or set expandable_segments:False"
                )


def gpu_uuid(device: torch.device | str) -> str | None:
    """The GPU's own id, the same in every process whatever its index there; None for the CPU."""
    device = torch.device(device)
    if device.type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(device).uuid)


def device_of(uuid: str) -> torch.device:
    """The device with this UUID, as this process counts them.

    Raises:
        ConfigError: this process does not see it.
    """
    seen = [gpu_uuid(f"cuda:{index}") for index in range(torch.cuda.device_count())]
    if uuid not in seen:
        raise ConfigError(f"GPU UUID: {uuid} given, this process sees {', '.join(map(str, seen)) or 'none'}")
    return torch.device("cuda", seen.index(uuid))


class CudaBlock:
    """A dedicated device allocation of the target, exported once; outlives the draft processes that map it.

    A restarted draft maps the same block again: freeing a block whose peer was killed would leave it in torch's limbo
    of memory that somebody may still read.

    Args:
        num_bytes: bytes wanted; rounded up to 2 MiB.
        device: where.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        refuse_expandable_segments()
        size = -(-num_bytes // _MIN_BYTES) * _MIN_BYTES
        with torch.cuda.device(device):
            # A pool of its own: the segment that IPC exports then holds nothing else of ours.
            self._pool = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(self._pool):
                self.memory = torch.zeros(size, dtype=torch.uint8, device=device)
            torch.cuda.current_stream().synchronize()
            rebuild, arguments = reductions.reduce_tensor(self.memory)  # type: ignore[no-untyped-call]
        self.device = device
        self._rebuild = tuple(zip(inspect.signature(rebuild).parameters, arguments, strict=True))

    def payload(self) -> CudaTargetPayload:
        """The target's side for one epoch, with new events."""
        return CudaTargetPayload(self, self._rebuild)

    def close(self) -> None:
        """Free the memory. Only once every draft process that mapped it has closed it or is dead."""
        reference = dict(self._rebuild)
        # A killed draft has not given back its reference; without this torch would keep the memory for ever.
        torch.UntypedStorage._release_ipc_counter_cuda(reference["ref_counter_handle"], reference["ref_counter_offset"])
        del self.memory, self._pool
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


class CudaTargetPayload:
    """The target's view of a block, in one epoch."""

    def __init__(self, block: CudaBlock, rebuild: tuple[tuple[str, Any], ...]) -> None:
        self.block = block
        self.memory = block.memory
        with torch.cuda.device(block.device):
            self._asked = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
            self._answered = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
            asked: bytes = self._asked.ipc_handle()  # type: ignore[no-untyped-call]
            answered: bytes = self._answered.ipc_handle()  # type: ignore[no-untyped-call]
            self.export = CudaExport(rebuild, asked, answered)

    def publish(self) -> None:
        """What the current stream has queued so far comes before what the draft does with the next order."""
        self._asked.record(torch.cuda.current_stream(self.block.device))

    def acquire(self) -> None:
        """What the draft wrote comes before what the current stream does from here on."""
        self._answered.wait(torch.cuda.current_stream(self.block.device))


class CudaDraftPayload:
    """The draft's view of the target's block.

    Args:
        export: from the target.
        uuid: the GPU both are on.
    """

    def __init__(self, export: CudaExport, uuid: str) -> None:
        refuse_expandable_segments()
        self.device = device_of(uuid)
        # The index of the GPU may differ between the two processes, the UUID does not.
        arguments = {**dict(export.rebuild), "storage_device": self.device.index}
        with torch.cuda.device(self.device):
            self.memory: torch.Tensor = reductions.rebuild_cuda_tensor(**arguments)  # type: ignore[no-untyped-call]
            self._asked = torch.cuda.Event.from_ipc_handle(self.device, export.asked_event)  # type: ignore[no-untyped-call]
            self._answered = torch.cuda.Event.from_ipc_handle(self.device, export.answered_event)  # type: ignore[no-untyped-call]

    def publish(self) -> None:
        """Wait for what the current stream has written.

        The target could wait for the event alone, but then a draft whose GPU hangs, or that dies with work queued,
        would stop the target's stream, which knows no deadline. The draft has its token ids on the host by now, so
        there is next to nothing left to wait for.
        """
        self._answered.record(torch.cuda.current_stream(self.device))
        self._answered.synchronize()

    def acquire(self) -> None:
        """What the target still reads of the last answer comes before what the current stream writes."""
        self._asked.wait(torch.cuda.current_stream(self.device))

    def close(self) -> None:
        """Unmap the block; views of it must be gone."""
        torch.cuda.current_stream(self.device).synchronize()
        del self.memory, self._asked, self._answered
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
