"""The payload of a draft buffer: drafted tokens, confidences and probabilities, and committed tokens and features.

One process writes each of them and the other one reads it in place. Owns the size of the host memory, and the payload
in host memory. The payload in GPU memory is in `engine.draft_buffer.cuda_ipc`. Knows nothing of draft requests,
responses or waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt
import torch

from engine.draft_buffer.layout import BufferSpec, Section, block_bytes
from engine.ipc.shared_memory import SharedMemory
from engine.sampling.staging import to_host

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


class DraftPayload(Payload, Protocol):
    """The draft's mapping of a payload."""

    def read(self, tensors: Sequence[torch.Tensor]) -> list[npt.NDArray[Any]]:
        """`publish`, and copy int32, int64 and float32 tensors to the host. The host waits once."""
        ...

    def close(self) -> None:
        """Unmap the memory. Views of it must be gone."""
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

    def read(self, tensors: Sequence[torch.Tensor]) -> list[npt.NDArray[Any]]:
        return to_host(tensors)

    def close(self) -> None:
        """Does nothing: the memory belongs to the endpoint."""


def _payload_offset(spec: BufferSpec) -> int:
    return -(-block_bytes(spec) // _PAGE) * _PAGE


def host_bytes(spec: BufferSpec, *, on_gpu: bool) -> int:
    """Bytes of shared host memory: the control block, and the payload unless it is in GPU memory."""
    return _payload_offset(spec) + (0 if on_gpu else spec.payload_bytes)


@dataclass(frozen=True, slots=True)
class Views:
    """The sections of a payload as tensors on its device."""

    probs: torch.Tensor
    """[max_rows, max_k, draft_vocab] float32, written by the draft."""
    token_ids: torch.Tensor
    """[max_rows, max_k] int32 drafted target token ids, written by the draft."""
    confidences: torch.Tensor
    """[max_rows, max_k] float32 their confidences, written by the draft."""
    new_tokens: torch.Tensor
    """[max_request_tokens] int32 committed tokens of the draft request, row after row, written by the target."""
    features: torch.Tensor | None
    """[feature_rows, feature_width] bfloat16 or float32, written by the target; None where the draft reads none."""

    @classmethod
    def of(cls, memory: torch.Tensor, spec: BufferSpec) -> Views:
        """The sections in `memory`, [payload_bytes] uint8."""

        def part(name: Section, dtype: torch.dtype) -> torch.Tensor:
            start, size = spec.section(name)
            return memory[start : start + size].view(dtype)

        drafted = (spec.max_rows, spec.max_k)
        features = None
        if spec.feature_rows > 0:
            kind = FEATURE_DTYPES[spec.feature_itemsize]
            features = part("features", kind).view(spec.feature_rows, spec.feature_width)
        return cls(
            probs=part("probs", torch.float32).view(*drafted, spec.draft_vocab),
            token_ids=part("token_ids", torch.int32).view(drafted),
            confidences=part("confidences", torch.float32).view(drafted),
            new_tokens=part("new_tokens", torch.int32),
            features=features,
        )
