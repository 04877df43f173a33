"""The handle of a draft buffer: what crosses from the target's process to the draft's, once per draft.

Imports no torch, because the replica passes handles on. The memory behind a handle is in `engine.draft_buffer.payload`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from engine.draft_buffer.layout import BufferSpec
from engine.ipc.shared_memory import Rendezvous


@dataclass(frozen=True, slots=True)
class CudaExport:
    """What the draft process needs to open the allocation in GPU memory. Picklable."""

    rebuild: tuple[tuple[str, Any], ...]
    """Arguments of torch's `rebuild_cuda_tensor`, by name."""
    asked_event: bytes
    """IPC handle of the event that the target records before it sends a request."""
    responded_event: bytes
    """IPC handle of the event that the draft records before it responds."""


@dataclass(frozen=True, slots=True)
class BufferHandle:
    """Everything that the draft process needs to open the buffer. Picklable."""

    transport: Literal["shared_memory", "cuda_ipc"]
    node_id: str
    gpu_uuid: str | None
    epoch: int
    spec: BufferSpec
    rendezvous: Rendezvous
    cuda: CudaExport | None
