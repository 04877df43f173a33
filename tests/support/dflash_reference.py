"""DFlash drafts with random weights in both public layouts, and a plain implementation of what they compute.

The implementation follows the definition of the format, not the engine: it has no cache and no batch, and computes the
whole text again for each block.

    text      c = norm(fc(f)) at every known position but the last; keys and values of each layer are k(c), v(c)
    block     the last token, then masks, B positions in all; queries, and further keys and values, of each layer
    attention every position of the block to the whole text and the whole block
    logits    at masked position n + i those of token n + i
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

BLOCK_SIZE, THETA, EPS = 6, 700.0, 1e-5


@dataclass(frozen=True)
class PublicBlock:
    """A DFlash draft under the names of both layouts."""

    layer: dict[str, Any]
    """Config of the layers."""
    layers: tuple[int, ...]
    """Layers of the target whose outputs it reads."""
    mask_token_id: int
    draft_vocab: Tensor
    """[N] target ids, ascending; used by the speculators layout."""
    tensors: dict[str, Tensor]
    """Without embedding and head."""
    embedding: Tensor
    head: Tensor
    """[N, hidden]."""


def make_block(
    target: Path, *, layers: tuple[int, ...], draft_vocab: Tensor | None = None, seed: int = 0, **layer: Any
) -> PublicBlock:
    """A random draft for a target folder. Every part matters for the logits.

    Args:
        target: model folder of the target.
        layers: layers whose outputs it reads, ascending.
        draft_vocab: [N] target ids of its columns; None gives it the target's embedding and head.
        seed: of the weights.
        layer: changes of the layers' config.
    """
    of_target = json.loads((target / "config.json").read_text())
    hidden, vocab = of_target["hidden_size"], of_target["vocab_size"]
    config: dict[str, Any] = {
        "model_type": "qwen3",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": EPS,
        "max_position_embeddings": 64,
        "rope_theta": THETA,
        "attention_bias": False,
    } | layer
    dim, inner = config["head_dim"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    rng = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        values: Tensor = torch.randn(rows, columns, generator=rng) / columns**0.5
        return values

    def norm(length: int) -> Tensor:
        return 1.0 + 0.3 * torch.randn(length, generator=rng)

    tensors = {"fc.weight": matrix(hidden, len(layers) * hidden)}
    tensors |= {"hidden_norm.weight": norm(hidden), "norm.weight": norm(hidden)}
    for index in range(config["num_hidden_layers"]):
        prefix = f"layers.{index}."
        for name, rows in (("q", heads * dim), ("k", kv_heads * dim), ("v", kv_heads * dim)):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = 2 * matrix(rows, hidden)
            if config["attention_bias"]:
                tensors[f"{prefix}self_attn.{name}_proj.bias"] = matrix(1, rows)[0]
        tensors[prefix + "self_attn.o_proj.weight"] = matrix(hidden, heads * dim)
        if config["attention_bias"]:
            tensors[prefix + "self_attn.o_proj.bias"] = matrix(1, hidden)[0]
        tensors |= {f"{prefix}self_attn.{name}_norm.weight": 2 * norm(dim) for name in "qk"}
        tensors |= {f"{prefix}mlp.{name}_proj.weight": matrix(inner, hidden) for name in ("gate", "up")}
        tensors[prefix + "mlp.down_proj.weight"] = matrix(hidden, inner)
        tensors |= {f"{prefix}{name}_layernorm.weight": norm(hidden) for name in ("input", "post_attention")}
    if draft_vocab is not None:
        head, embedding = 3 * matrix(len(draft_vocab), hidden), matrix(vocab, hidden)
        return PublicBlock(config, layers, vocab - 3, draft_vocab, tensors, embedding, head)
    of_files = load_file(target / "model.safetensors")
    embedding = of_files["model.embed_tokens.weight"]
    head = of_files.get("lm_head.weight", embedding)
    return PublicBlock(config, layers, vocab - 3, torch.arange(vocab), tensors, embedding, head)


def write_block(block: PublicBlock, folder: Path, layout: str, **changes: Any) -> Path:
    """Write a draft in the layout `authors` or `speculators`. `changes` are keys of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    size, vocab = len(block.draft_vocab), block.layer["vocab_size"]
    tensors = dict(block.tensors)
    config: dict[str, Any]
    if layout == "authors":
        config = {
            **block.layer,
            "architectures": ["DFlashDraftModel"],
            "block_size": BLOCK_SIZE,
            "num_target_layers": 8,
            "dflash_config": {"mask_token_id": block.mask_token_id, "target_layer_ids": list(block.layers)},
        }
    else:
        tensors |= {"lm_head.weight": block.head, "embed_tokens.weight": block.embedding}
        if size < vocab:
            tensors["d2t"] = block.draft_vocab - torch.arange(size)
            tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, block.draft_vocab, value=True)
        config = {
            "architectures": ["DFlashSpeculator"],
            "speculators_model_type": "dflash",
            "transformer_layer_config": block.layer,
            "draft_vocab_size": size,
            "block_size": BLOCK_SIZE,
            "mask_token_id": block.mask_token_id,
            "aux_hidden_state_layer_ids": [layer + 1 for layer in block.layers],
            "sample_from_anchor": False,
        }
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def block_logits(block: PublicBlock, tokens: Sequence[int], features: Tensor) -> Tensor:
    """[BLOCK_SIZE - 1, N] logits of the tokens after `tokens`.

    Args:
        block: the draft.
        tokens: n known tokens.
        features: [n - 1, F * hidden] of the target at all positions but the last.
    """
    tensors, ids = block.tensors, [tokens[-1], *[block.mask_token_id] * (BLOCK_SIZE - 1)]
    text = _norm(features @ tensors["fc.weight"].T, tensors["hidden_norm.weight"])
    hidden = block.embedding[torch.tensor(ids)]
    first = len(tokens) - 1
    for index in range(block.layer["num_hidden_layers"]):
        prefix = f"layers.{index}."
        normed = _norm(hidden, tensors[prefix + "input_layernorm.weight"])
        both = torch.cat((text, normed))
        q = _rotated(_heads(block, prefix, "q", normed), first)
        k = _rotated(_heads(block, prefix, "k", both), 0)
        v = _heads(block, prefix, "v", both)
        groups = len(q) // len(k)
        scores = q @ k.repeat_interleave(groups, 0).transpose(1, 2) / q.shape[-1] ** 0.5
        seen = scores.softmax(-1) @ v.repeat_interleave(groups, 0)
        bias = tensors.get(prefix + "self_attn.o_proj.bias")
        hidden = hidden + F.linear(seen.transpose(0, 1).flatten(1), tensors[prefix + "self_attn.o_proj.weight"], bias)
        normed = _norm(hidden, tensors[prefix + "post_attention_layernorm.weight"])
        gate, up, down = (tensors[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        hidden = hidden + (F.silu(normed @ gate.T) * (normed @ up.T)) @ down.T
    return _norm(hidden[1:], tensors["norm.weight"]) @ block.head.T


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    normed: Tensor = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight
    return normed


def _heads(block: PublicBlock, prefix: str, name: str, x: Tensor) -> Tensor:
    """[heads, T, head_dim] of q, k or v, q and k with their norm."""
    path = f"{prefix}self_attn.{name}"
    out = F.linear(x, block.tensors[f"{path}_proj.weight"], block.tensors.get(f"{path}_proj.bias"))
    out = out.view(len(x), -1, block.layer["head_dim"])
    return (out if name == "v" else _norm(out, block.tensors[f"{path}_norm.weight"])).transpose(0, 1)


def _rotated(x: Tensor, first: int) -> Tensor:
    """RoFormer's rotation of [heads, T, d] at positions `first`, `first` + 1, ..; dimensions i and i + d / 2 pair."""
    half = x.shape[-1] // 2
    angles = torch.arange(first, first + x.shape[1])[:, None] * THETA ** (-torch.arange(half) / half)
    one, other = x[..., :half], x[..., half:]
    return torch.cat((one * angles.cos() - other * angles.sin(), other * angles.cos() + one * angles.sin()), -1)
