"""EAGLE-3 and P-EAGLE heads with random weights in both public layouts, and a plain implementation of both.

The implementation follows the definition of the format, not the engine: it has no cache and no batch, and computes the
whole text again for each drafted token.

    first layer   q, k, v read [norm(embedding of x[p]); norm(h)], h = fc(features at p - 1), or the head's own output
    residual      h, or norm(h) with `norm_before_residual`
    output        the state before the final norm is the next h, or the state after it with `norm_output`
    masked        of P-EAGLE: x is the mask token and `mask_hidden` stands for the features
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

MASK = "mask_hidden"


@dataclass(frozen=True)
class PublicHead:
    """A head under the names of the speculators layout."""

    layer: dict[str, Any]
    """`transformer_layer_config`."""
    options: dict[str, Any]
    """Keys of the head itself, such as `norm_before_residual`."""
    draft_vocab: Tensor
    """[N] target ids, ascending."""
    tensors: dict[str, Tensor]
    positions: int = 3
    """`speculative_tokens` of the speculators layout."""


def make_head(
    target: Path,
    *,
    draft_vocab: Tensor,
    num_features: int = 3,
    layer: dict[str, Any] | None = None,
    own_embedding: bool = False,
    seed: int = 0,
    **options: Any,
) -> PublicHead:
    """A random head for a target folder. Biases, norms and head weights are large enough that each part matters.

    Args:
        target: model folder of the target.
        draft_vocab: [N] target ids of the head's columns.
        num_features: target layers that it reads.
        layer: changes of the transformer layer's config.
        own_embedding: whether the head has an embedding of its own.
        seed: of the weights.
        options: keys of the head itself. With `mask_token_id` it is a P-EAGLE head.
    """
    of_target = json.loads((target / "config.json").read_text())
    size, vocab = of_target["hidden_size"], of_target["vocab_size"]
    config: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": size,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "rope_theta": 500.0,
        "attention_bias": False,
    } | (layer or {})
    hidden, dim, inner = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    rng = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        values: Tensor = torch.randn(rows, columns, generator=rng) / columns**0.5
        return values

    def norm(length: int) -> Tensor:
        return 1.0 + 0.3 * torch.randn(length, generator=rng)

    width = num_features * size
    tensors = {"fc.weight": matrix(hidden, width), "norm.weight": norm(hidden)}
    tensors["lm_head.weight"] = 4 * matrix(len(draft_vocab), hidden)
    for index in range(config["num_hidden_layers"]):
        prefix, fan_in = f"layers.{index}.", hidden if index else 2 * hidden
        for name, rows in (("q", heads * dim), ("k", kv_heads * dim), ("v", kv_heads * dim)):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = 2 * matrix(rows, fan_in)
            if config["attention_bias"]:
                tensors[f"{prefix}self_attn.{name}_proj.bias"] = matrix(1, rows)[0]
        tensors[prefix + "self_attn.o_proj.weight"] = matrix(hidden, heads * dim)
        if config["attention_bias"]:
            tensors[prefix + "self_attn.o_proj.bias"] = matrix(1, hidden)[0]
        if config["model_type"] == "qwen3":
            tensors |= {f"{prefix}self_attn.{name}_norm.weight": norm(dim) for name in "qk"}
        tensors |= {f"{prefix}mlp.{name}_proj.weight": matrix(inner, hidden) for name in ("gate", "up")}
        tensors[prefix + "mlp.down_proj.weight"] = matrix(hidden, inner)
        tensors |= {f"{prefix}{name}_layernorm.weight": norm(hidden) for name in ("input", "post_attention")}
    tensors["layers.0.hidden_norm.weight"] = norm(hidden)
    if own_embedding:
        tensors["embed_tokens.weight"] = matrix(vocab, hidden)
    if options.get("norm_before_fc"):
        tensors["input_norm.weight"] = norm(width)
    if options.get("fc_norm"):
        tensors |= {f"fc_norm.{index}.weight": norm(size) for index in range(num_features)}
    if "mask_token_id" in options:
        tensors[MASK] = 3 * matrix(1, width)
    return PublicHead(config, options, draft_vocab, tensors)


def write_head(head: PublicHead, folder: Path, layout: str, **changes: Any) -> Path:
    """Write a head in the layout `authors` or `speculators`. `changes` are keys of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    size, vocab = len(head.draft_vocab), head.layer["vocab_size"]
    tensors = dict(head.tensors)
    if size < vocab:
        tensors["d2t"] = head.draft_vocab - torch.arange(size)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, head.draft_vocab, value=True)
    if layout == "authors":
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
        config = {**head.layer, **head.options, "architectures": ["LlamaForCausalLM"], "draft_vocab_size": size}
        if MASK in tensors:
            config["ptd_token_id"] = config.pop("mask_token_id")
    else:
        if MASK in tensors:
            tensors[MASK] = tensors[MASK][None]
        config = {
            "architectures": ["PEagleSpeculator" if MASK in tensors else "Eagle3Speculator"],
            "speculators_model_type": "peagle" if MASK in tensors else "eagle3",
            "speculators_version": "0.9.0",
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": head.positions}],
                "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": None},
            },
            "transformer_layer_config": head.layer,
            "draft_vocab_size": size,
            **head.options,
        }
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def reference_logits(
    head: PublicHead, embedding: Tensor, tokens: Sequence[int], num_known: int, features: Tensor
) -> list[Tensor]:
    """[N] logits after the first `num_known` tokens, and after each further one.

    Args:
        head: the head.
        embedding: [vocab, hidden] of the target; unused where the head has its own.
        tokens: known tokens, then drafted ones.
        num_known: tokens that the target has computed but the last one.
        features: [num_known - 1, F * T] of the target.
    """
    embedding = head.tensors.get("embed_tokens.weight", embedding)
    sources = list(_fused(head, features))
    found = []
    for known in range(num_known, len(tokens) + 1):
        x = _layers(head, embedding[torch.tensor(list(tokens[1:known]))], torch.stack(sources))[-1]
        normed = _norm(head, x, head.tensors["norm.weight"])
        found.append(head.tensors["lm_head.weight"] @ normed)
        sources.append(normed if head.options.get("norm_output") else x)
    return found


def parallel_logits(
    head: PublicHead, embedding: Tensor, tokens: Sequence[int], features: Tensor, num_drafted: int
) -> Tensor:
    """[num_drafted, N] logits of the tokens that one pass of a P-EAGLE head drafts.

    Args:
        head: the head.
        embedding: [vocab, hidden] of the target; unused where the head has its own.
        tokens: known tokens.
        features: [len(tokens) - 1, F * T] of the target.
        num_drafted: the first is drafted at the last known token, the others at masked positions after it.
    """
    embedding = head.tensors.get("embed_tokens.weight", embedding)
    ids = [*tokens[1:], *[head.options["mask_token_id"]] * (num_drafted - 1)]
    masked = head.tensors[MASK].expand(num_drafted - 1, -1)
    x = _layers(head, embedding[torch.tensor(ids)], _fused(head, torch.cat((features, masked))))
    return _norm(head, x[-num_drafted:], head.tensors["norm.weight"]) @ head.tensors["lm_head.weight"].T


def _norm(head: PublicHead, x: Tensor, weight: Tensor) -> Tensor:
    normed: Tensor = x / (x.square().mean(-1, keepdim=True) + head.layer["rms_norm_eps"]).sqrt() * weight
    return normed


def _fused(head: PublicHead, features: Tensor) -> Tensor:
    if head.options.get("norm_before_fc"):
        features = _norm(head, features, head.tensors["input_norm.weight"])
    if head.options.get("fc_norm"):
        weights = [tensor for name, tensor in sorted(head.tensors.items()) if name.startswith("fc_norm.")]
        parts = features.chunk(len(weights), -1)
        features = torch.cat([_norm(head, part, weight) for part, weight in zip(parts, weights, strict=True)], -1)
    return features @ head.tensors["fc.weight"].T


def _layers(head: PublicHead, embedded: Tensor, hidden: Tensor) -> Tensor:
    """[T, hidden] of each input, before the final norm."""
    tensors, config = head.tensors, head.layer
    # Only distances between positions matter: the first pair has position 0 here.
    rope = LlamaRotaryEmbedding(transformers.LlamaConfig(**{**config, "model_type": "llama"}))
    cos, sin = rope(hidden, torch.arange(len(hidden))[None])
    for index in range(config["num_hidden_layers"]):
        prefix = f"layers.{index}."
        normed = _norm(head, hidden, tensors[prefix + ("input_layernorm.weight" if index else "hidden_norm.weight")])
        residual = hidden
        if index == 0:
            residual = normed if head.options.get("norm_before_residual") else hidden
            normed = torch.cat((_norm(head, embedded, tensors["layers.0.input_layernorm.weight"]), normed), -1)
        q, k, v = (_project(head, f"{prefix}self_attn.{name}", normed) for name in "qkv")
        q, k = apply_rotary_pos_emb(q[None], k[None], cos, sin)
        context = F.scaled_dot_product_attention(q, k, v[None], is_causal=True, enable_gqa=True)[0]
        out = F.linear(
            context.transpose(0, 1).flatten(1),
            tensors[prefix + "self_attn.o_proj.weight"],
            tensors.get(prefix + "self_attn.o_proj.bias"),
        )
        hidden = residual + out
        normed = _norm(head, hidden, tensors[prefix + "post_attention_layernorm.weight"])
        gate, up, down = (tensors[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        hidden = hidden + (F.silu(normed @ gate.T) * (normed @ up.T)) @ down.T
    return hidden


def _project(head: PublicHead, name: str, x: Tensor) -> Tensor:
    """[heads, T, head_dim]."""
    out = F.linear(x, head.tensors[f"{name}_proj.weight"], head.tensors.get(f"{name}_proj.bias"))
    out = out.view(len(x), -1, head.layer["head_dim"])
    norm = head.tensors.get(f"{name}_norm.weight")
    return (out if norm is None else _norm(head, out, norm)).transpose(0, 1)
