"""How the shards of one model add up and gather: over gloo on CPUs, NCCL on GPUs, or not at all.

Owns the process group of one engine, made explicitly (no global default group, so two engines can share a process), and
turns a dead or silent peer into `ShardDown` within a deadline. Knows nothing of models beyond [rows, columns].
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from engine.errors import ShardDown

LOOPBACK = "127.0.0.1"


class Collectives(Protocol):
    """What one shard can do together with the others. Every rank makes the same calls in the same order."""

    rank: int
    size: int

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over ranks, in place.

        Raises:
            ShardDown: a peer died or did not answer in time.
        """
        ...

    def gather_logits(self, local: torch.Tensor, columns: Sequence[int]) -> torch.Tensor | None:
        """Bring the ranks' columns side by side on rank 0.

        Args:
            local: [R, columns[rank]].
            columns: of every rank.

        Returns:
            [R, sum(columns)] on rank 0, None elsewhere.

        Raises:
            ShardDown: as `all_reduce`.
        """
        ...

    def close(self) -> None:
        """Leave the group."""
        ...


class Solo:
    """A model on one device: nothing to exchange."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor) -> None:
        pass

    def gather_logits(self, local: torch.Tensor, columns: Sequence[int]) -> torch.Tensor | None:
        del columns
        return local

    def close(self) -> None:
        pass


class Group:
    """A shard among others. Make one with `connect`."""

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
        """Meet the other ranks. Blocks until all are there.

        Args:
            rank: of this shard, within [0, size).
            size: number of shards.
            store: shared by all ranks, see `open_store`.
            device: where tensors lie; cuda means NCCL.
            timeout_s: deadline of the meeting, and of each later operation.
            name: prefix within the store, so that one store serves several groups.
            host: address gloo listens on.

        Raises:
            ShardDown: a peer did not come in time.
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
        self.gather_logits(number.view(1, 1), [1] * self.size)
        if int(number) != self.size:
            raise ShardDown(f"shard {self.rank} of {self.size}: {int(number)} shards took part in the first sum")

    def all_reduce(self, tensor: torch.Tensor) -> None:
        options = dist.AllreduceOptions()
        options.timeout = self._timeout
        self._run(lambda: self._backend.allreduce([tensor], options))

    def gather_logits(self, local: torch.Tensor, columns: Sequence[int]) -> torch.Tensor | None:
        padded = F.pad(local, (0, max(columns) - local.shape[1])).contiguous()
        parts = [torch.empty_like(padded) for _ in columns] if self.rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        options.timeout = self._timeout
        self._run(lambda: self._backend.gather([parts] if parts else [], [padded], options))
        self._await_device()
        if self.rank != 0:
            return None
        return torch.cat([part[:, :width] for part, width in zip(parts, columns, strict=True)], dim=1)

    def close(self) -> None:
        self._backend.shutdown()

    def _run(self, start: Callable[[], Any]) -> None:
        """Start an operation. gloo: wait for its end here. NCCL: the stream waits, the host goes on."""
        try:
            start().wait()
        except RuntimeError as error:
            raise ShardDown(f"shard {self.rank} of {self.size}: a peer is gone or hung: {error}") from None

    def _await_device(self) -> None:
        """On a GPU, wait for all that was enqueued: a hung peer shows only there."""
        if self._device.type != "cuda":
            return
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        deadline = time.monotonic() + self._timeout.total_seconds()
        while not event.query():
            if time.monotonic() > deadline:
                self._backend.abort()
                raise ShardDown(f"shard {self.rank} of {self.size}: a peer did not answer within {self._timeout}")
            time.sleep(0)


def open_store(address: str = LOOPBACK, port: int = 0, *, size: int, master: bool, timeout_s: float = 30.0) -> TCPStore:
    """The store in which the shards of one engine find each other.

    Args:
        address: of the master.
        port: of the master; 0 lets the master choose, then read `.port` and tell the others.
        size: number of shards.
        master: whether this process keeps the store; exactly one does.
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
