"""What the two ends of a draft buffer share: the handle that is passed once, and where the payload lies.

The payload is the draft's probabilities and, for a draft that reads them, the target's features: written by one side,
read in place by the other.

Owns the handle's shape, the size of the host memory, and the payload in host memory with its (empty) ordering; the
payload on a GPU is in `engine.draft_buffer.cuda_ipc`. Knows nothing of orders, answers or waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from engine.draft_buffer.cuda_ipc import CudaExport
from engine.draft_buffer.layout import BufferSpec, block_bytes
from engine.ipc.shared_memory import Rendezvous, SharedMemory

FEATURE_DTYPES = {2: torch.bfloat16, 4: torch.float32}
"""By bytes per number."""
_PAGE = 4096


@dataclass(frozen=True, slots=True)
class BufferHandle:
    """All that the draft process needs to open its end; picklable."""

    transport: Literal["shared_memory", "cuda_ipc"]
    node_id: str
    gpu_uuid: str | None
    epoch: int
    spec: BufferSpec
    rendezvous: Rendezvous
    cuda: CudaExport | None


class Payload(Protocol):
    """Where probabilities and features lie, and how work on them is ordered."""

    @property
    def memory(self) -> torch.Tensor:
        """[payload_bytes] uint8."""
        ...

    def publish(self) -> None:
        """What was written before is to be seen by whoever acquires after this."""
        ...

    def acquire(self) -> None:
        """Work from here on sees what was published."""
        ...


class HostPayload:
    """In the memory that both map: ordered by the sequence words alone."""

    def __init__(self, memory: SharedMemory, spec: BufferSpec) -> None:
        self.memory = torch.frombuffer(
            memory.buffer, dtype=torch.uint8, count=spec.payload_bytes, offset=_payload_offset(spec)
        )

    def publish(self) -> None:
        """Nothing to do: stores are seen in order."""

    def acquire(self) -> None:
        """Nothing to do: loads are done in order."""


def _payload_offset(spec: BufferSpec) -> int:
    return -(-block_bytes(spec) // _PAGE) * _PAGE


def host_bytes(spec: BufferSpec, *, on_gpu: bool) -> int:
    """Bytes of the host memory that both sides map: control block, and payload unless that is on a GPU."""
    return _payload_offset(spec) + (0 if on_gpu else spec.payload_bytes)


def as_probs(memory: torch.Tensor, spec: BufferSpec) -> torch.Tensor:
    """[max_rows, max_k, draft_vocab] float32."""
    flat = memory[: spec.probs_bytes].view(torch.float32)
    return flat.view(spec.max_rows, spec.max_k, spec.draft_vocab)


def as_features(memory: torch.Tensor, spec: BufferSpec) -> torch.Tensor | None:
    """[feature_rows, feature_width] bfloat16 or float32; None where the draft reads none."""
    if spec.feature_rows == 0:
        return None
    flat = memory[spec.features_offset : spec.payload_bytes]
    return flat.view(FEATURE_DTYPES[spec.feature_itemsize]).view(spec.feature_rows, spec.feature_width)
