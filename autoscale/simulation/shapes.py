"""Shapes of models by name, so that a plan needs no download, and what one forward of a shape reads and computes.

Owns the named shapes, as the published config.json files have them, and the shape of an EAGLE draft that `paceline
distill` would train. Knows nothing of devices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weights import WHOLE, ShardSpec
from engine.errors import ConfigError
from engine.workers.memory_plan import weight_bytes

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


def _sizes(hidden: int, inner: int, layers: int, heads: int, *, tied: bool = False) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _LLAMA | _sizes(4096, 14_336, 32, 32),
    "llama-3.1-70b": _LLAMA | _sizes(8192, 28_672, 80, 64),
    "llama-3.2-1b": _LLAMA | _sizes(2048, 8192, 16, 32, tied=True) | {"head_dim": 64},
    "llama-3.2-3b": _LLAMA | _sizes(3072, 8192, 28, 24, tied=True),
    "qwen3-0.6b": _QWEN3 | _sizes(1024, 3072, 28, 16, tied=True),
    "qwen3-8b": _QWEN3 | _sizes(4096, 12_288, 36, 32),
    "qwen3-32b": _QWEN3 | _sizes(5120, 25_600, 64, 64),
    "smollm2-135m": {
        "model_type": "llama",
        "vocab_size": 49_152,
        "max_position_embeddings": 8192,
        "num_key_value_heads": 3,
        **_sizes(576, 1536, 30, 9, tied=True),
    },
}
"""Keys of the published config.json of each model that change its size."""
EAGLE = "eagle"
"""Name of the EAGLE draft of any target: one layer of the target's width on three of its hidden states."""
EAGLE_VOCAB = 32_768
"""Rows of the head of such a draft."""


@dataclass(frozen=True, slots=True)
class ForwardSize:
    """What one forward of one shard reads and computes."""

    read_bytes: int
    """Bytes of weights that are read, whatever the number of rows."""
    flops_per_row: float
    """Floating-point operations per row without attention: two per weight that is read."""


def shape_of(name: str) -> ModelConfig:
    """The shape of a folder with a config.json, or of a name in SHAPES.

    Raises:
        ConfigError: it is neither, or the config.json is not supported.
    """
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        return ModelConfig.load(folder)
    values = SHAPES.get(name.lower())
    if values is None:
        raise ConfigError(f"model: {name!r} is neither a folder with a config.json nor one of: {', '.join(SHAPES)}")
    return ModelConfig.parse(values)


def eagle_of(target: ModelConfig) -> ModelConfig:
    """The shape of an EAGLE draft of a target."""
    return replace(
        target,
        num_layers=1,
        draft_vocab_size=min(EAGLE_VOCAB, target.vocab_size),
        tie_word_embeddings=False,
        shares_embedding=True,
        architecture="eagle",
        feature_layers=(0, 1, 2),  # Which ones does not change any size.
    )


def target_forward(config: ModelConfig, shard: ShardSpec, dtype: torch.dtype = torch.bfloat16) -> ForwardSize:
    """The forward of one shard of a target. The embedding is looked up, not read; a tied one is read as the head."""
    read = weight_bytes(config, shard, dtype)
    if not (config.tie_word_embeddings and shard.size == 1):
        read -= config.vocab_size * config.hidden_size * dtype.itemsize
    return ForwardSize(read, 2.0 * read / dtype.itemsize)


def draft_forward(config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> ForwardSize:
    """One pass of a draft, which is never sharded: its layers, its own head, and the projections of an EAGLE draft.

    Medusa heads read their blocks and output layers, for all positions at once.
    """
    if config.medusa is not None:
        read = config.medusa.num_weights(config.hidden_size, config.draft_vocab_size or config.vocab_size)
        return ForwardSize(read * dtype.itemsize, 2.0 * read)
    layers = target_forward(replace(config, tie_word_embeddings=True), WHOLE, dtype).read_bytes
    if config.draft_vocab_size is not None:
        layers -= (config.vocab_size - config.draft_vocab_size) * config.hidden_size * dtype.itemsize
    # An EAGLE draft projects the token and its last output, each from the hidden size to itself.
    read = layers + (2 * config.hidden_size**2 * dtype.itemsize if config.architecture == "eagle" else 0)
    return ForwardSize(read, 2.0 * read / dtype.itemsize)
