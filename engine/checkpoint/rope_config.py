"""The rotary embedding in a config.json: base, rotated dimensions and the scaling for long contexts.

Owns both spellings: `rope_parameters` (transformers 5), also one set per kind of layer, and `rope_theta` with
`rope_scaling`. `engine.model.rope` computes the frequencies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, cast

from engine.checkpoint.config_keys import Keys
from engine.errors import ConfigError

ScalingKind = Literal["linear", "dynamic", "yarn", "longrope", "llama3"]
_KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Scaling of the rotary frequencies for long contexts."""

    kind: ScalingKind
    factor: float = 1.0
    """Wavelengths are multiplied by this; with `llama3` and `yarn` only long ones."""
    low_freq_factor: float = 1.0
    """`llama3`: a pair with fewer turns than this within `original_max_len` is scaled by `factor`."""
    high_freq_factor: float = 4.0
    """`llama3`: a pair with more turns than this within `original_max_len` is not scaled."""
    original_max_len: int = 8192
    """Context length of the original training, in tokens. Unused by `linear`."""
    beta_fast: float = 32.0
    """`yarn`: a pair with more turns than this within `original_max_len` is not scaled."""
    beta_slow: float = 1.0
    """`yarn`: a pair with fewer turns than this within `original_max_len` is scaled by `factor`."""
    truncate: bool = True
    """`yarn`: round the ends of the ramp to whole pairs."""
    short_factors: tuple[float, ...] = ()
    """`longrope`: divisor of each frequency while the served context is at most `original_max_len`."""
    long_factors: tuple[float, ...] = ()
    """`longrope`: divisor of each frequency for longer contexts."""
    attention_factor: float = 1.0
    """Cosines and sines are multiplied by this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """The rotary embedding of a model."""

    theta: float
    scaling: RopeScaling | None = None
    rotated_share: float = 1.0
    """Share of each head's dimensions that is rotated."""
    local_theta: float | None = None
    """Base of the layers with a sliding window, which are not scaled; None if they are like the others."""
    max_len: int = 0
    """Longest context that the scaling was made for; 0 if it does not say."""


def read_rope(values: dict[str, Any], *, max_position: int) -> RopeConfig:
    """The rotary embedding of a model.

    Args:
        values: of config.json.
        max_position: value of `max_position_embeddings`.

    Raises:
        ConfigError: a kind of scaling is not supported, or a key is missing or malformed.
    """
    family = values["model_type"]
    name = "rope_parameters" if values.get("rope_parameters") is not None else "rope_scaling"
    rope = values.get(name) or {}
    if not isinstance(rope, dict):
        raise ConfigError(f"{name}: {rope!r} is not an object")
    local_theta = None
    default_theta = {"gemma3_text": 1_000_000.0, "mixtral": 1_000_000.0}.get(family, 10000.0)
    if family == "gemma3_text":
        local_theta, rope = _gemma_layers(values, name, rope)
    theta = Keys({"rope_theta": rope.get("rope_theta", values.get("rope_theta"))}).number("rope_theta", default_theta)
    share_of = {"partial_rotary_factor": rope.get("partial_rotary_factor", values.get("partial_rotary_factor"))}
    share = Keys(share_of).number("partial_rotary_factor", 1.0)
    if share > 1.0 or (share < 1.0 and family != "phi3"):
        raise ConfigError(f"partial_rotary_factor: {share!r} is not supported for {family}; allowed: 1.0")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if family == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"  # Earlier names of the same scaling in this family.
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ConfigError(f"{name}.rope_type: {kind!r} is not supported; allowed: {', '.join(_KINDS)}")
    if kind == "default":
        return RopeConfig(theta=theta, rotated_share=share, local_theta=local_theta)
    defaults = {"original_max_position_embeddings": values.get("original_max_position_embeddings")}
    scaling = _scaling(cast(ScalingKind, kind), Keys(defaults | rope), max_position, theta)
    longest = {"yarn": scaling.original_max_len * scaling.factor, "dynamic": max_position * scaling.factor}
    return RopeConfig(
        theta=theta,
        scaling=scaling,
        rotated_share=share,
        local_theta=local_theta,
        max_len=min(int(longest.get(kind, 0)), 1 << 31),
    )


def rotary_dim(head_dim: int, share: float, scaling: RopeScaling | None) -> int:
    """Dimensions of a head that are rotated.

    Raises:
        ConfigError: it is no even number, or the factors of longrope are of another number.
    """
    size = int(head_dim * share)
    if size < 2 or size % 2:
        raise ConfigError(f"partial_rotary_factor: {share} of head_dim {head_dim} is not an even number above 0")
    if scaling is not None and scaling.kind == "longrope":
        for name, factors in (("short_factor", scaling.short_factors), ("long_factor", scaling.long_factors)):
            if len(factors) != size // 2:
                raise ConfigError(f"{name}: {len(factors)} numbers given; {size // 2} are needed, one per pair")
    if scaling is not None and scaling.kind == "dynamic" and size < 4:
        raise ConfigError(f"rope_type: dynamic needs at least 4 rotated dimensions, given {size}")
    return size


def _gemma_layers(values: dict[str, Any], name: str, rope: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Base of the layers with a window, and the parameters of the others."""
    if "full_attention" not in rope and "sliding_attention" not in rope:
        return Keys(values).number("rope_local_base_freq", 10000.0), rope
    local, full = rope.get("sliding_attention") or {}, rope.get("full_attention") or {}
    if not isinstance(local, dict) or not isinstance(full, dict):
        raise ConfigError(f"{name}: {rope!r} does not hold an object for each kind of layer")
    kind = local.get("rope_type", "default")
    if kind != "default":
        raise ConfigError(f"{name}.sliding_attention.rope_type: {kind!r} is not supported; allowed: default")
    return Keys(local).number("rope_theta", 10000.0), full


def _scaling(kind: ScalingKind, keys: Keys, max_position: int, theta: float) -> RopeScaling:
    if kind == "linear":
        return RopeScaling(kind=kind, factor=keys.number("factor"))
    if kind == "dynamic":
        return RopeScaling(kind=kind, factor=keys.number("factor"), original_max_len=max_position)
    if kind == "llama3":
        return RopeScaling(
            kind=kind,
            factor=keys.number("factor"),
            low_freq_factor=keys.number("low_freq_factor"),
            high_freq_factor=keys.number("high_freq_factor"),
            original_max_len=keys.positive("original_max_position_embeddings"),
        )
    original = keys.positive("original_max_position_embeddings", max_position)
    factor = keys.number("factor", max_position / original)
    if kind == "longrope":
        grown = 1.0 if factor <= 1.0 or original < 2 else math.sqrt(1 + math.log(factor) / math.log(original))
        return RopeScaling(
            kind=kind,
            factor=factor,
            original_max_len=original,
            short_factors=keys.numbers("short_factor"),
            long_factors=keys.numbers("long_factor"),
            attention_factor=keys.number("attention_factor", grown),
        )
    if theta <= 1.0:
        raise ConfigError(f"rope_theta: {theta!r} is not above 1, which yarn needs")
    both = keys.number("mscale", 0.0), keys.number("mscale_all_dim", 0.0)
    grown = _mscale(factor, both[0]) / _mscale(factor, both[1]) if all(both) else _mscale(factor, 1.0)
    return RopeScaling(
        kind=kind,
        factor=factor,
        original_max_len=original,
        beta_fast=keys.number("beta_fast", 32.0),
        beta_slow=keys.number("beta_slow", 1.0),
        truncate=keys.flag("truncate", default=True),
        attention_factor=keys.number("attention_factor", grown),
    )


def _mscale(factor: float, weight: float) -> float:
    """Growth of the attention factor with the context. Peng et al. 2023, YaRN, eq. 22."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0
