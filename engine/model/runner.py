"""Runs a model over its own paged KV cache, one `ForwardInput` at a time.

Owns the tensors of the cache, and its size from the free memory. Knows no request: the block pool assigns the blocks.
"""

from __future__ import annotations

import math
import mmap

import psutil
import torch

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weights import WHOLE, ShardSpec
from engine.core.step import ForwardInput, ForwardResult
from engine.errors import ConfigError
from engine.model.decoder import LayerCache
from engine.model.device import keep_freed_memory
from engine.model.load import Model
from engine.quantization.kv_cache import record_len, token_bytes

CPU_MEMORY_FRACTION = 0.25
"""Share of the available host memory that a cache takes."""
CPU_MEMORY_LIMIT = 4 << 30
"""Largest cache in host memory, bytes."""
CUDA_MEMORY_FRACTION = 0.85
"""Share of the device memory that is free once weights are loaded; the rest is for activations."""


class ModelRunner:
    """One shard of a model and its KV cache.

    Args:
        model: from `load_model`; gives dtype and device.
        num_blocks: blocks of the cache, the scratch block included.
        block_size: tokens per block.
        kv_dtype: type of the cache's elements; int8 and uint8 stand for quantised keys and values. None takes
            the model's.
    """

    def __init__(self, model: Model, *, num_blocks: int, block_size: int, kv_dtype: torch.dtype | None = None) -> None:
        self.model = model
        self.num_blocks = num_blocks
        self.block_size = block_size
        if model.device.type == "cpu":
            keep_freed_memory()
        self._mapped: list[mmap.mmap] = []  # the memory of the cache, on a CPU
        self._kv_dtype = kv_dtype = kv_dtype or model.dtype
        shape = (num_blocks, block_size, model.num_kv_heads, record_len(model.config.head_dim, kv_dtype))
        with torch.inference_mode():
            self.caches = [
                LayerCache(
                    keys=self._untouched_zeros(shape),
                    values=self._untouched_zeros(shape),
                )
                for _ in range(model.config.num_layers)
            ]

    @torch.inference_mode()
    def forward(self, forward_input: ForwardInput) -> ForwardResult:
        """Run one forward: move KV slots, write K and V of its rows into the cache, then attend, layer by layer.

        Returns:
            Logits on rank 0, and the outputs of the tapped layers. The logits have `vocab_size` columns, or
            `draft_vocab_size` for a draft that scores only some tokens.

        Raises:
            ShardDown: a peer shard is gone.
        """
        self.move(forward_input)
        return self.model.forward(forward_input, self.caches)

    @torch.inference_mode()
    def move(self, forward_input: ForwardInput) -> None:
        """Apply the moves of a forward that something else will compute."""
        if forward_input.moves is not None:
            self.model.move(forward_input.moves, self.caches)

    def clear(self) -> None:
        """Set the cache to zeros and give its memory back, where it is host memory. No request may use it."""
        for memory in self._mapped:
            memory.madvise(mmap.MADV_DONTNEED)

    def _untouched_zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Zeros that take memory only once they are written: a pool is sized for the largest load and is rarely full.

        The memory is mapped directly. The allocator would write it, because `keep_freed_memory` makes it serve large
        blocks from its heap.
        """
        dtype, device = self._kv_dtype, self.model.device
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        size = math.prod(shape)
        memory = mmap.mmap(-1, size * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        if hasattr(mmap, "MADV_DONTNEED"):
            self._mapped.append(memory)
        return torch.frombuffer(memory, dtype=dtype, count=size).view(shape)


def kv_bytes_per_token(config: ModelConfig, shard: ShardSpec = WHOLE, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes of K and V per token on one shard, over all layers."""
    heads = shard.kv_heads(config)
    num_heads: int = heads.stop - heads.start
    return 2 * config.num_layers * num_heads * token_bytes(config.head_dim, dtype)


def num_kv_blocks(
    config: ModelConfig,
    *,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
    shard: ShardSpec = WHOLE,
    kv_cache_tokens: int | None = None,
    memory_bytes: int | None = None,
) -> int:
    """Blocks of a KV cache, the scratch block excluded. Call it once the weights are loaded.

    All shards must use the smallest of their results.

    Args:
        config: configuration of the model.
        block_size: tokens per block.
        dtype: type of the cache's elements.
        device: device that holds the cache.
        shard: part of the model that this shard computes.
        kv_cache_tokens: configured capacity in tokens; None derives it from the memory.
        memory_bytes: bytes to use; None takes a share of the free memory.

    Raises:
        ConfigError: the memory does not hold one block.
    """
    if kv_cache_tokens is not None:
        return -(-kv_cache_tokens // block_size)
    budget = _free_memory(torch.device(device)) if memory_bytes is None else memory_bytes
    per_block = block_size * kv_bytes_per_token(config, shard, dtype)
    if budget < per_block:
        raise ConfigError(
            f"kv_cache_tokens: {budget} bytes of memory hold no block of {block_size} tokens ({per_block})"
        )
    return budget // per_block


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * CUDA_MEMORY_FRACTION)
    return min(int(psutil.virtual_memory().available * CPU_MEMORY_FRACTION), CPU_MEMORY_LIMIT)
