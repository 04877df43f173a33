"""Rotary position embedding, with the frequency scaling of long-context models.

Owns the angles and their application to q and k. Source: Su et al. 2021, RoFormer, eq. 34, in the half-split layout of
Hugging Face checkpoints: dimension i turns together with dimension i + head_dim / 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from engine.checkpoint.model_config import ModelConfig, RopeScaling


@dataclass(frozen=True, slots=True)
class Rotation:
    """cos and signed sin of each row's angles, [N, 1, head_dim], dtype of the model."""

    cos: torch.Tensor
    sin: torch.Tensor
    """Negative in the first half: x * cos + swap_halves(x) * sin is the rotation."""

    def apply(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotate heads [N, H, head_dim]."""
        return torch.addcmul(heads * self.cos, heads.roll(heads.shape[-1] // 2, -1), self.sin)


class Rope:
    """The rotary embedding of one model.

    Args:
        config: gives base, head size and scaling.
        dtype: of the rotation; the angles are float32.
        device: of the rotation.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self._inverse_freq = inverse_frequencies(config).to(device)
        self._dtype = dtype

    def at(self, positions: torch.Tensor) -> Rotation:
        """The rotation of rows at positions [N], int64."""
        angles = positions[:, None].float() * self._inverse_freq  # [N, head_dim / 2]
        cos, sin = angles.cos(), angles.sin()
        return Rotation(
            cos=torch.cat((cos, cos), -1).to(self._dtype).unsqueeze(1),
            sin=torch.cat((-sin, sin), -1).to(self._dtype).unsqueeze(1),
        )


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """[head_dim / 2] float32: radians per position."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    plain = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    return _llama3(plain, scaling)


def _llama3(plain: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3.1's rule: waves longer than the trained context are slowed by `factor`, short ones kept."""
    turns = scaling.original_max_len * plain / (2 * math.pi)  # full turns within the original context
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = ramp.clamp(0.0, 1.0)
    return kept * plain + (1 - kept) * plain / scaling.factor
