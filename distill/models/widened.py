"""An `eagle` chain written as an EAGLE-3 head of twice the width, which computes the same logits.

Owns the construction. EAGLE-3 has no projection of the token into the residual stream and none of the last output into
the next step; the width and one more layer make room for both. H is the width of the chain, [x; y] a state of 2 H.

    embedding            [e; e]                                        a norm over both halves is that over one
    committed input      fc, each feature normed: [fuse; fuse]
    drafted input        the final norm has weights [1; -1]: [a/rms; -a/rms] of the last output [a; a]
    first layer          each position attends to itself alone, value v1 = token(norm e) + carry(norm a), v2 = a/rms
                         output [v1 - v2; v1 + v2], where carry and v2 read the difference of the halves:
                         committed [fuse + v1; fuse + v1], drafted [v1; v1]; its MLP gives nothing
    layers of the chain  read the first half, and add to both halves alike
    head                 reads the first half

The difference of the halves is zero at committed positions and twice a/rms at drafted ones, so `carry` is silent at
committed ones. A position attends to itself alone because query and key of the first layer are one constant vector:
rotated, its product with itself is largest at distance 0, and by so much that the others have no weight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from distill.models.decoder import DecoderConfig, rope_tables
from distill.models.eagle import EagleDraft
from distill.models.layers import DraftLayer

MIN_GAP = 64.0
"""Least distance of the score of a position with itself to every other one, whose weight is then below 1e-27."""


@dataclass(frozen=True)
class WideHead:
    """The head, under the names of the speculators layout."""

    config: DecoderConfig
    """Sizes of its layers."""
    tensors: dict[str, Tensor]
    """float32, without `d2t` and `t2d`."""
    options: dict[str, Any]
    """Keys of the head's config."""


@torch.no_grad()
def widened(draft: EagleDraft, *, max_len: int) -> WideHead:
    """The head that computes what a chain computes.

    Args:
        draft: a chain; its weights are read in float32.
        max_len: longest text, in tokens.
    """
    source, eps = draft.config, draft.config.rms_norm_eps
    size, dim = source.hidden_size, source.head_dim
    heads = max(source.num_attention_heads, -(-2 * size // dim))  # The values of the first layer are two states.
    config = replace(
        source,
        hidden_size=2 * size,
        num_hidden_layers=source.num_hidden_layers + 1,
        num_attention_heads=heads,
        num_key_value_heads=heads,
    )
    ones, zeros, eye = torch.ones(size), torch.zeros(size), torch.eye(size)
    # The norm of a state of unit size divides by sqrt(1 + eps).
    unit = (1 + eps) ** 0.5 / 2
    carry = unit * _float(draft.carry.weight) * _float(draft.carry_norm)
    token, nothing = _float(draft.token.weight), torch.zeros(size, size)
    value = torch.zeros(heads * dim, 4 * size)
    value[: 2 * size] = torch.cat(
        (torch.cat((token, nothing, carry, -carry), 1), torch.cat((nothing, nothing, unit * eye, -unit * eye), 1))
    )
    output = torch.zeros(2 * size, heads * dim)
    output[:, : 2 * size] = torch.cat((torch.cat((eye, -eye), 1), torch.cat((eye, eye), 1)))
    constant = torch.full((heads * dim,), self_score(source, max_len))
    fuse, head = _float(draft.fuse.weight), _float(draft.head.weight) * _float(draft.final_norm)
    embed = _float(draft.embed)
    tensors = {
        "embed_tokens.weight": torch.cat((embed, embed), 1),
        "fc.weight": torch.cat((fuse, fuse)),
        **{f"fc_norm.{index}.weight": _float(norm) for index, norm in enumerate(draft.feature_norm)},
        "layers.0.input_layernorm.weight": torch.cat((_float(draft.token_norm), zeros)),
        "layers.0.hidden_norm.weight": torch.ones(2 * size),
        "layers.0.post_attention_layernorm.weight": torch.ones(2 * size),
        "layers.0.self_attn.q_proj.weight": torch.zeros(heads * dim, 4 * size),
        "layers.0.self_attn.k_proj.weight": torch.zeros(heads * dim, 4 * size),
        "layers.0.self_attn.v_proj.weight": value,
        "layers.0.self_attn.o_proj.weight": output,
        "layers.0.self_attn.q_proj.bias": constant,
        "layers.0.self_attn.k_proj.bias": constant.clone(),
        "layers.0.mlp.gate_proj.weight": torch.zeros(source.intermediate_size, 2 * size),
        "layers.0.mlp.up_proj.weight": torch.zeros(source.intermediate_size, 2 * size),
        "layers.0.mlp.down_proj.weight": torch.zeros(2 * size, source.intermediate_size),
        "norm.weight": torch.cat((ones, -ones)),
        "lm_head.weight": torch.cat((head, torch.zeros_like(head)), 1),
    }
    for index, layer in enumerate(draft.layers, 1):
        assert isinstance(layer, DraftLayer)
        tensors |= {f"layers.{index}.{name}": tensor for name, tensor in _layer(layer, config).items()}
    for index in range(config.num_hidden_layers):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            key, rows = f"layers.{index}.self_attn.{name}.bias", 2 * size if name == "o_proj" else heads * dim
            tensors.setdefault(key, torch.zeros(rows))
    return WideHead(
        config, tensors, {"target_hidden_size": size, "fc_norm": True, "norm_before_fc": False, "norm_output": True}
    )


def self_score(config: DecoderConfig, max_len: int) -> float:
    """The element of the constant query and key: a power of 2 that sets a position apart from all others.

    The product of rotated constant vectors c at distance n is 2 c^2 times the sum of cos(n w) over all frequencies w.
    """
    cosines, _ = rope_tables(config, max_len + 1, torch.device("cpu"))
    gaps = 2 * (1 - cosines[1:, : config.head_dim // 2].double()).sum(1) / config.head_dim**0.5
    value = 1.0
    while value**2 * float(gaps.min()) < MIN_GAP:
        value *= 2
    return value


def _layer(layer: DraftLayer, config: DecoderConfig) -> dict[str, Tensor]:
    """A layer of the chain at twice the width. Every query head gets a KV head of its own; further heads are zero."""
    source, dim = layer.config, config.head_dim
    size, real = source.hidden_size, source.num_attention_heads
    groups, rows = real // source.num_key_value_heads, config.num_attention_heads * dim

    def first_half(weight: Tensor, num_rows: int) -> Tensor:
        wide = torch.zeros(num_rows, 2 * size)
        wide[: len(weight), :size] = weight
        return wide

    def both_halves(weight: Tensor, num_columns: int) -> Tensor:
        wide = torch.zeros(2 * size, num_columns)
        wide[:size, : weight.shape[1]] = wide[size:, : weight.shape[1]] = weight
        return wide

    def repeated(weight: Tensor) -> Tensor:
        return weight.view(-1, dim, size).repeat_interleave(groups, 0).flatten(0, 1)

    inner = source.intermediate_size
    norms = {"input_layernorm": layer.input_norm, "post_attention_layernorm": layer.post_norm}
    return {
        **{f"{name}.weight": _float(norm).repeat(2) for name, norm in norms.items()},
        "self_attn.q_proj.weight": first_half(_float(layer.q.weight), rows),
        "self_attn.k_proj.weight": first_half(repeated(_float(layer.k.weight)), rows),
        "self_attn.v_proj.weight": first_half(repeated(_float(layer.v.weight)), rows),
        "self_attn.o_proj.weight": both_halves(_float(layer.o.weight), rows),
        "mlp.gate_proj.weight": first_half(_float(layer.gate.weight), inner),
        "mlp.up_proj.weight": first_half(_float(layer.up.weight), inner),
        "mlp.down_proj.weight": both_halves(_float(layer.down.weight), inner),
    }


def _float(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().float()
