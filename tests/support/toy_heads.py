"""Medusa heads of random weights."""

from __future__ import annotations

import dataclasses

import torch

from engine.checkpoint.model_config import ModelConfig
from engine.medusa.heads import MedusaHeads
from engine.model.layers import PlainLinear, RmsNorm


def random_heads(*, num_heads: int, hidden: int, vocab: int, generator: torch.Generator) -> MedusaHeads:
    """Float32 heads with one residual block and an output layer each."""

    def linear(rows: int, bias: bool) -> PlainLinear:
        weight = torch.randn(rows, hidden, generator=generator) * hidden**-0.5
        return PlainLinear(weight, torch.randn(rows, generator=generator)) if bias else PlainLinear(weight)

    return MedusaHeads(
        config=dataclasses.replace(
            ModelConfig.parse({"medusa_num_heads": num_heads, "hidden_size": hidden, "vocab_size": vocab}),
            max_model_len=4096,
        ),
        norm=RmsNorm(1 + 0.1 * torch.randn(hidden, generator=generator), 1e-5),
        blocks=tuple((linear(hidden, True),) for _ in range(num_heads)),
        outputs=tuple(linear(vocab, False) for _ in range(num_heads)),
        draft_vocab=None,
        device=torch.device("cpu"),
        num_bytes=0,
    )
