"""The frozen target in training: weights from which drafts start, and a plain forward to compare their cost with.

Owns a plain Llama-family decoder (Llama, Mistral, Qwen2, Qwen3 weights, safetensors only) with injected attention.
Drafts are timed with the same parts. On CPU in bfloat16 the weights are prepacked for oneDNN. Data are not generated
with it but with the forward that serves. Knows nothing of sampling, shards or drafts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from engine.checkpoint.draft_check import vocabulary_digest

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [B, T, heads, d], k [B, T, kv_heads, d], v like k) -> [B, T, heads, d]."""


@dataclass(frozen=True)
class DecoderConfig:
    """The dimensions of a Llama-family decoder, named as in its Hugging Face `config.json`."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DecoderConfig:
        """Read a Hugging Face config; RoPE scaling is refused, because features would be wrong without an error.

        Raises:
            ValueError: the config has another RoPE type than the default.
        """
        rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type != "default":
            raise ValueError(f"rope_type: {rope_type!r} is not supported for distillation; allowed: 'default'")
        heads = int(values["num_attention_heads"])
        return cls(
            hidden_size=int(values["hidden_size"]),
            intermediate_size=int(values["intermediate_size"]),
            num_hidden_layers=int(values["num_hidden_layers"]),
            num_attention_heads=heads,
            num_key_value_heads=int(values.get("num_key_value_heads") or heads),
            head_dim=int(values.get("head_dim") or values["hidden_size"] // heads),
            vocab_size=int(values["vocab_size"]),
            rms_norm_eps=float(values.get("rms_norm_eps", 1e-5)),
            rope_theta=float(values.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis (Zhang and Sennrich 2019)."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rope_tables(config: DecoderConfig, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [length, head_dim] in float32, halves repeated (Su et al. 2021, the layout of Hugging Face)."""
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
    inverse = 1.0 / config.rope_theta ** (steps / config.head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), inverse)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to x [B, T, heads, d] with cos and sin [B or 1, T, 1, d]."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


class PackedLinear:
    """A frozen linear map; prepacked for oneDNN on CPU in bfloat16 (2-3 times faster on small batches)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, rows: int) -> None:
        self.weight, self.bias = weight, bias
        self.packed: Tensor | None = None
        if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and _has_onednn():
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        if self.packed is None:
            return F.linear(x, self.weight, self.bias)
        flat = x.reshape(-1, x.shape[-1])
        out = torch.ops.mkldnn._linear_pointwise(flat, self.packed, self.bias, "none", [], "")
        result: Tensor = out.view(*x.shape[:-1], -1)
        return result


@dataclass(frozen=True)
class DecoderLayer:
    """Weights of one layer, projections fused."""

    input_norm: Tensor
    qkv: PackedLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: PackedLinear
    post_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear


class FrozenTarget:
    """The target model with fixed weights.

    Args:
        folder: Hugging Face folder with `config.json` and safetensors.
        feature_layers: layers whose outputs (residual stream after the layer) drafts read; the last layer's is taken
            before the final norm.
        rows: rows of a typical forward, a hint for weight packing.
    """

    def __init__(
        self,
        folder: Path,
        *,
        feature_layers: tuple[int, ...],
        device: str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        rows: int = 96,
        max_len: int = 2048,
    ) -> None:
        self.folder = folder
        self.config = DecoderConfig.from_dict(json.loads((folder / "config.json").read_text()))
        bad = [layer for layer in feature_layers if not 0 <= layer < self.config.num_hidden_layers]
        if bad:
            raise ValueError(f"feature_layers: {bad} out of range; allowed: 0..{self.config.num_hidden_layers - 1}")
        self.feature_layers = feature_layers
        self.device, self.dtype = torch.device(device), dtype
        weights = load_weights(folder, self.device, dtype)
        self.embed = weights["model.embed_tokens.weight"]
        self.final_norm = weights["model.norm.weight"]
        self.head_weight = weights.get("lm_head.weight", self.embed)
        self.head = PackedLinear(self.head_weight, None, rows)
        self.layers = [_layer(weights, index, rows) for index in range(self.config.num_hidden_layers)]
        cos, sin = rope_tables(self.config, max_len, self.device)
        self._cos, self._sin = cos.to(dtype), sin.to(dtype)

    @torch.inference_mode()
    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """[B, T, H] after the final norm, of ids [B, T] at positions [B, T]; a cache, if any, belongs to `attend`."""
        c = self.config
        cos, sin = self._cos[positions].unsqueeze(2), self._sin[positions].unsqueeze(2)
        x = F.embedding(ids, self.embed)
        for index, layer in enumerate(self.layers):
            x = run_layer(c, index, layer, x, cos, sin, attend)
        return rms_norm(x, self.final_norm, c.rms_norm_eps)

    @torch.inference_mode()
    def logits(self, last: Tensor) -> Tensor:
        """Logits [..., V] in the compute type, of hidden states `last` [..., H]."""
        return self.head(last)


def run_layer(
    config: DecoderConfig, index: int, layer: DecoderLayer, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend
) -> Tensor:
    """One decoder layer: x [B, T, H] -> [B, T, H]."""
    c = config
    h = rms_norm(x, layer.input_norm, c.rms_norm_eps)
    heads = torch.unflatten(layer.qkv(h), -1, (-1, c.head_dim))
    q, k, v = torch.split(heads, [c.num_attention_heads, *[c.num_key_value_heads] * 2], dim=2)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = rms_norm(q, layer.q_norm, c.rms_norm_eps), rms_norm(k, layer.k_norm, c.rms_norm_eps)
    mixed = attend(index, rotate(q, cos, sin), rotate(k, cos, sin), v)
    x = x + layer.output(mixed.flatten(2))
    h = rms_norm(x, layer.post_norm, c.rms_norm_eps)
    gate, up = layer.gate_up(h).chunk(2, dim=-1)
    return x + layer.down(F.silu(gate) * up)


def causal_attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention within the span, without a cache."""
    del layer
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    return out.transpose(1, 2)


def load_weights(folder: Path, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files.

    Raises:
        FileNotFoundError: no `*.safetensors` in the folder.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder}: no *.safetensors here; other formats are not loaded")
    weights: dict[str, Tensor] = {}
    for file in files:
        weights.update(load_file(file))
    return {name: value.to(device=device, dtype=dtype) for name, value in weights.items()}


def fingerprint(folder: Path) -> dict[str, Any]:
    """Values that a draft and its target must share: hidden size, number of layers, vocabulary size and tokens."""
    config = asdict(DecoderConfig.from_dict(json.loads((folder / "config.json").read_text())))
    names = ("hidden_size", "num_hidden_layers", "vocab_size")
    return {**{name: config[name] for name in names}, "vocabulary_sha256": vocabulary_digest(folder / "tokenizer.json")}


def _has_onednn() -> bool:
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def _layer(weights: dict[str, Tensor], index: int, rows: int) -> DecoderLayer:
    prefix = f"model.layers.{index}."

    def fused(*names: str) -> PackedLinear:
        weight = torch.cat([weights[f"{prefix}{name}.weight"] for name in names])
        biases = [weights.get(f"{prefix}{name}.bias") for name in names]
        present = [bias for bias in biases if bias is not None]
        return PackedLinear(weight, torch.cat(present) if len(present) == len(names) else None, rows)

    return DecoderLayer(
        input_norm=weights[prefix + "input_layernorm.weight"],
        qkv=fused("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        q_norm=weights.get(prefix + "self_attn.q_norm.weight"),
        k_norm=weights.get(prefix + "self_attn.k_norm.weight"),
        output=fused("self_attn.o_proj"),
        post_norm=weights[prefix + "post_attention_layernorm.weight"],
        gate_up=fused("mlp.gate_proj", "mlp.up_proj"),
        down=fused("mlp.down_proj"),
    )
