"""The step plan on its way from target shard 0 to the other shards: a ring of slots in memory that all of them map.

Owns the two ends, their back pressure (a slot is written again only when every receiver has read it), the check that
no step is missed, and the orderly end. A plan is a few kilobytes of integers, copied once in and once out; the layout
is in `engine.ipc.forward_ring`. Knows nothing of what the shards do with it; wakes and memory are those of the draft
buffer.
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
    """What one shard needs to open its end; picklable."""

    node_id: str
    shard: int
    num_receivers: int
    spec: ForwardRingSpec
    rendezvous: Rendezvous


class ForwardSender:
    """Shard 0's end. One thread uses it.

    Args:
        spec: capacities.
        num_receivers: shards 1..num_receivers will open their ends.
        node_id: the node this process runs on.
        spin_s: seconds to spin before sleeping in a wait.
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
        """For `ForwardReceiver.open` in the process of `shard`, 1..num_receivers."""
        if not 1 <= shard <= self._num_receivers:
            raise ValueError(f"shard: {shard} given, allowed are 1..{self._num_receivers}")
        return ForwardHandle(self._node_id, shard, self._num_receivers, self.spec, self._host.rendezvous(shard - 1))

    def wait_open(self, timeout_s: float) -> None:
        """Wait until every shard has opened its end.

        Raises:
            ShardDown: some have not within `timeout_s` seconds; names them.
        """
        if not self._host.wait(timeout_s):
            missing = ", ".join(str(peer + 1) for peer in self._host.missing())
            raise ShardDown(f"shards {missing} have not opened the plan ring within {timeout_s:g} s")
        if not self._doorbells:
            sockets = [self._host.socket_of(peer) for peer in range(self._num_receivers)]
            self._doorbells = [Doorbell(connection, spin_s=self._spin_s) for connection in sockets]

    @property
    def alive(self) -> bool:
        """Whether all shards have opened their ends and none is known to be dead; neither waits nor raises."""
        return len(self._doorbells) == self._num_receivers and all(bell.alive for bell in self._doorbells)

    def send(self, step_id: int, forward_input: ForwardInput, *, deadline_s: float) -> None:
        """Hand one step to every shard; waits while the slowest is `num_slots` steps behind.

        Args:
            step_id: one more than that of the last call.
            plan: arrays of int32.
            deadline_s: seconds from now until a slow shard counts as hung.

        Raises:
            ShardDown: a shard is dead or hung; names it.
            ValueError: the plan exceeds the ring's capacities or has another dtype.
        """
        self._ring.check(forward_input)
        self._send(step_id, forward_input, deadline_s)

    def close(self) -> None:
        """Tell every shard that no more steps will come; idempotent."""
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
            raise ShardDown("the plan ring is not open")
        deadline = time.monotonic() + deadline_s
        seq = self._seq + 1
        for peer, doorbell in enumerate(self._doorbells):
            has_room = self._has_room(peer, seq)
            try:
                if not doorbell.alive:
                    raise PeerGone("its socket is closed")
                if not has_room() and not doorbell.wait(has_room, timeout_s=deadline - time.monotonic()):
                    raise ShardDown(f"shard {peer + 1} has not taken a step plan within {deadline_s:g} s")
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
    """The end of a shard other than 0, made by `open`. One thread uses it."""

    def __init__(self, handle: ForwardHandle, memory: SharedMemory, doorbell: Doorbell) -> None:
        self._memory = memory
        self._doorbell = doorbell
        self._ring = ForwardRing(memory.buffer, handle.spec, handle.num_receivers)
        self._num_slots = handle.spec.num_slots
        self._index = handle.shard - 1
        self._seq = 0
        self._step_id: int | None = None
        self.closed = False
        """Whether the sender has ended in good order, or this end is closed."""

    @classmethod
    def open(
        cls, handle: ForwardHandle, *, node_id: str, timeout_s: float = 30.0, spin_s: float = DEFAULT_SPIN_S
    ) -> ForwardReceiver:
        """Map the ring.

        Raises:
            ConfigError: another node, version or size.
            ShardDown: shard 0 is gone.
        """
        if handle.node_id != node_id:
            raise ConfigError(f"plan ring: made on node {handle.node_id}, opened on {node_id}; place both on one node")
        expected = ring_bytes(handle.spec, handle.num_receivers)
        if handle.rendezvous.num_bytes != expected:
            raise ConfigError(f"plan ring: {handle.rendezvous.num_bytes} bytes given, its spec needs {expected}")
        try:
            memory, connection = join(handle.rendezvous, version=RING_VERSION, timeout_s=timeout_s)
        except PeerGone as error:
            raise ShardDown(f"shard 0: {error}") from None
        receiver = cls(handle, memory, Doorbell(connection, spin_s=spin_s))
        if not receiver._ring.is_ours():
            receiver.close()
            raise ConfigError(
                f"plan ring: made with other capacities than {handle.spec}; open it with the sender's handle"
            )
        return receiver

    def receive(self, timeout_s: float) -> tuple[int, ForwardInput] | None:
        """The next step's number and plan; the arrays are this process's own copies.

        None if none comes within `timeout_s` seconds, or (then `closed` is set) none will come any more.

        Raises:
            ShardDown: shard 0 is gone, a step is missing, or the ring is corrupt.
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
            raise ShardDown(f"the plan ring is corrupt: {ring.sent} steps sent, {self._seq} read")
        step_id, forward_input = ring.read(seq)
        if forward_input is None:
            self.closed = True
            return None
        if self._step_id is not None and step_id != self._step_id + 1:
            raise ShardDown(f"step plans have a gap: step {step_id} came after step {self._step_id}")
        self._seq, self._step_id = seq, step_id
        ring.mark_read(self._index, seq)
        with contextlib.suppress(PeerGone):  # A sender that is gone is noticed at the next call.
            self._doorbell.ring()
        return step_id, forward_input

    def close(self) -> None:
        """Idempotent. The sender notices at its next step."""
        self.closed = True
        self._doorbell.close()
        self._memory.close()
