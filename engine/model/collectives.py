"""Collective operations of a model's shards: sum and gather over gloo on CPUs, NCCL on GPUs, or none for one shard.

Owns the process group of one engine. It is not the global default group, so two engines can share a process. A dead or
silent peer raises `ShardDown` within a deadline. Knows nothing of models beyond [rows, columns].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from engine.errors import ShardDown
from engine.sampling.readback import await_event, timed_event

LOOPBACK = "127.0.0.1"


class Collectives(Protocol):
    """Operations over all shards. Every rank makes the same calls in the same order."""

    rank: int
    size: int

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over ranks, in place.

        Raises:
            ShardDown: a peer is dead, or did not respond in time.
        """
        ...

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replace the tensor by that of rank 0, in place.

        Raises:
            ShardDown: a peer is dead, or did not respond in time.
        """
        ...

    def gather_logits(self, local: torch.Tensor, columns: Sequence[int]) -> torch.Tensor | None:
        """Concatenate the columns of all ranks on rank 0.

        Args:
            local: [R, columns[rank]], the columns of this rank.
            columns: number of columns of each rank.

        Returns:
            [R, sum(columns)] on rank 0, None elsewhere.

        Raises:
            ShardDown: a peer is dead, or did not respond in time.
        """
        ...

    def abort(self) -> None:
        """End the operations in flight, because a peer does not take part. No other operation may follow."""
        ...

    def close(self) -> None:
        """Leave the group."""
        ...


class Solo:
    """The only shard of a model: there is nothing to exchange."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor) -> None:
        pass

    def broadcast(self, tensor: torch.Tensor) -> None:
        pass

    def gather_logits(self, local: torch.Tensor, columns: Sequence[int]) -> torch.Tensor | None:
        del columns
        return local

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


class Group:
    """One of several shards, made by `connect`."""

    def __init__(self, backend: Any, *, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self._backend = backend
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)

    @classmethod
    def connect(
        cls,
        *,
        rank: int,
        size: int,
        store: Store,
        device: torch.device,
        timeout_s: float = 30.0,
        name: str = "tp",
        host: str = LOOPBACK,
    ) -> Group:
        """Connect to the other ranks. Blocks until all have connected.

        Args:
            rank: rank of this shard, within [0, size).
            size: number of shards.
            store: the store of all ranks, see `open_store`.
            device: device of the tensors; cuda uses NCCL.
            timeout_s: deadline of connecting, and of each later operation.
            name: prefix of the keys in the store, so that several groups can share it.
            host: address that gloo listens on.

        Raises:
            ShardDown: a peer did not connect in time.
        """
        prefixed = PrefixStore(name, store)
        timeout = timedelta(seconds=timeout_s)
        try:
            if device.type == "cuda":
                nccl = dist.ProcessGroupNCCL.Options()
                nccl._timeout = timeout
                backend: Any = dist.ProcessGroupNCCL(prefixed, rank, size, nccl)
            else:
                gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
                gloo._timeout = timeout
                gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
                gloo._threads = 1
                backend = dist.ProcessGroupGloo(prefixed, rank, size, gloo)
        except RuntimeError as error:
            raise ShardDown(f"shard {rank} of {size}: no connection to its peers: {error}") from None
        group = cls(backend, rank=rank, size=size, device=device, timeout_s=timeout_s)
        group._meet()
        return group

    def _meet(self) -> None:
        """Run every operation once: NCCL makes its connections at first use, which can take seconds.

        Raises:
            ShardDown: a peer did not take part.
        """
        number = torch.ones(1, device=self._device)
        self.all_reduce(number)
        self.broadcast(number)
        self.gather_logits(number.view(1, 1), [1] * self.size)
        if self._device.type == "cuda":
            event = timed_event()
            event.record()
            await_event(event, timeout_s=self._timeout.total_seconds(), abort=self.abort)
        if int(number) != self.size:
            raise ShardDown(f"shard {self.rank} of {self.size}: {int(number)} shards took part in the first sum")

    def all_reduce(self, tensor: torch.Tensor) -> None:
        options = dist.AllreduceOptions()
        options.timeout = self._timeout
        self._run(lambda: self._backend.allreduce([tensor], options))

    def broadcast(self, tensor: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = self._timeout
        self._run(lambda: self._backend.broadcast([tensor], options))

    def gather_logits(self, local: torch.Tensor, columns: Sequence[int]) -> torch.Tensor | None:
        padded = F.pad(local, (0, max(columns) - local.shape[1])).contiguous()
        parts = [torch.empty_like(padded) for _ in columns] if self.rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        options.timeout = self._timeout
        self._run(lambda: self._backend.gather([parts] if parts else [], [padded], options))
        if self.rank != 0:
            return None
        return torch.cat([part[:, :width] for part, width in zip(parts, columns, strict=True)], dim=1)

    def abort(self) -> None:
        self._backend.abort()

    def close(self) -> None:
        self._backend.shutdown()

    def _run(self, start: Callable[[], Any]) -> None:
        """Start an operation. With gloo the host waits for it. With NCCL only the stream does; whoever waits for the
        stream notices a hung peer (`engine.sampling.readback`)."""
        try:
            start().wait()
        except RuntimeError as error:
            raise ShardDown(f"shard {self.rank} of {self.size}: a peer is gone or hung: {error}") from None


def open_store(address: str = LOOPBACK, port: int = 0, *, size: int, master: bool, timeout_s: float = 30.0) -> TCPStore:
    """The store through which the shards of one engine connect.

    Args:
        address: address of the master.
        port: port of the master. 0 lets the master choose; its `.port` then has the number.
        size: number of shards.
        master: whether this process keeps the store; true in exactly one process.
        timeout_s: deadline of connecting and of each lookup.

    Raises:
        ShardDown: the master cannot be reached.
    """
    try:
        return TCPStore(
            address, port, size, is_master=master, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
        )
    except RuntimeError as error:
        raise ShardDown(f"no store at {address}:{port}: {error}") from None
