"""Small random models in Hugging Face folders, one per family, and forward inputs to run them with.

The weights are large enough that every part of a layer changes the logits: a missing bias, norm or rotation fails a
comparison.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from engine.core.step import ForwardInput
from engine.model.runner import ModelRunner

VOCAB = 97
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": _LLAMA3, "tie_word_embeddings": True},
    "llama-biased": {
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    },
    "mistral": {"sliding_window": None, "rope_parameters": {"rope_type": "default", "rope_theta": 700.0}},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "mistral-window": {"sliding_window": 20},
    "qwen3-window": {"sliding_window": 24, "use_sliding_window": True, "max_window_layers": 1},
    "gemma3_text": {
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 20,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 9000.0, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    },
    "phi3": {"partial_rotary_factor": 0.5, "sliding_window": 50},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
}
"""Config keys of each model. The part of a name before `-` is the model type."""


def write_model(folder: Path, name: str, *, seed: int = 0, max_shard_size: str = "1GB", **changes: Any) -> Path:
    """Write a random model.

    Args:
        folder: created here.
        name: key of FAMILIES.
        seed: seed of the weights.
        max_shard_size: a small value gives several files and an index.
        changes: config keys with other values.
    """
    config = transformers.AutoConfig.for_model(name.partition("-")[0], **(_SHAPE | FAMILIES[name] | changes))
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:  # Norms start at one and biases at zero, which would hide them.
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif ".gate.weight" in key or ".experts." in key:  # Routers start at zero.
                parameter.copy_(0.15 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def reference_logits(folder: Path, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Logits of `transformers`, [len, vocab] float32 for each prompt."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return [model(torch.tensor([list(prompt)])).logits[0] for prompt in prompts]


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Positions [start, stop) of a sequence whose KV cache is in the given blocks."""

    tokens: Sequence[int]
    start: int
    stop: int
    blocks: Sequence[int]


def forward_input_of(ranges: Sequence[TokenRange], *, block_size: int) -> ForwardInput:
    """One forward over these ranges, with logits of all rows."""
    width = max(len(part.blocks) for part in ranges)
    tables = np.zeros((len(ranges), width), dtype=np.int32)
    for row, part in zip(tables, ranges, strict=True):
        row[: len(part.blocks)] = part.blocks
    positions = [np.arange(part.start, part.stop) for part in ranges]
    slots = [
        np.asarray(part.blocks)[where // block_size] * block_size + where % block_size
        for part, where in zip(ranges, positions, strict=True)
    ]
    rows = np.concatenate([part.tokens[part.start : part.stop] for part in ranges])
    return ForwardInput(
        token_ids=rows.astype(np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        slots=np.concatenate(slots).astype(np.int32),
        q_lens=np.array([part.stop - part.start for part in ranges], dtype=np.int32),
        kv_lens=np.array([part.stop for part in ranges], dtype=np.int32),
        block_tables=tables,
        logit_rows=np.arange(len(rows), dtype=np.int32),
    )


def scattered_blocks(lengths: Sequence[int], *, num_blocks: int, block_size: int, seed: int = 0) -> list[list[int]]:
    """Distinct blocks for sequences of these lengths, in random order."""
    free = np.random.default_rng(seed).permutation(num_blocks).tolist()
    return [[free.pop() for _ in range(-(-length // block_size))] for length in lengths]


def run_cuts(runner: ModelRunner, prompts: list[list[int]], cuts: list[list[int]]) -> list[torch.Tensor]:
    """Per prompt the logits of all rows; in step t each prompt that has one brings its t-th cut."""
    blocks = scattered_blocks(
        [len(prompt) for prompt in prompts], num_blocks=runner.num_blocks, block_size=runner.block_size
    )
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    starts = [0] * len(prompts)
    for step in range(max(len(cut) for cut in cuts)):
        members = [index for index, cut in enumerate(cuts) if step < len(cut)]
        ranges = [TokenRange(prompts[i], starts[i], starts[i] + cuts[i][step], blocks[i]) for i in members]
        logits = runner.forward(forward_input_of(ranges, block_size=runner.block_size)).require_logits()
        for index, part in zip(members, logits.split([cuts[i][step] for i in members]), strict=True):
            found[index].append(part)
            starts[index] += cuts[index][step]
    return [torch.cat(parts) for parts in found]


def random_cuts(rng: random.Random, total: int, longest: int) -> list[int]:
    """Lengths of 1 to `longest` that add up to `total`."""
    cuts = []
    while total:
        cuts.append(min(rng.randint(1, longest), total))
        total -= cuts[-1]
    return cuts
