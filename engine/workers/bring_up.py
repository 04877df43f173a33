"""The order in which the shards of a target come up, wherever they run.

Owns the order of the calls, and the size of the KV cache that all shards agree on. Knows no Ray: an adapter carries the
calls to shards in other processes, and `LocalShard` to shards in this one. Imports no torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from engine.ipc.forward_broadcast import ForwardHandle
from engine.workers.shard_ready import ShardReady

if TYPE_CHECKING:
    from engine.workers.target_shard import TargetShard  # imports torch


class ShardCalls(Protocol):
    """The calls that bring up one shard; each has the meaning of the `TargetShard` method of its name."""

    async def open_rendezvous(self) -> int: ...

    async def load(self, rendezvous_port: int | None) -> ShardReady: ...

    async def measure(self) -> int: ...

    async def allocate(self, num_blocks: int, max_model_len: int) -> None: ...

    async def forward_handle(self, rank: int) -> ForwardHandle: ...

    async def follow(self, handle: ForwardHandle) -> None: ...


async def bring_up(shards: Sequence[ShardCalls], *, block_size: int) -> ShardReady:
    """Load and connect all shards of a target.

    Args:
        shards: by rank.
        block_size: tokens per KV block.

    Returns:
        The values that hold for the whole target: the KV cache is as large as the smallest shard allows, and a request
        is never longer than the cache.

    Raises:
        ConfigError, ShardDown: what the first failing shard raised.
    """
    rank0, *followers = shards
    port = await rank0.open_rendezvous() if followers else None
    readies = await asyncio.gather(*(shard.load(port) for shard in shards))
    num_blocks = min(await asyncio.gather(*(shard.measure() for shard in shards)))
    max_model_len = min(readies[0].max_model_len, (num_blocks - 1) * block_size)  # block 0 is scratch
    await asyncio.gather(*(shard.allocate(num_blocks, max_model_len) for shard in shards))
    for rank, follower in enumerate(followers, start=1):
        await follower.follow(await rank0.forward_handle(rank))
    return ShardReady(num_blocks, readies[0].vocab_size, max_model_len, readies[0].device)


class LocalShard:
    """`ShardCalls` on a shard of this process.

    Args:
        shard: that is called.
    """

    def __init__(self, shard: TargetShard) -> None:
        self._shard = shard

    async def open_rendezvous(self) -> int:
        return self._shard.open_rendezvous()

    async def load(self, rendezvous_port: int | None) -> ShardReady:
        """Load in a thread: the shards wait for each other."""
        return await asyncio.to_thread(self._shard.load, rendezvous_port)

    async def measure(self) -> int:
        """Measure in a thread: the shards compute together."""
        return await asyncio.to_thread(self._shard.measure)

    async def allocate(self, num_blocks: int, max_model_len: int) -> None:
        self._shard.allocate(num_blocks, max_model_len)

    async def forward_handle(self, rank: int) -> ForwardHandle:
        return self._shard.forward_handle(rank)

    async def follow(self, handle: ForwardHandle) -> None:
        """Open the channel in a thread: rank 0 answers in another one."""
        await asyncio.to_thread(self._shard.follow, handle)


def bring_up_locally(shards: Sequence[TargetShard]) -> ShardReady:
    """`bring_up` for shards of this process, outside any event loop."""
    calls = [LocalShard(shard) for shard in shards]
    return asyncio.run(bring_up(calls, block_size=shards[0].config.kv_block_size))
