"""The payload of a draft buffer in GPU memory: one allocation that two processes map, and events that order their work.

Owns the allocation, its export and opening through CUDA IPC, the two interprocess events, and the refusal of allocator
settings that break CUDA IPC. The allocation is exported once and opened once per draft process. Per step there are only
two event calls. Knows nothing of draft requests and responses (`engine.draft_buffer.control_block`).

    target's stream    writes new tokens, features | record asked  ...................  wait responded | reads drafts
    draft's stream                                   wait asked | writes ids, confidences, probs | record responded
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch.multiprocessing import reductions

from engine.draft_buffer.handle import CudaExport
from engine.errors import ConfigError
from engine.sampling.staging import pack_words, unpack_words

_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_MIN_BYTES = 2 * 1024 * 1024
"""Smallest allocation that does not share a 2 MiB block of the caching allocator with other tensors."""


def refuse_expandable_segments(environ: Mapping[str, str] = os.environ) -> None:
    """Refuse expandable segments: sharing them needs pidfd_getfd, which unprivileged containers forbid.

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
    """UUID of a GPU, the same in every process; None for the CPU."""
    device = torch.device(device)
    if device.type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(device).uuid)


def device_of(uuid: str) -> torch.device:
    """The device with this UUID in this process.

    Raises:
        ConfigError: the GPU is not visible to this process.
    """
    seen = [gpu_uuid(f"cuda:{index}") for index in range(torch.cuda.device_count())]
    if uuid not in seen:
        raise ConfigError(f"GPU UUID: {uuid} given, this process sees {', '.join(map(str, seen)) or 'none'}")
    return torch.device("cuda", seen.index(uuid))


class CudaBlock:
    """A dedicated device allocation of the target, exported once. It outlives the draft processes that map it.

    A restarted draft maps the same allocation again. It is never freed before the process ends: a hung draft can still
    write to it, and memory whose peer was killed would stay in torch's list of memory that is still read.

    Args:
        num_bytes: size in bytes, rounded up to 2 MiB.
        device: the GPU.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        refuse_expandable_segments()
        size = -(-num_bytes // _MIN_BYTES) * _MIN_BYTES
        with torch.cuda.device(device):
            # A separate pool, so that the exported segment holds no other tensor.
            self._pool = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(self._pool):
                self.memory = torch.zeros(size, dtype=torch.uint8, device=device)
            torch.cuda.current_stream().synchronize()
            rebuild, arguments = reductions.reduce_tensor(self.memory)  # type: ignore[no-untyped-call]
        self.device = device
        self._rebuild = tuple(zip(inspect.signature(rebuild).parameters, arguments, strict=True))

    def payload(self) -> CudaTargetPayload:
        """The target's payload for one epoch, with new events."""
        return CudaTargetPayload(self, self._rebuild)


class CudaTargetPayload:
    """The target's payload in one epoch."""

    def __init__(self, block: CudaBlock, rebuild: tuple[tuple[str, Any], ...]) -> None:
        self.block = block
        self.memory = block.memory
        with torch.cuda.device(block.device):
            self._asked = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
            self._responded = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
            asked: bytes = self._asked.ipc_handle()  # type: ignore[no-untyped-call]
            responded: bytes = self._responded.ipc_handle()  # type: ignore[no-untyped-call]
            self.export = CudaExport(rebuild, asked, responded)

    def publish(self) -> None:
        """Order all work queued on the current stream before the draft's work for the next request."""
        self._asked.record(torch.cuda.current_stream(self.block.device))

    def acquire(self) -> None:
        """Order the draft's writes before all later work of the current stream."""
        self._responded.wait(torch.cuda.current_stream(self.block.device))


class CudaDraftPayload:
    """The draft's mapping of the target's allocation.

    Args:
        export: from the target.
        uuid: UUID of the GPU of both processes.
    """

    def __init__(self, export: CudaExport, uuid: str) -> None:
        refuse_expandable_segments()
        self.device = device_of(uuid)
        self._host: torch.Tensor | None = None  # pinned; grows to the largest result
        # The index of the GPU may differ between the two processes.
        arguments = {**dict(export.rebuild), "storage_device": self.device.index}
        with torch.cuda.device(self.device):
            self.memory: torch.Tensor = reductions.rebuild_cuda_tensor(**arguments)  # type: ignore[no-untyped-call]
            self._asked = torch.cuda.Event.from_ipc_handle(self.device, export.asked_event)  # type: ignore[no-untyped-call]
            self._responded = torch.cuda.Event.from_ipc_handle(self.device, export.responded_event)  # type: ignore[no-untyped-call]

    def publish(self) -> None:
        """Wait until the current stream has written the payload.

        The target's stream could wait for the event instead. But a draft whose GPU hangs, or that dies with work
        queued, would then block the target's stream without a deadline.
        """
        self._responded.record(torch.cuda.current_stream(self.device))
        self._responded.synchronize()

    def read(self, tensors: Sequence[torch.Tensor]) -> list[npt.NDArray[Any]]:
        """`publish`, and copy tensors to the host with the same wait."""
        words = pack_words(tensors)
        if self._host is None or self._host.numel() < words.numel():
            self._host = torch.empty(2 * words.numel(), dtype=torch.int32, pin_memory=True)
        host = self._host[: words.numel()]
        host.copy_(words, non_blocking=True)
        self.publish()
        return unpack_words(host.numpy(), tensors)

    def acquire(self) -> None:
        """Order the target's reads of the previous response before later writes of the current stream."""
        self._asked.wait(torch.cuda.current_stream(self.device))

    def close(self) -> None:
        """Unmap the allocation. Views of it must be gone."""
        torch.cuda.current_stream(self.device).synchronize()
        del self.memory, self._asked, self._responded
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
