"""The draft buffer: in every step rank 0 of the target sends a draft request and gets tokens and probabilities back.

Owns the target's endpoint, the protocol (request, doorbell, response, doorbell), its deadlines and epochs, and the
choice of transport. Committed tokens, drafted tokens, confidences, probabilities and features are in shared host
memory, or in one GPU allocation that both processes share through CUDA IPC. Over CUDA IPC the target's host sees how
many tokens were drafted, and which ones only where a request's options need them. The target writes features between
two requests. Knows no Ray: `BufferHandle` is the only object that crosses by other means.

    target   create -> handle() ... wait_open | ask: write request, ring, wait            | read response, probs
    draft                open(handle)         | wait | compute, write probs and response, ring
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn

import numpy as np
import torch

from engine.core.step import DeviceDrafts
from engine.draft.messages import DraftRequestRow, DraftResponse
from engine.draft_buffer.control_block import DraftBlock
from engine.draft_buffer.cuda_ipc import CudaBlock, CudaTargetPayload, gpu_uuid
from engine.draft_buffer.draft_endpoint import DraftEndpoint, open_draft_buffer
from engine.draft_buffer.handle import BufferHandle
from engine.draft_buffer.layout import PROTOCOL_VERSION, BufferSpec, CorruptBlock
from engine.draft_buffer.payload import HostPayload, Payload, Views, host_bytes
from engine.errors import ConfigError, DraftDown
from engine.ipc.doorbell import DEFAULT_SPIN_S, Doorbell
from engine.ipc.shared_memory import Host, PeerGone, SharedMemory
from engine.sampling.staging import to_device

__all__ = ["BufferHandle", "DraftEndpoint", "TargetEndpoint", "create_draft_buffer", "gpu_uuid", "open_draft_buffer"]


def create_draft_buffer(
    spec: BufferSpec, *, device: torch.device | str, node_id: str, epoch: int, spin_s: float = DEFAULT_SPIN_S
) -> TargetEndpoint:
    """The target's endpoint of a new buffer.

    Args:
        spec: capacities of the buffer.
        device: device of the target; decides the transport.
        node_id: Ray node of this process.
        epoch: number of the draft process that may open the buffer, 1 or more.
        spin_s: seconds that a wait spins before it sleeps.

    Raises:
        ConfigError: `expandable_segments` is on, or the epoch is below 1.
    """
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    block = CudaBlock(spec.payload_bytes, device) if device.type == "cuda" else None
    return TargetEndpoint(spec, block=block, node_id=node_id, epoch=epoch, spin_s=spin_s)


class TargetEndpoint:
    """The target's endpoint. Only one thread may use it. After `DraftDown` only `renew` and `close` are useful."""

    def __init__(self, spec: BufferSpec, *, block: CudaBlock | None, node_id: str, epoch: int, spin_s: float) -> None:
        if epoch < 1:
            raise ConfigError(f"buffer epoch: {epoch} given, allowed is 1 or more")
        self.spec = spec
        self.epoch = epoch
        self._cuda_block = block
        self._node_id = node_id
        self._spin_s = spin_s
        self._memory = SharedMemory.create(host_bytes(spec, on_gpu=block is not None))
        self._block = DraftBlock(self._memory.buffer, spec, epoch)
        self._block.initialize()
        self._cuda: CudaTargetPayload | None = block.payload() if block is not None else None
        self._payload: Payload = self._cuda or HostPayload(self._memory, spec)
        self.views = Views.of(self._payload.memory, spec)
        """The payload. What the draft wrote is valid until the next `ask`; the target never writes during `ask`."""
        self._host = Host(self._memory, version=PROTOCOL_VERSION, epoch=epoch, num_peers=1)
        self._doorbell: Doorbell | None = None
        self._seq = 0
        self._down: str | None = None
        self.meanwhile: Callable[[], None] = lambda: None
        """Called in `ask` while the draft computes, before the wait."""

    def handle(self) -> BufferHandle:
        """Argument of `open_draft_buffer` in the draft's process. It can be used once."""
        block, cuda = self._cuda_block, self._cuda
        return BufferHandle(
            transport="cuda_ipc" if cuda else "shared_memory",
            node_id=self._node_id,
            gpu_uuid=gpu_uuid(block.device) if block else None,
            epoch=self.epoch,
            spec=self.spec,
            rendezvous=self._host.rendezvous(0),
            cuda=cuda.export if cuda else None,
        )

    @property
    def probs(self) -> torch.Tensor:
        """[max_rows, max_k, draft_vocab] float32 on the target's device, valid until the next `ask`."""
        return self.views.probs

    @property
    def features(self) -> torch.Tensor | None:
        """[feature_rows, feature_width] on the target's device, or None."""
        return self.views.features

    def drafted(self, num_rows: int) -> DeviceDrafts:
        """The drafts of the latest response, on the target's device. The ids are a copy of what the draft wrote, within
        the vocabulary, because an id beyond it would end the process when it is embedded."""
        views = self.views
        token_ids = views.token_ids[:num_rows].long().clamp_(0, self.spec.vocab - 1)
        return DeviceDrafts(token_ids, views.confidences[:num_rows], views.probs[:num_rows])

    @property
    def is_open(self) -> bool:
        """Whether the draft has mapped the buffer. Neither waits nor raises."""
        return self._block.opened

    @property
    def alive(self) -> bool:
        """Whether the draft has mapped the buffer and is not known to be dead. Neither waits nor raises."""
        if self._down is not None or not self.is_open:
            return False
        return self._connect(0.0) is not None and self._bell.alive

    def wait_open(self, timeout_s: float) -> None:
        """Wait until the draft has mapped the buffer.

        Raises:
            DraftDown: the draft did not within `timeout_s` seconds, or died.
        """
        deadline = time.monotonic() + timeout_s
        if self._connect(timeout_s) is None:
            self._fail(f"has not connected within {timeout_s:g} s")
        try:
            if not self._bell.wait(lambda: self._block.opened, timeout_s=deadline - time.monotonic()):
                self._fail(f"has not opened its endpoint within {timeout_s:g} s")
        except PeerGone:
            self._fail("died while it opened its endpoint")

    def ask(self, rows: Sequence[DraftRequestRow], released: Sequence[int] = (), *, deadline_s: float) -> DraftResponse:
        """Send one draft request and wait for the response.

        Args:
            rows: the requests to compute and draft for.
            released: keys of requests that have ended.
            deadline_s: seconds from now until the draft counts as hung.

        Raises:
            DraftDown: the draft is dead or hung, or its response is corrupt or of another epoch.
            ValueError: the request exceeds the buffer's capacities.
        """
        if self._down is not None:
            raise DraftDown(self._down)
        start = time.monotonic()
        if not self.is_open:
            self._fail("has not opened its endpoint")
        self._connect(deadline_s)
        block, seq = self._block, self._seq + 1
        try:
            block.write_request(seq, rows, released, publish=lambda: self._publish(rows))
            self._seq = seq
            self._bell.ring()
            self.meanwhile()
            if not self._bell.wait(lambda: block.response_seq != seq - 1, timeout_s=deadline_s):
                silence_s = block.silence_s
                self._fail(f"has not responded within {deadline_s:g} s; its last heartbeat is {silence_s:.3f} s old")
            response = block.read_response(seq, [row.k for row in rows])
        except PeerGone:
            self._fail("is dead")
        except CorruptBlock as error:
            self._fail(f"left the buffer corrupt: {error}")
        self._payload.acquire()
        return replace(response, handoff_s=max(time.monotonic() - start - response.draft_s, 0.0))

    def mark_step(self, *, runs: bool) -> None:
        """Tell the draft that a step begins, or has ended. Without effect once the endpoint is closed."""
        if self._down is None:
            self._block.mark_step(runs=runs)

    def _publish(self, rows: Sequence[DraftRequestRow]) -> None:
        """Put the committed tokens of a request where the draft's forward reads them, and publish the payload."""
        tokens = np.array([token for row in rows for token in row.new_tokens], dtype=np.int32)
        if self._cuda is not None and len(tokens) > 0:  # On a CPU the draft takes them from the message.
            (staged,) = to_device([tokens], self.views.new_tokens.device)
            self.views.new_tokens[: len(tokens)].copy_(staged)
        self._payload.publish()

    def renew(self, *, epoch: int) -> TargetEndpoint:
        """Close this endpoint and create one for the next draft in the same GPU memory.

        The old draft process must be dead.

        Args:
            epoch: number of the next draft process.
        """
        self._close_host_side()
        return TargetEndpoint(
            self.spec, block=self._cuda_block, node_id=self._node_id, epoch=epoch, spin_s=self._spin_s
        )

    def close(self) -> None:
        """Close the endpoint; the draft notices at once. Idempotent.

        Device memory stays until the process ends, because a hung draft can still write to it.
        """
        self._close_host_side()

    def _close_host_side(self) -> None:
        self._down = self._down or f"draft buffer of epoch {self.epoch} is closed"
        self._host.close()
        if self._doorbell is not None:
            self._doorbell.close()
        self._memory.close()

    @property
    def _bell(self) -> Doorbell:
        if self._doorbell is None:
            self._fail("has not connected")
        return self._doorbell

    def _connect(self, timeout_s: float) -> Doorbell | None:
        if self._doorbell is None and self._host.wait(timeout_s):
            self._doorbell = Doorbell(self._host.socket_of(0), spin_s=self._spin_s)
        return self._doorbell

    def _fail(self, reason: str) -> NoReturn:
        self._down = f"draft of epoch {self.epoch} {reason}"
        raise DraftDown(self._down)
