"""The forward input of each step, sent from rank 0 to the other ranks through a ring in shared memory.

Owns the endpoints of sender and receivers, back pressure (a slot is reused only when every receiver has read it), the
check that no step is missing, and the orderly end. A forward input is a few kilobytes of integers, copied once by the
sender and once by each receiver. The layout is in `engine.ipc.forward_ring`. Knows nothing of the forward itself.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.core.step import ForwardInput
from engine.errors import ConfigError, ShardDown
from engine.ipc.doorbell import DEFAULT_SPIN_S, Doorbell
from engine.ipc.forward_ring import RING_VERSION, ForwardRing, ForwardRingSpec, ring_bytes
from engine.ipc.shared_memory import Host, PeerGone, Rendezvous, SharedMemory, join

__all__ = ["ForwardHandle", "ForwardReceiver", "ForwardRingSpec", "ForwardSender"]

_FAREWELL_S = 0.2


@dataclass(frozen=True, slots=True)
class ForwardHandle:
    """What one rank needs to open the ring. Picklable."""

    node_id: str
    shard: int
    num_receivers: int
    spec: ForwardRingSpec
    rendezvous: Rendezvous


class ForwardSender:
    """The endpoint of rank 0. Only one thread may use it.

    Args:
        spec: capacities of the ring.
        num_receivers: ranks 1..num_receivers open the ring.
        node_id: Ray node of this process.
        spin_s: seconds that a wait spins before it sleeps.
    """

    def __init__(
        self, spec: ForwardRingSpec, *, num_receivers: int, node_id: str, spin_s: float = DEFAULT_SPIN_S
    ) -> None:
        self.spec = spec
        self._num_receivers = num_receivers
        self._node_id = node_id
        self._spin_s = spin_s
        self._memory = SharedMemory.create(ring_bytes(spec, num_receivers))
        self._ring = ForwardRing(self._memory.buffer, spec, num_receivers)
        self._ring.initialize()
        self._host = Host(self._memory, version=RING_VERSION, epoch=1, num_peers=num_receivers)
        self._doorbells: list[Doorbell] = []
        self._seq = 0
        self._closed = False

    def handle(self, shard: int) -> ForwardHandle:
        """Argument of `ForwardReceiver.open` in the process of rank `shard`.

        Raises:
            ValueError: `shard` is outside 1..num_receivers.
        """
        if not 1 <= shard <= self._num_receivers:
            raise ValueError(f"shard: {shard} given, allowed are 1..{self._num_receivers}")
        return ForwardHandle(self._node_id, shard, self._num_receivers, self.spec, self._host.rendezvous(shard - 1))

    def wait_open(self, timeout_s: float) -> None:
        """Wait until every receiver has opened the ring.

        Raises:
            ShardDown: some did not within `timeout_s` seconds; names them.
        """
        if not self._host.wait(timeout_s):
            missing = ", ".join(str(peer + 1) for peer in self._host.missing())
            raise ShardDown(f"shards {missing} have not opened the forward ring within {timeout_s:g} s")
        if not self._doorbells:
            sockets = [self._host.socket_of(peer) for peer in range(self._num_receivers)]
            self._doorbells = [Doorbell(connection, spin_s=self._spin_s) for connection in sockets]

    @property
    def alive(self) -> bool:
        """Whether all receivers have opened the ring and none is known to be dead. Neither waits nor raises."""
        return len(self._doorbells) == self._num_receivers and all(bell.alive for bell in self._doorbells)

    def send(self, step_id: int, forward_input: ForwardInput, *, deadline_s: float) -> None:
        """Send one step to every receiver. Waits while the slowest one is `num_slots` steps behind.

        Args:
            step_id: one more than in the call before.
            forward_input: arrays of dtype int32.
            deadline_s: seconds from now until a slow receiver counts as hung.

        Raises:
            ShardDown: a receiver is dead or hung; names it.
            ValueError: the forward input exceeds the ring's capacities or has another dtype.
        """
        self._ring.check(forward_input)
        self._send(step_id, forward_input, deadline_s)

    def close(self) -> None:
        """Tell every receiver that no step follows. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(ShardDown):
            self._send(-1, None, _FAREWELL_S)
        self._host.close()
        for doorbell in self._doorbells:
            doorbell.close()
        self._memory.close()

    def _send(self, step_id: int, forward_input: ForwardInput | None, deadline_s: float) -> None:
        if len(self._doorbells) != self._num_receivers:
            raise ShardDown("the forward ring is not open")
        deadline = time.monotonic() + deadline_s
        seq = self._seq + 1
        for peer, doorbell in enumerate(self._doorbells):
            has_room = self._has_room(peer, seq)
            try:
                if not doorbell.alive:
                    raise PeerGone("its socket is closed")
                if not has_room() and not doorbell.wait(has_room, timeout_s=deadline - time.monotonic()):
                    raise ShardDown(f"shard {peer + 1} has not read a forward input within {deadline_s:g} s")
            except PeerGone as error:
                raise ShardDown(f"shard {peer + 1} is dead: {error}") from None
        self._ring.write(seq, step_id, forward_input)
        self._seq = seq
        for peer, doorbell in enumerate(self._doorbells):
            try:
                doorbell.ring()
            except PeerGone as error:
                raise ShardDown(f"shard {peer + 1} is dead: {error}") from None

    def _has_room(self, peer: int, seq: int) -> Callable[[], bool]:
        ring, oldest = self._ring, seq - self.spec.num_slots
        return lambda: ring.num_read(peer) >= oldest


class ForwardReceiver:
    """The endpoint of a rank other than 0, made by `open`. Only one thread may use it."""

    def __init__(self, handle: ForwardHandle, memory: SharedMemory, doorbell: Doorbell) -> None:
        self._memory = memory
        self._doorbell = doorbell
        self._ring = ForwardRing(memory.buffer, handle.spec, handle.num_receivers)
        self._num_slots = handle.spec.num_slots
        self._index = handle.shard - 1
        self._seq = 0
        self._step_id: int | None = None
        self.closed = False
        """Whether the sender has sent the end, or this endpoint is closed."""

    @classmethod
    def open(
        cls, handle: ForwardHandle, *, node_id: str, timeout_s: float = 30.0, spin_s: float = DEFAULT_SPIN_S
    ) -> ForwardReceiver:
        """Map the ring.

        Raises:
            ConfigError: the ring is on another node, or has another version or size.
            ShardDown: rank 0 is gone.
        """
        if handle.node_id != node_id:
            raise ConfigError(
                f"forward ring: made on node {handle.node_id}, opened on {node_id}; place both on one node"
            )
        expected = ring_bytes(handle.spec, handle.num_receivers)
        if handle.rendezvous.num_bytes != expected:
            raise ConfigError(f"forward ring: {handle.rendezvous.num_bytes} bytes given, its spec needs {expected}")
        try:
            memory, connection = join(handle.rendezvous, version=RING_VERSION, timeout_s=timeout_s)
        except PeerGone as error:
            raise ShardDown(f"shard 0: {error}") from None
        receiver = cls(handle, memory, Doorbell(connection, spin_s=spin_s))
        if not receiver._ring.has_expected_header():
            receiver.close()
            raise ConfigError(
                f"forward ring: made with other capacities than {handle.spec}; open it with the sender's handle"
            )
        return receiver

    def receive(self, timeout_s: float) -> tuple[int, ForwardInput] | None:
        """The id and forward input of the next step. The arrays are copies.

        Returns:
            None if no step comes within `timeout_s` seconds, or if the sender has sent the end (`closed` is set then).

        Raises:
            ShardDown: rank 0 is gone, a step is missing, or the ring is corrupt.
        """
        if self.closed:
            return None
        ring, seq = self._ring, self._seq + 1
        try:
            if not self._doorbell.wait(lambda: ring.sent >= seq, timeout_s=timeout_s):
                return None
        except PeerGone:
            raise ShardDown("shard 0 is gone") from None
        if ring.sent - self._seq > self._num_slots:
            raise ShardDown(f"the forward ring is corrupt: {ring.sent} steps sent, {self._seq} read")
        step_id, forward_input = ring.read(seq)
        if forward_input is None:
            self.closed = True
            return None
        if self._step_id is not None and step_id != self._step_id + 1:
            raise ShardDown(f"a forward input is missing: step {step_id} came after step {self._step_id}")
        self._seq, self._step_id = seq, step_id
        ring.mark_read(self._index, seq)
        with contextlib.suppress(PeerGone):  # The next call notices that the sender is gone.
            self._doorbell.ring()
        return step_id, forward_input

    def close(self) -> None:
        """Close the endpoint. The sender notices at its next step. Idempotent."""
        self.closed = True
        self._doorbell.close()
        self._memory.close()
