"""The draft's endpoint of the draft buffer: open it once, then wait for draft requests and respond to them.

Owns the checks at opening (node, GPU, version, shape) and the draft's half of the protocol. The target's half, and a
diagram of both, is in `engine.draft_buffer.target_endpoint`. Knows nothing of the draft model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt
import torch

from engine.draft.messages import DraftRequest, DraftResponseRow
from engine.draft_buffer.control_block import DraftBlock
from engine.draft_buffer.cuda_ipc import CudaDraftPayload
from engine.draft_buffer.handle import BufferHandle, CudaExport
from engine.draft_buffer.layout import PROTOCOL_VERSION, CorruptBlock
from engine.draft_buffer.payload import DraftPayload, HostPayload, Views, host_bytes
from engine.errors import ConfigError, DraftDown, EngineUnavailable
from engine.ipc.doorbell import DEFAULT_SPIN_S, Doorbell
from engine.ipc.shared_memory import PeerGone, SharedMemory, join

MapCuda = Callable[[CudaExport, str], DraftPayload]


def open_draft_buffer(
    handle: BufferHandle,
    *,
    node_id: str,
    gpu_uuid: str | None,
    timeout_s: float = 30.0,
    spin_s: float = DEFAULT_SPIN_S,
    map_cuda: MapCuda = CudaDraftPayload,
) -> DraftEndpoint:
    """Map the buffer of a target.

    Args:
        handle: from the target's endpoint.
        node_id: Ray node of this process.
        gpu_uuid: UUID of the GPU of this process; None on the CPU.
        timeout_s: seconds to wait for the target.
        spin_s: seconds that a wait spins before it sleeps.
        map_cuda: maps the target's GPU memory, given its export and the UUID of the GPU.

    Raises:
        ConfigError: the buffer is on another node or GPU, or has another version or shape.
        EngineUnavailable: the target is gone, or has closed this epoch.
    """
    if handle.node_id != node_id:
        raise ConfigError(f"draft buffer: made on node {handle.node_id}, opened on {node_id}; place both on one node")
    if handle.gpu_uuid != gpu_uuid:
        raise ConfigError(
            f"draft buffer: made on GPU {handle.gpu_uuid or 'none'}, opened on {gpu_uuid or 'none'}; "
            "place the draft on the GPU of target shard 0"
        )
    expected = host_bytes(handle.spec, on_gpu=handle.cuda is not None)
    if handle.rendezvous.num_bytes != expected:
        raise ConfigError(f"draft buffer: {handle.rendezvous.num_bytes} bytes given, its spec needs {expected}")
    try:
        memory, connection = join(handle.rendezvous, version=PROTOCOL_VERSION, timeout_s=timeout_s)
    except PeerGone as error:
        raise EngineUnavailable(f"target of draft buffer: {error}") from None
    return DraftEndpoint(handle, memory, Doorbell(connection, spin_s=spin_s), map_cuda)


class DraftEndpoint:
    """The draft's endpoint, made by `open_draft_buffer`. Only one thread may use it."""

    def __init__(
        self, handle: BufferHandle, memory: SharedMemory, doorbell: Doorbell, map_cuda: MapCuda = CudaDraftPayload
    ) -> None:
        self.spec = handle.spec
        self.epoch = handle.epoch
        self._memory = memory
        self._doorbell = doorbell
        self._request: DraftRequest | None = None
        self._seq = 0
        self._is_published = False
        self.on_device = handle.cuda is not None
        """Whether the payload is in GPU memory, so that the target's host does not see drafted tokens."""
        self._payload: DraftPayload | None = None
        try:
            self._block = DraftBlock(memory.buffer, handle.spec, handle.epoch)
            self._block.check_fixed()
            if handle.cuda is not None and handle.gpu_uuid is not None:
                self._payload = map_cuda(handle.cuda, handle.gpu_uuid)
            else:
                self._payload = HostPayload(memory, handle.spec)
            self.views = Views.of(self._payload.memory, handle.spec)
            """The payload. Used between `wait` and `respond`, on the current CUDA stream."""
        except CorruptBlock as error:
            self.close()
            raise ConfigError(f"draft buffer: {error}") from None
        except BaseException:
            self.close()
            raise
        self._block.beat()
        self._block.mark_opened()
        self._ring()

    @property
    def probs(self) -> torch.Tensor:
        """[max_rows, max_k, draft_vocab] float32, see `views`."""
        return self.views.probs

    @property
    def features(self) -> torch.Tensor | None:
        """[feature_rows, feature_width] or None, see `views`."""
        return self.views.features

    @property
    def idle_s(self) -> float:
        """Seconds since the target's latest step; 0 during a step. Not after `close`."""
        return self._block.idle_s

    def read(self, tensors: Sequence[torch.Tensor]) -> list[npt.NDArray[Any]]:
        """Publish what was written to the payload, and copy int32, int64 and float32 tensors to the host. One wait.

        Nothing may be written to the payload between this and `respond`.
        """
        self._is_published = True
        return self._mapped.read(tensors)

    def wait(self, timeout_s: float) -> DraftRequest | None:
        """The next draft request; None if none comes within `timeout_s` seconds.

        Raises:
            EngineUnavailable: the target is gone.
            DraftDown: the request is corrupt.
        """
        block, seq = self._block, self._seq
        block.beat()
        try:
            if not self._doorbell.wait(lambda: block.request_seq != seq, timeout_s=timeout_s):
                return None
            block.beat()
            self._request = block.read_request(seq + 1)
        except PeerGone:
            raise EngineUnavailable("the target is gone") from None
        except CorruptBlock as error:
            raise DraftDown(f"draft request {seq + 1} of epoch {self.epoch} is corrupt: {error}") from None
        self._seq = seq + 1
        self._mapped.acquire()
        self._is_published = False
        return self._request

    def respond(self, rows: Sequence[DraftResponseRow], *, draft_s: float) -> None:
        """Send the response to the latest draft request.

        Args:
            rows: one per request row. Probabilities of rows with `has_probs` are in `probs` already.
            draft_s: seconds of computation.

        Raises:
            EngineUnavailable: the target is gone.
            ValueError: the rows do not fit the request, or there is no request.
        """
        if self._request is None:
            raise ValueError("draft response: there is no draft request to respond to")
        if not self._is_published:
            self._mapped.publish()
        self._block.beat()
        self._block.write_response(self._request, rows, draft_s)
        self._request = None
        self._ring()

    def close(self) -> None:
        """Unmap the buffer. Idempotent. Views of the payload must be gone."""
        self._doorbell.close()
        self._memory.close()
        payload, self._payload = self._payload, None
        if payload is not None:
            vars(self).pop("views", None)
            payload.close()

    @property
    def _mapped(self) -> DraftPayload:
        if self._payload is None:
            raise EngineUnavailable("the draft's endpoint is closed")
        return self._payload

    def _ring(self) -> None:
        try:
            self._doorbell.ring()
        except PeerGone:
            raise EngineUnavailable("the target is gone") from None
