"""Cost of a draft step relative to a target step, on this device with one request.

Owns the timing and the formula of the speed-up. Times kernels only, without scheduling and handoff between processes,
so the predicted speed-up is an upper bound. Knows nothing of acceptance.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from distill.models.decoder import DecoderConfig, DecoderLayer, FrozenTarget, PackedLinear, run_layer
from distill.models.eagle import EagleDraft
from distill.models.export import AnyDraft
from distill.models.layers import DraftLayer, PairLayer
from distill.models.medusa import MedusaDraft
from distill.models.parallel import ParallelDraft

CONTEXT = 256
"""Number of cached tokens while timing."""


@dataclass(frozen=True)
class StepCosts:
    """Durations with one request."""

    target_s: float
    """Seconds of a target step over one token."""
    verify_s: float
    """Seconds of a target step over K + 1 tokens."""
    draft_s: float
    """Seconds of one draft step."""
    k: int
    """Draft tokens per verify step."""
    num_passes: int
    """Draft steps per verify step: K for a chain, 1 for a parallel draft and for Medusa heads."""

    @property
    def draft_share(self) -> float:
        """Duration of a draft step over that of a target step."""
        return self.draft_s / self.target_s

    def speedup(self, tokens_per_step: float) -> float:
        """Predicted tokens per second over plain decoding: E / ((t_verify + passes * t_draft) / t_target)."""
        return tokens_per_step * self.target_s / (self.verify_s + self.num_passes * self.draft_s)


def measure(target: FrozenTarget, draft: AnyDraft, k: int, *, repeats: int = 30) -> StepCosts:
    """Median times of target steps over 1 and k + 1 tokens and of a draft step, after warming up.

    The draft step of a parallel draft or of Medusa heads drafts k tokens, at most as many as it has positions.
    """
    num_drafted = min(k, draft.positions) if isinstance(draft, ParallelDraft | MedusaDraft) else 1
    attend = cached_attention(target.config, target.device, target.dtype)
    ids = torch.zeros((1, k + 1), dtype=torch.int64, device=target.device)
    positions = CONTEXT + torch.arange(k + 1, device=target.device)[None]

    def step(rows: int) -> Callable[[], object]:
        return lambda: target.logits(target.forward(ids[:, :rows], positions[:, :rows], attend)).argmax(-1)

    # Interleaved, so that a slow moment of the machine affects all three equally.
    runs = (step(1), step(k + 1), draft_step(target, draft, num_drafted))
    times: list[list[float]] = [[], [], []]
    for number in range(repeats + 3):
        for index, run in enumerate(runs):
            began = time.perf_counter()
            run()
            if target.device.type == "cuda":
                torch.cuda.synchronize(target.device)
            if number >= 3:
                times[index].append(time.perf_counter() - began)
    plain, verify, drafted = (statistics.median(values) for values in times)
    return StepCosts(plain, verify, drafted, k, num_passes=-(-k // num_drafted))


def cached_attention(
    config: DecoderConfig, device: torch.device, dtype: torch.dtype
) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
    """Attention over CONTEXT earlier keys of every layer; their values do not affect the time."""
    shape = (config.num_hidden_layers, 2, 1, config.num_key_value_heads, CONTEXT, config.head_dim)
    cache = torch.zeros(shape, device=device, dtype=dtype)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = k.shape[1]
        cache[layer, 0, :, :, -n:], cache[layer, 1, :, :, -n:] = k.transpose(1, 2), v.transpose(1, 2)
        out = F.scaled_dot_product_attention(q.transpose(1, 2), cache[layer, 0], cache[layer, 1], enable_gqa=True)
        return out.transpose(1, 2)

    return attend


def draft_step(target: FrozenTarget, draft: AnyDraft, rows: int = 1) -> Callable[[], object]:
    """One step of the draft over `rows` positions of one request, with packed weights, as serving would run it."""
    if isinstance(draft, MedusaDraft):
        return _heads_step(target, draft, rows)
    config, dtype, device = draft.config, target.dtype, target.device
    attend = cached_attention(config, device, dtype)

    def packed(*linears: torch.nn.Linear) -> PackedLinear:
        return PackedLinear(torch.cat([linear.weight.detach() for linear in linears]).to(device, dtype), None, 1)

    # The part of a layer's q, k and v that reads the token is timed as a matrix of its own.
    pairs = [
        PackedLinear(_columns(layer, slice(config.hidden_size, None)).to(device, dtype), None, 1)
        for layer in draft.layers
        if isinstance(layer, PairLayer)
    ]

    def frozen(layer: torch.nn.Module) -> DecoderLayer:
        assert isinstance(layer, DraftLayer)
        norms = [norm.detach().to(device, dtype) for norm in (layer.input_norm, layer.post_norm)]
        return DecoderLayer(
            input_norm=norms[0],
            qkv=PackedLinear(_columns(layer, slice(config.hidden_size)).to(device, dtype), None, 1),
            q_norm=None,
            k_norm=None,
            output=packed(layer.o),
            post_norm=norms[1],
            gate_up=packed(layer.gate, layer.up),
            down=packed(layer.down),
        )

    layers, head = [frozen(layer) for layer in draft.layers], packed(draft.head)
    norm = draft.final_norm.detach().to(device, dtype)
    cos = torch.ones((1, 1, 1, config.head_dim), device=device, dtype=dtype)
    state = torch.zeros((1, rows, config.hidden_size), device=device, dtype=dtype)
    inner = [packed(draft.carry), packed(draft.token)] if isinstance(draft, EagleDraft) else []

    @torch.inference_mode()
    def run() -> Tensor:
        x = state
        for linear in inner:
            x = x + linear(F.rms_norm(state, (config.hidden_size,), norm, config.rms_norm_eps))
        for linear in pairs:
            linear(F.rms_norm(state, (config.hidden_size,), norm, config.rms_norm_eps))
        for index, layer in enumerate(layers):
            x = run_layer(config, index, layer, x, cos, cos, attend)
        return head(F.rms_norm(x, (config.hidden_size,), norm, config.rms_norm_eps)).argmax(-1)

    return run


def _heads_step(target: FrozenTarget, draft: MedusaDraft, rows: int) -> Callable[[], object]:
    """One pass of the first `rows` Medusa heads, for one request."""
    size, dtype, device = draft.config.hidden_size, target.dtype, target.device

    def packed(linear: torch.nn.Module, num_rows: int) -> PackedLinear:
        assert isinstance(linear, torch.nn.Linear)
        bias = None if linear.bias is None else linear.bias.detach().to(device, dtype)
        return PackedLinear(linear.weight.detach().to(device, dtype), bias, num_rows)

    heads = [[packed(block, 1) for block in blocks.children()] for blocks in draft.layers[:rows]]
    output, state = packed(draft.head, rows), torch.zeros((1, size), device=device, dtype=dtype)

    @torch.inference_mode()
    def run() -> Tensor:
        hidden = F.rms_norm(state, (size,), target.final_norm, draft.config.rms_norm_eps)
        states = []
        for blocks in heads:
            x = hidden
            for block in blocks:
                x = x + F.silu(block(x))
            states.append(x)
        return output(torch.cat(states)).argmax(-1)

    return run


def _columns(layer: DraftLayer, part: slice) -> Tensor:
    """These columns of the layer's q, k and v, stacked."""
    return torch.cat([linear.weight.detach()[:, part] for linear in (layer.q, layer.k, layer.v)])
