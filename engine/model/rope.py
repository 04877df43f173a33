"""Rotary position embedding (RoPE), with the frequency scaling of long-context models.

Owns the angles and their application to q and k. Source: Su et al. 2021, RoFormer, eq. 34, in the half-split layout of
Hugging Face checkpoints: dimensions i and i + head_dim / 2 form a pair.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from engine.checkpoint.model_config import ModelConfig, RopeScaling


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotation of each row, in the dtype of the model: x * cos + swap_halves(x) * sin."""

    cos: torch.Tensor
    """[N, 1, head_dim] cosines of the angles."""
    sin: torch.Tensor
    """[N, 1, head_dim] sines of the angles, negated in the first half."""

    def apply(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotate heads, [N, H, head_dim]."""
        return torch.addcmul(heads * self.cos, heads.roll(heads.shape[-1] // 2, -1), self.sin)


class Rope:
    """The rotary embedding of one model.

    Args:
        config: gives base, head size and scaling.
        dtype: dtype of the rotation. Angles are float32.
        device: device of the rotation.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self._inverse_freq = inverse_frequencies(config).to(device)
        self._dtype = dtype

    def at(self, positions: torch.Tensor) -> Rotation:
        """The rotation of rows at these positions, [N] int64."""
        angles = positions[:, None].float() * self._inverse_freq  # [N, head_dim / 2]
        cos, sin = angles.cos(), angles.sin()
        return Rotation(
            cos=torch.cat((cos, cos), -1).to(self._dtype).unsqueeze(1),
            sin=torch.cat((-sin, sin), -1).to(self._dtype).unsqueeze(1),
        )


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """[head_dim / 2] float32, radians per position of each pair."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    plain = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    return _llama3(plain, scaling)


def _llama3(plain: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3.1 scaling: stretch long wavelengths by `factor`, keep short ones, with a linear ramp between."""
    turns = scaling.original_max_len * plain / (2 * math.pi)  # turns within the original context
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept_share = ramp.clamp(0.0, 1.0)
    return kept_share * plain + (1 - kept_share) * plain / scaling.factor
