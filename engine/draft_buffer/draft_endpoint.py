"""The draft's end of the draft buffer: open it once, then wait for orders and answer them.

Owns the checks at opening (node, GPU, version, shape) and the answering half of the protocol; the asking half, and a
picture of both, is in `engine.draft_buffer.target_endpoint`. Knows nothing of the model that computes the answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.draft.messages import DraftRequest, DraftResponseRow
from engine.draft_buffer.control_block import DraftBlock
from engine.draft_buffer.cuda_ipc import CudaDraftPayload
from engine.draft_buffer.handle import BufferHandle, HostPayload, Payload, as_features, as_probs, host_bytes
from engine.draft_buffer.layout import PROTOCOL_VERSION, CorruptBlock
from engine.errors import ConfigError, DraftDown, EngineUnavailable
from engine.ipc.doorbell import DEFAULT_SPIN_S, Doorbell
from engine.ipc.shared_memory import PeerGone, SharedMemory, join


def open_draft_buffer(
    handle: BufferHandle,
    *,
    node_id: str,
    gpu_uuid: str | None,
    timeout_s: float = 30.0,
    spin_s: float = DEFAULT_SPIN_S,
) -> DraftEndpoint:
    """The draft's end.

    Args:
        handle: from the target's end.
        node_id: the node this process runs on.
        gpu_uuid: the GPU this process computes on; None on the CPU.
        timeout_s: seconds for the target to answer.
        spin_s: seconds to spin before sleeping in a wait.

    Raises:
        ConfigError: another node, another GPU, another version, or a buffer of another shape.
        EngineUnavailable: the target's end of this epoch is gone.
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
    return DraftEndpoint(handle, memory, Doorbell(connection, spin_s=spin_s))


class DraftEndpoint:
    """The answering side, made by `open_draft_buffer`. One thread uses it."""

    def __init__(self, handle: BufferHandle, memory: SharedMemory, doorbell: Doorbell) -> None:
        self.spec = handle.spec
        self.epoch = handle.epoch
        self._memory = memory
        self._doorbell = doorbell
        self._order: DraftRequest | None = None
        self._seq = 0
        self._cuda: CudaDraftPayload | None = None
        try:
            self._block = DraftBlock(memory.buffer, handle.spec, handle.epoch)
            self._block.check_fixed()
            if handle.cuda is not None and handle.gpu_uuid is not None:
                self._cuda = CudaDraftPayload(handle.cuda, handle.gpu_uuid)
            self._payload: Payload = self._cuda or HostPayload(memory, handle.spec)
        except CorruptBlock as error:
            self.close()
            raise ConfigError(f"draft buffer: {error}") from None
        except BaseException:
            self.close()
            raise
        self.probs = as_probs(self._payload.memory, handle.spec)
        """[max_rows, max_k, draft_vocab] float32; written between `wait` and `answer`, on the current stream."""
        self.features = as_features(self._payload.memory, handle.spec)
        """[feature_rows, feature_width] or None; read between `wait` and `answer`, on the current stream."""
        self._block.beat()
        self._block.mark_opened()
        self._ring()

    def wait(self, timeout_s: float) -> DraftRequest | None:
        """The next order; None if there is none within `timeout_s` seconds.

        Raises:
            EngineUnavailable: the target is gone; exit.
            DraftDown: the order is corrupt; exit.
        """
        block, seq = self._block, self._seq
        block.beat()
        try:
            if not self._doorbell.wait(lambda: block.order_seq != seq, timeout_s=timeout_s):
                return None
            block.beat()
            self._order = block.read_order(seq + 1)
        except PeerGone:
            raise EngineUnavailable("the target is gone") from None
        except CorruptBlock as error:
            raise DraftDown(f"order {seq + 1} of epoch {self.epoch} is corrupt: {error}") from None
        self._seq = seq + 1
        self._payload.acquire()
        return self._order

    def answer(self, rows: Sequence[DraftResponseRow], *, draft_s: float) -> None:
        """Answer the last order.

        Args:
            rows: one per row of the order; probabilities of those with `has_probs` are in `probs` already.
            draft_s: seconds computed.

        Raises:
            EngineUnavailable: the target is gone; exit.
            ValueError: the rows do not fit the order, or there is none.
        """
        if self._order is None:
            raise ValueError("answer: there is no order to answer")
        self._payload.publish()
        self._block.beat()
        self._block.write_answer(self._order, rows, draft_s)
        self._order = None
        self._ring()

    def beat(self) -> None:
        """Note that the draft is at work; shown in the error message when it overruns a deadline."""
        self._block.beat()

    def close(self) -> None:
        """Unmap everything; idempotent. Keep no view of `probs`."""
        self._doorbell.close()
        self._memory.close()
        if self._cuda is not None:
            del self.probs, self.features, self._payload
            self._cuda.close()
            self._cuda = None

    def _ring(self) -> None:
        try:
            self._doorbell.ring()
        except PeerGone:
            raise EngineUnavailable("the target is gone") from None
