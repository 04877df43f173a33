"""The payload of a draft buffer: the draft's probabilities and, for a draft that reads them, the target's features.

One process writes it and the other one reads it in place. Owns the size of the host memory, and the payload in host
memory. The payload in GPU memory is in `engine.draft_buffer.cuda_ipc`. Knows nothing of draft requests, responses or
waiting.
"""

from __future__ import annotations

from typing import Protocol

import torch

from engine.draft_buffer.layout import BufferSpec, block_bytes
from engine.ipc.shared_memory import SharedMemory

FEATURE_DTYPES = {2: torch.bfloat16, 4: torch.float32}
"""Feature dtype by bytes per number."""
_PAGE = 4096


class Payload(Protocol):
    """Memory of probabilities and features, and the ordering of work on it between the two processes."""

    @property
    def memory(self) -> torch.Tensor:
        """[payload_bytes] uint8."""
        ...

    def publish(self) -> None:
        """Make all earlier writes visible to the peer after its next `acquire`."""
        ...

    def acquire(self) -> None:
        """Make all later work see what the peer has published."""
        ...


class HostPayload:
    """A payload in shared host memory. The sequence words of the control block order all work on it."""

    def __init__(self, memory: SharedMemory, spec: BufferSpec) -> None:
        self.memory = torch.frombuffer(
            memory.buffer, dtype=torch.uint8, count=spec.payload_bytes, offset=_payload_offset(spec)
        )

    def publish(self) -> None:
        """Does nothing: the sequence word is stored after the payload."""

    def acquire(self) -> None:
        """Does nothing: the payload is read after the sequence word."""


def _payload_offset(spec: BufferSpec) -> int:
    return -(-block_bytes(spec) // _PAGE) * _PAGE


def host_bytes(spec: BufferSpec, *, on_gpu: bool) -> int:
    """Bytes of shared host memory: the control block, and the payload unless it is in GPU memory."""
    return _payload_offset(spec) + (0 if on_gpu else spec.payload_bytes)


def as_probs(memory: torch.Tensor, spec: BufferSpec) -> torch.Tensor:
    """The probabilities in a payload, [max_rows, max_k, draft_vocab] float32."""
    flat = memory[: spec.probs_bytes].view(torch.float32)
    return flat.view(spec.max_rows, spec.max_k, spec.draft_vocab)


def as_features(memory: torch.Tensor, spec: BufferSpec) -> torch.Tensor | None:
    """The features in a payload, [feature_rows, feature_width] bfloat16 or float32; None where it has none."""
    if spec.feature_rows == 0:
        return None
    flat = memory[spec.features_offset : spec.payload_bytes]
    return flat.view(FEATURE_DTYPES[spec.feature_itemsize]).view(spec.feature_rows, spec.feature_width)
