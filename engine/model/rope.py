"""Rotary position embedding (RoPE), with the frequency scaling of long-context models.

Owns the angles and their application to q and k. Source: Su et al. 2021, RoFormer, eq. 34, in the half-split layout of
Hugging Face checkpoints: of R rotated dimensions, i and i + R / 2 form a pair. Frequencies depend on the served context
(`ModelConfig.for_context`), never on the length of a request.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.rope_config import RopeScaling


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotation of each row, in the dtype of the model: x * cos + swap_halves(x) * sin."""

    cos: torch.Tensor
    """[N, 1, R] cosines of the angles."""
    sin: torch.Tensor
    """[N, 1, R] sines of the angles, negated in the first half."""

    def apply(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotate the first R dimensions of heads, [N, H, head_dim]."""
        size = self.cos.shape[-1]
        rotated = heads if size == heads.shape[-1] else heads[..., :size]
        rotated = torch.addcmul(rotated * self.cos, rotated.roll(size // 2, -1), self.sin)
        return rotated if size == heads.shape[-1] else torch.cat((rotated, heads[..., size:]), -1)


class Rope:
    """The rotary embedding of one model.

    Args:
        config: gives base, head size and scaling.
        dtype: dtype of the rotation. Angles are float32.
        device: device of the rotation.
        is_local: whether it is that of the layers with a window, which are not scaled.
    """

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, is_local: bool = False
    ) -> None:
        plain = _plain(config, config.local_rope_theta) if is_local and config.local_rope_theta else None
        self._inverse_freq = (inverse_frequencies(config) if plain is None else plain).to(device)
        self._factor = attention_factor(config) if plain is None else 1.0
        self._dtype = dtype

    def at(self, positions: torch.Tensor) -> Rotation:
        """The rotation of rows at these positions, [N] int64."""
        angles = positions[:, None].float() * self._inverse_freq  # [N, head_dim / 2]
        cos, sin = angles.cos(), angles.sin()
        if self._factor != 1.0:
            cos, sin = cos * self._factor, sin * self._factor
        return Rotation(
            cos=torch.cat((cos, cos), -1).to(self._dtype).unsqueeze(1),
            sin=torch.cat((-sin, sin), -1).to(self._dtype).unsqueeze(1),
        )


def attention_factor(config: ModelConfig) -> float:
    """Factor of cosines and sines."""
    return 1.0 if config.rope_scaling is None else config.rope_scaling.attention_factor


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """[R / 2] float32, radians per position of each pair."""
    plain = _plain(config, config.rope_theta)
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "dynamic":
        return _plain(config, _dynamic_base(config, scaling))
    if scaling.kind == "yarn":
        return _yarn(plain, config, scaling)
    if scaling.kind == "longrope":
        is_long = config.max_model_len > scaling.original_max_len
        return plain / torch.tensor(scaling.long_factors if is_long else scaling.short_factors)
    return _llama3(plain, scaling)


def _plain(config: ModelConfig, theta: float) -> torch.Tensor:
    size = config.rotary_dim or config.head_dim
    return 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)


def _dynamic_base(config: ModelConfig, scaling: RopeScaling) -> float:
    """NTK-aware base for the served context, as `transformers` computes it for a sequence of that length."""
    size = config.rotary_dim or config.head_dim
    length = max(config.max_model_len, scaling.original_max_len)
    growth = scaling.factor * length / scaling.original_max_len - (scaling.factor - 1)
    return float(config.rope_theta * max(growth, 1.0) ** (size / (size - 2)))


def _yarn(plain: torch.Tensor, config: ModelConfig, scaling: RopeScaling) -> torch.Tensor:
    """Peng et al. 2023, YaRN, "NTK-by-parts": stretch long wavelengths, keep short ones, with a ramp between."""
    size = 2 * len(plain)

    def pair_of(turns: float) -> float:
        """The pair, counted in fractions, that makes so many turns within the original context."""
        wavelength = scaling.original_max_len / (turns * 2 * math.pi)
        return size * math.log(wavelength) / (2 * math.log(config.rope_theta))

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    width = high - low if high != low else 0.001
    stretched_share = ((torch.arange(len(plain), dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain / scaling.factor * stretched_share + plain * (1 - stretched_share)


def _llama3(plain: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3.1 scaling: stretch long wavelengths by `factor`, keep short ones, with a linear ramp between."""
    turns = scaling.original_max_len * plain / (2 * math.pi)  # turns within the original context
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept_share = ramp.clamp(0.0, 1.0)
    return kept_share * plain + (1 - kept_share) * plain / scaling.factor
