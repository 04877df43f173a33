"""What a shard reports once its weights are loaded. Imports no torch, because the replica reads it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShardReady:
    """What a shard reports once its weights are loaded."""

    num_blocks: int
    """KV blocks that fit, the scratch block included; by the estimate until all shards have measured."""
    vocab_size: int
    """Columns of the target's logits."""
    max_model_len: int
    """Longest prompt + output in tokens: the model's limit, or the configured one where that is smaller."""
    device: str
    """Device that computes, as PyTorch names it."""
