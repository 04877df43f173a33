"""A target and a draft: random weights, and a draft that agrees with the target at a planted rate.

Owns the two models, the target's folder where a loader needs one, and the draft's link to the engine of this process.
The draft is the lower layers of the target. The target's upper layers are scaled down: the smaller they are, the more
often both choose the same token.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from bench.gpu.lab import Lab
from engine.checkpoint.model_config import ModelConfig
from engine.core.block_pool import BlockPool
from engine.core.step import DeviceDrafts
from engine.draft.architectures import PlainArchitecture
from engine.draft.messages import DraftRequestRow, DraftResponse
from engine.draft.proposer import OnDevice, Proposer
from engine.draft.remote import RemoteDrafter
from engine.model.collectives import Solo
from engine.model.decoder import Decoder, DecoderWeights, Layer, dense_mlp
from engine.model.device import Compute
from engine.model.layers import Block, Experts, GatedMlp, PlainLinear, RmsNorm, make_linear
from engine.model.runner import ModelRunner
from engine.sampling.staging import to_device, to_host

SHAPE_8B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
SHAPE_DRY = SHAPE_8B | {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SHAPE_SMALL = SHAPE_8B | {
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 8,
}
"""About 1 GB of weights in bfloat16."""
UPPER_SCALE = 0.05
"""Factor of what the target's upper layers add to the residual."""
MAX_TOKENS = 4096
"""Committed tokens of one draft request."""


def planted_pair(
    lab: Lab, *, scale: float = UPPER_SCALE, shape: dict[str, Any] | None = None
) -> tuple[Decoder, Decoder]:
    """A target, and a draft of its lower eighth.

    Args:
        lab: gives the device.
        scale: factor of what the target's upper layers add to the residual.
        shape: config.json of the target; None takes that of an 8B model. Its lower eighth has no experts.
    """
    config = ModelConfig.parse(shape or lab.pick(SHAPE_8B, SHAPE_DRY))
    dtype = lab.pick(torch.bfloat16, torch.float32)
    generator = torch.Generator(lab.device).manual_seed(0)

    def weight(rows: int, columns: int, factor: float = 1.0) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=generator, device=lab.device, dtype=torch.float32)
        return values.mul_(factor * columns**-0.5).to(dtype)

    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    num_lower = max(1, config.num_layers // 8)

    def norm() -> RmsNorm:
        return RmsNorm(torch.ones(hidden, dtype=dtype, device=lab.device), config.rms_norm_eps)

    def mlp(size: int, factor: float) -> GatedMlp:
        shapes = ((size, hidden, 1.0), (size, hidden, 1.0), (hidden, size, factor))
        return GatedMlp(*(make_linear(weight(*each)) for each in shapes))

    def block(index: int, factor: float) -> Block:
        experts = config.experts
        if experts is None or index in experts.dense_layers:
            return mlp(inner, factor)
        return Experts(
            make_linear(weight(experts.num_experts, hidden)),
            [mlp(experts.intermediate_size, factor) for _ in range(experts.num_experts)],
            per_token=experts.per_token,
            normalise=experts.normalise,
        )

    def layer(index: int) -> Layer:
        factor = 1.0 if index < num_lower else scale
        return Layer(
            input_norm=norm(),
            qkv=make_linear(weight(heads + 2 * kv_heads, hidden)),
            q_norm=None,
            k_norm=None,
            o=make_linear(weight(hidden, heads, factor)),
            mlp_norm=norm(),
            mlp=block(index, factor),
        )

    with torch.inference_mode():
        layers = tuple(layer(index) for index in range(config.num_layers))
        embedding, head = (
            weight(config.vocab_size, hidden) * hidden**0.5,
            make_linear(weight(config.vocab_size, hidden)),
        )
        weights = DecoderWeights(embedding, layers, norm(), head, None)
    small = replace(config, num_layers=num_lower)
    return _decoder(lab, config, weights, dtype), _decoder(
        lab, small, replace(weights, layers=layers[:num_lower]), dtype
    )


def _decoder(lab: Lab, config: ModelConfig, weights: DecoderWeights, dtype: torch.dtype) -> Decoder:
    attention = {0: lab.attention(config.num_heads // config.num_kv_heads, dtype)}
    compute = Compute(dtype, lab.device, "torch")
    return Decoder(config, weights, compute, collectives=Solo(), attention=attention, feature_layers=())


def weight_bytes(decoder: Decoder) -> int:
    """Bytes that a forward of few rows reads: all layers and the head."""
    weights = decoder._weights
    mlps = [dense_mlp(each) for each in weights.layers]
    linears = [part for each in weights.layers for part in (each.qkv, each.o)]
    linears += [part for mlp in mlps for part in (mlp.gate, mlp.up, mlp.down)]
    return sum(part.weight.nbytes for part in [*linears, weights.head] if isinstance(part, PlainLinear))


def save_model(model: Decoder, shape: dict[str, Any], folder: Path) -> None:
    """Write a planted model as a folder that `load_model` reads.

    Args:
        model: from `planted_pair`, without experts.
        shape: its config.json.
        folder: exists.
    """
    weights, config = model._weights, model.config
    kv = config.num_kv_heads * config.head_dim
    tensors = {
        "model.embed_tokens.weight": model.embedding,
        "model.norm.weight": weights.final_norm.weight,
        "lm_head.weight": _weight(weights.head),
    }
    for index, layer in enumerate(weights.layers):
        query, key, value = torch.split(_weight(layer.qkv), [config.num_heads * config.head_dim, kv, kv])
        mlp = dense_mlp(layer)
        parts = {
            "input_layernorm": layer.input_norm.weight,
            "post_attention_layernorm": layer.mlp_norm.weight,
            **dict(zip(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), (query, key, value), strict=True)),
            "self_attn.o_proj": _weight(layer.o),
            "mlp.gate_proj": _weight(mlp.gate),
            "mlp.up_proj": _weight(mlp.up),
            "mlp.down_proj": _weight(mlp.down),
        }
        tensors |= {f"model.layers.{index}.{name}.weight": tensor for name, tensor in parts.items()}
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(shape))


def _weight(linear: Any) -> torch.Tensor:
    if not isinstance(linear, PlainLinear):
        raise TypeError("the planted model has layers of another kind")
    return linear.weight


class LocalLink:
    """The link of a draft in this process, on the device of the target: what the draft buffer is between two.

    Args:
        lab: gives the device.
        proposer: the draft.
        max_rows, max_k: limits of a draft request.
        vocab: columns of the draft's probabilities.
    """

    features = None

    def __init__(self, lab: Lab, proposer: Proposer, *, max_rows: int, max_k: int, vocab: int) -> None:
        self._proposer = proposer
        self.probs = torch.zeros(max_rows, max_k, vocab, device=lab.device)
        ids = torch.zeros(max_rows, max_k, dtype=torch.int32, device=lab.device)
        confidences = torch.zeros(max_rows, max_k, device=lab.device)
        new_tokens = torch.zeros(MAX_TOKENS, dtype=torch.int32, device=lab.device)
        self._on_device = OnDevice(ids, confidences, new_tokens, to_host)
        self._seq = 0

    def drafted(self, num_rows: int) -> DeviceDrafts:
        on_device = self._on_device
        return DeviceDrafts(
            on_device.token_ids[:num_rows].long(), on_device.confidences[:num_rows], self.probs[:num_rows]
        )

    def ask(self, rows: Sequence[DraftRequestRow], released: Sequence[int] = (), *, deadline_s: float) -> DraftResponse:
        del deadline_s  # A draft in this process cannot be silent.
        begin = time.perf_counter()
        tokens = np.array([token for row in rows for token in row.new_tokens], dtype=np.int32)
        (staged,) = to_device([tokens], self.probs.device)
        self._on_device.new_tokens[: len(tokens)].copy_(staged)
        found = self._proposer.propose(rows, released, self.probs, None, self._on_device)
        self._seq += 1
        return DraftResponse(1, self._seq, found, time.perf_counter() - begin)

    def mark_step(self, *, runs: bool) -> None:
        """Do nothing: nobody waits for the end of a step."""

    def close(self) -> None:
        """Do nothing: the draft is in this process."""


def local_link(lab: Lab, draft: Decoder, *, num_blocks: int, max_rows: int, max_k: int) -> LocalLink:
    """A link to a draft in this process, with its own KV cache of `num_blocks` blocks."""
    runner = ModelRunner(draft, num_blocks=num_blocks, block_size=lab.block_size)
    pool = BlockPool(num_blocks, lab.block_size, prefix_cache=False)
    proposer = Proposer(PlainArchitecture(runner.forward), pool, vocab=None, max_model_len=num_blocks * lab.block_size)
    return LocalLink(lab, proposer, max_rows=max_rows, max_k=max_k, vocab=draft.logit_width)


def local_drafter(link: LocalLink, *, max_rows: int) -> RemoteDrafter:
    """A drafter through a link."""
    drafter = RemoteDrafter(max_request_tokens=MAX_TOKENS, max_released=max_rows, deadline_s=60.0, on_down=print)
    drafter.attach(link)
    return drafter
