"""Bringing shards up: the order of the calls, and the sizes that all shards agree on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tiny_models import VOCAB, write_model

from engine.config import EngineConfig
from engine.errors import ConfigError, ShardDown
from engine.ipc.forward_broadcast import ForwardHandle, ForwardRingSpec
from engine.ipc.shared_memory import Rendezvous
from engine.workers.bring_up import LocalShard, bring_up, bring_up_locally
from engine.workers.shard_ready import ShardReady
from engine.workers.target_shard import TargetShard

SPEC = ForwardRingSpec(max_rows=8, max_spans=2, max_blocks_per_span=4)


class RecordedShard:
    """Notes its calls in a list that all shards share.

    Args:
        rank: of the shard.
        calls: shared list.
        num_blocks: that fit on this shard; at first it reports twice as many.
        max_model_len: that this shard reports.
    """

    def __init__(self, rank: int, calls: list[tuple[object, ...]], *, num_blocks: int, max_model_len: int) -> None:
        self._rank = rank
        self._calls = calls
        self._num_blocks = num_blocks
        self._ready = ShardReady(2 * num_blocks, VOCAB, max_model_len, "cpu")

    async def open_rendezvous(self) -> int:
        self._calls.append(("open_rendezvous", self._rank))
        return 4321

    async def load(self, rendezvous_port: int | None) -> ShardReady:
        self._calls.append(("load", self._rank, rendezvous_port))
        return self._ready

    async def measure(self) -> int:
        self._calls.append(("measure", self._rank))
        return self._num_blocks

    async def allocate(self, num_blocks: int, max_model_len: int) -> None:
        self._calls.append(("allocate", self._rank, num_blocks, max_model_len))

    async def forward_handle(self, rank: int) -> ForwardHandle:
        self._calls.append(("forward_handle", self._rank, rank))
        return ForwardHandle("node", rank, 2, SPEC, Rendezvous("", version=1, epoch=1, num_bytes=0, peer=rank - 1))

    async def follow(self, handle: ForwardHandle) -> None:
        self._calls.append(("follow", self._rank, handle.shard))


def brought_up(blocks: list[int], *, max_model_len: int) -> tuple[ShardReady, list[tuple[object, ...]]]:
    calls: list[tuple[object, ...]] = []
    shards = [
        RecordedShard(rank, calls, num_blocks=num_blocks, max_model_len=max_model_len)
        for rank, num_blocks in enumerate(blocks)
    ]
    return asyncio.run(bring_up(shards, block_size=16)), calls


def test_the_calls_come_in_order_and_every_shard_takes_the_smallest_cache() -> None:
    ready, calls = brought_up([40, 31, 35], max_model_len=1000)
    assert ready == ShardReady(31, VOCAB, 480, "cpu")
    assert calls == [
        ("open_rendezvous", 0),
        *(("load", rank, 4321) for rank in range(3)),
        *(("measure", rank) for rank in range(3)),
        *(("allocate", rank, 31, 480) for rank in range(3)),
        *(("forward_handle", 0, 1), ("follow", 1, 1)),
        *(("forward_handle", 0, 2), ("follow", 2, 2)),
    ]


def test_one_shard_has_nobody_to_meet() -> None:
    ready, calls = brought_up([40], max_model_len=100)
    assert ready.max_model_len == 100, "the model's limit is below the cache's 624 tokens"
    assert calls == [("load", 0, None), ("measure", 0), ("allocate", 0, 40, 100)]


def test_a_shard_that_does_not_load_ends_the_bring_up() -> None:
    class Failing(RecordedShard):
        async def load(self, rendezvous_port: int | None) -> ShardReady:
            raise ShardDown("shard 1 did not come")

    calls: list[tuple[object, ...]] = []
    shards = [
        RecordedShard(0, calls, num_blocks=10, max_model_len=10),
        Failing(1, calls, num_blocks=10, max_model_len=10),
    ]
    with pytest.raises(ShardDown, match="did not come"):
        asyncio.run(bring_up(shards, block_size=16))
    assert not {call[0] for call in calls} & {"measure", "allocate"}


def config_of(folder: Path, **settings: object) -> EngineConfig:
    defaults = {"model": str(folder), "device": "cpu", "dtype": "float32", "kv_cache_tokens": 64, "num_threads": 1}
    return EngineConfig.parse({**defaults, "speculative": {"method": "none"}, **settings})


def test_two_real_shards_find_each_other_and_share_one_size(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "llama")
    config = config_of(folder, tensor_parallel_size=2)
    shards = [TargetShard(config, folder, rank=rank, node_id="here") for rank in range(2)]
    ready = bring_up_locally(shards)
    num_blocks = 64 // config.kv_block_size + 1
    assert ready == ShardReady(num_blocks, VOCAB, 64, "cpu")
    assert [shard.runner.num_blocks for shard in shards] == [num_blocks] * 2
    assert [shard.max_model_len for shard in shards] == [64, 64]
    shards[1].stop()
    shards[1].run()  # closes the channel from rank 0
    for shard in shards:
        shard.close()


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    shard = TargetShard(config_of(tmp_path), tmp_path, rank=0, node_id="here")
    with pytest.raises(ConfigError, match=r"config\.json"):
        asyncio.run(bring_up([LocalShard(shard)], block_size=16))
