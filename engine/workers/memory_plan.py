"""The memory plan of one target shard on a GPU: what uses how much, and what is left for the KV cache.

Owns the arithmetic, its printed table and the refusal: pure functions of shapes and sizes. Weights are exact.
Activations are an upper bound from the shapes, until `engine.workers.device_memory` has measured them. CUDA contexts,
NCCL and the reserve are estimates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weights import ShardSpec
from engine.config import DRAFT_METHODS, EngineConfig
from engine.errors import ConfigError
from engine.graphs.buckets import make_buckets, row_sizes
from engine.graphs.chain_rows import KINDS, WHOLE_ROWS
from engine.kernels import PARTIAL_BYTES
from engine.lora.adapter_files import num_adapter_values
from engine.model.device import pick_kv_dtype
from engine.model.runner import kv_bytes_per_token

GIB = 1 << 30
WEIGHTS, ACTIVATIONS, NCCL = "weights", "activations", "NCCL"
"""Parts that are measured."""
CONTEXT_BYTES = 3 * GIB // 4
"""CUDA context, loaded kernels and library workspaces of one process."""
NCCL_BYTES = GIB
"""Communicators and their channels, where there is more than one shard."""
GRAPH_BYTES = 16 << 20
"""A recorded forward: its nodes and what the driver keeps for it."""
POSITION_BYTES = {"draft_model": 8 << 20, "eagle": 1 << 20, "medusa": 1 << 20}
"""A recorded position of a draft, by method: the nodes of a model half as deep as a target, or those of one layer."""
CHOICE_LOGIT_BYTES = 32
"""Bytes per logit of a recorded choice: logits twice, probabilities, sorted ones, noise, and their masks."""
RESERVE_FRACTION = 0.02
"""Of the device: fragmentation, and what the estimates miss."""
SAMPLED_LOGIT_BYTES, SCORED_LOGIT_BYTES = 48, 20
"""Peak bytes per logit of a row that yields a token (sort of top-p included), and of a row that scores the prompt."""
FEATURE_BYTES = 128 << 20
"""Hidden states that an eagle draft or Medusa heads read, in the shared block."""
LEAST_CONTEXT = 4096
"""Tokens of KV cache that a plan must have room for, or max_model_len if that is shorter."""


@dataclass(frozen=True, slots=True)
class Part:
    """One line of the plan."""

    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The use of one device."""

    device_bytes: int
    """Bytes that the shard and its draft can use together."""
    parts: tuple[Part, ...]
    """Everything but the KV cache."""
    kv_bytes_per_token: int

    @property
    def kv_bytes(self) -> int:
        """Bytes left for the KV cache; negative if the parts do not fit."""
        return self.device_bytes - sum(part.num_bytes for part in self.parts)

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache can hold."""
        return max(0, self.kv_bytes) // self.kv_bytes_per_token

    def part(self, name: str) -> int:
        """Bytes of one part; 0 if the plan has none of this name."""
        return sum(part.num_bytes for part in self.parts if part.name == name)

    def measured(self, *, weights: int, activations: int) -> MemoryPlan:
        """The plan with what was measured in place of estimates, once all communicators have their memory.

        Args:
            weights: bytes that the process holds besides its CUDA context.
            activations: most bytes that a step holds in addition.
        """
        found = {WEIGHTS: weights, ACTIVATIONS: activations}
        kept = [replace(part, num_bytes=found.get(part.name, part.num_bytes)) for part in self.parts]
        return replace(self, parts=tuple(part for part in kept if part.name != NCCL))

    def table(self) -> str:
        """The plan in lines of GiB."""
        rows = [*self.parts, Part(f"KV cache ({self.kv_tokens} tokens)", max(0, self.kv_bytes))]
        lines = [f"{part.name:<40}{part.num_bytes / GIB:>8.2f} GiB" for part in rows]
        return "\n".join([*lines, f"{'device':<40}{self.device_bytes / GIB:>8.2f} GiB"])

    def check(self, least_tokens: int) -> None:
        """Whether the cache holds `least_tokens` tokens.

        Raises:
            ConfigError: it does not, with the table and the settings that change it.
        """
        if self.kv_tokens < least_tokens:
            raise ConfigError(
                f"memory: the KV cache needs {least_tokens} tokens, this plan has room for {self.kv_tokens}.\n"
                f"{self.table()}\n"
                "Lower max_step_tokens, max_num_requests, speculative.k or speculative.memory_fraction, raise "
                "tensor_parallel_size, or take a smaller model."
            )


def plan_memory(
    engine: EngineConfig, config: ModelConfig, *, rank: int, device_bytes: int, dtype: torch.dtype = torch.bfloat16
) -> MemoryPlan:
    """Plan the memory of one shard.

    Args:
        engine: the settings.
        config: of the target.
        rank: of the shard. Shard 0 shares its device with the draft and computes all logits.
        device_bytes: bytes of the device that are not used by others.
        dtype: of weights, activations and, unless the settings say otherwise, KV cache.
    """
    shard = ShardSpec(rank, engine.tensor_parallel_size)
    has_draft = rank == 0 and engine.speculative.method in DRAFT_METHODS
    parts = [
        Part(WEIGHTS, weight_bytes(config, shard, dtype)),
        Part(ACTIVATIONS, activation_bytes(engine, config, shard, dtype)),
        Part("CUDA contexts", CONTEXT_BYTES * (2 if has_draft else 1)),
        Part("reserve", int(device_bytes * RESERVE_FRACTION)),
    ]
    if engine.lora is not None:
        num_values = num_adapter_values(engine.lora, config, num_shards=shard.size)
        parts.append(Part(f"adapters (up to {engine.lora.max_loras})", num_values * dtype.itemsize))
    if shard.size > 1:
        parts.append(Part(NCCL, NCCL_BYTES))
    if engine.cuda_graphs == "on":
        parts.append(Part("CUDA graphs", graph_bytes(engine, config, shard, dtype)))
        if has_draft:
            parts.append(Part("CUDA graphs of the draft", draft_graph_bytes(engine, config)))
    if has_draft:
        share = engine.speculative.memory_fraction
        buffer = 4 * engine.max_num_requests * max(1, engine.speculative.k) * config.vocab_size
        features = FEATURE_BYTES if engine.speculative.method in ("eagle", "medusa") else 0
        parts.append(Part(f"draft ({share:.0%} of the device)", int(device_bytes * share)))
        parts.append(Part("draft buffer", buffer + features))
    return MemoryPlan(device_bytes, tuple(parts), kv_bytes_per_token(config, shard, pick_kv_dtype(engine, dtype)))


def draft_process_bytes(engine: EngineConfig, config: ModelConfig, *, rank: int, device_bytes: int) -> int:
    """Most bytes of a shard's device that the process of a draft holds by itself; 0 where there is none.

    Args:
        engine, config, rank: as `plan_memory` takes them.
        device_bytes: of the whole device.
    """
    if rank > 0 or engine.speculative.method not in DRAFT_METHODS:
        return 0
    graphs = draft_graph_bytes(engine, config) if engine.cuda_graphs == "on" else 0
    return CONTEXT_BYTES + int(device_bytes * engine.speculative.memory_fraction) + graphs


def weight_bytes(config: ModelConfig, shard: ShardSpec, dtype: torch.dtype) -> int:
    """Bytes of the weights of one shard. Quantised ones are dequantised when they are loaded."""
    num_weights = config.num_weights(
        heads=_length(shard.query_heads(config)),
        kv_heads=_length(shard.kv_heads(config)),
        part=lambda total: _length(shard.part(total)),
        has_head=shard.size > 1 or not config.tie_word_embeddings,
    )
    return num_weights * dtype.itemsize


def activation_bytes(engine: EngineConfig, config: ModelConfig, shard: ShardSpec, dtype: torch.dtype) -> int:
    """Upper bound of the bytes that one step holds besides weights and caches."""
    rows = engine.max_step_tokens
    layers = _layer_bytes(rows, config, shard, dtype)
    if engine.kernel in ("triton", "invariant") or engine.kv_cache_dtype == "fp8":
        layers += PARTIAL_BYTES
    if shard.rank > 0:
        local_logits: int = rows * dtype.itemsize * 2 * _length(shard.part(config.vocab_size))
        return layers + local_logits
    sampled = min(rows, engine.max_num_requests * (max(1, engine.speculative.k) + 1))
    logits: int = (SAMPLED_LOGIT_BYTES * sampled + SCORED_LOGIT_BYTES * (rows - sampled)) * config.vocab_size
    return layers + logits


def graph_bytes(engine: EngineConfig, config: ModelConfig, shard: ShardSpec, dtype: torch.dtype) -> int:
    """Estimate of the bytes that recorded forwards hold: their shared activations and results, and the graphs."""
    trees = engine.tree_width > 1
    buckets = make_buckets(max_requests=engine.max_num_requests, max_k=engine.speculative.k, trees=trees)
    rows = max(bucket.rows for bucket in buckets)
    results: int = rows * (4 * config.vocab_size + dtype.itemsize * 3 * config.hidden_size) if shard.rank == 0 else 0
    return _layer_bytes(rows, config, shard, dtype) + 2 * results + GRAPH_BYTES * len(buckets)


def draft_graph_bytes(engine: EngineConfig, config: ModelConfig) -> int:
    """Estimate of the bytes that the recordings of a draft hold: results, logits, and the graphs.

    Args:
        engine: the settings; the method has a draft.
        config: of the target. A draft has at most as many logit columns.
    """
    sizes, k = row_sizes(make_buckets(max_requests=engine.max_num_requests, max_k=0)), max(1, engine.speculative.k)
    per_row: int = (4 * k + CHOICE_LOGIT_BYTES) * config.vocab_size
    position, num_kinds = POSITION_BYTES[engine.speculative.method], len(KINDS)
    positions = sum(1 + num_kinds * (1 + (k if size <= WHOLE_ROWS else 0)) for size in sizes)
    committed = make_buckets(max_requests=engine.max_num_requests, max_k=k)
    logits: int = 4 * max(bucket.rows for bucket in committed) * config.vocab_size
    return max(sizes) * per_row + logits + position * (positions + len(committed))


def _layer_bytes(rows: int, config: ModelConfig, shard: ShardSpec, dtype: torch.dtype) -> int:
    """Bytes of the activations of layers."""
    num_kv, num_heads = _length(shard.kv_heads(config)), _length(shard.query_heads(config))
    qkv = (num_heads + 2 * num_kv) * config.head_dim
    inner = _length(shard.part(config.intermediate_size))
    return rows * dtype.itemsize * (6 * config.hidden_size + 5 * qkv + 3 * inner)


def _length(part: slice) -> int:
    return int(part.stop - part.start)
