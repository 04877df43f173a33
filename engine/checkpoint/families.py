"""What differs between model families in a config.json: windows, experts, and features that are refused.

Owns the defaults of each family as `transformers` has them, and the keys that would change the result without being
supported. Knows no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from engine.checkpoint.config_keys import Keys
from engine.errors import ConfigError

Family = Literal["llama", "mistral", "qwen2", "qwen3", "gemma3_text", "phi3", "mixtral", "qwen3_moe"]
FAMILIES: tuple[str, ...] = get_args(Family)
Activation = Literal["silu", "gelu_tanh"]
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (None, False),
    "clip_qkv": (None,),
    "logit_scale": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "embedding_multiplier": (None, 1.0),
    "residual_multiplier": (None, 1.0),
    "attention_multiplier": (None,),
    "attention_chunk_size": (None,),
    "no_rope_layers": (None, []),
    "alibi": (None, False),
    "shared_expert_intermediate_size": (None, 0),
    "n_shared_experts": (None, 0),
}
"""Keys that change the forward pass, and the values with which they do not."""
_SLIDING, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The experts of a mixture-of-experts model."""

    num_experts: int
    per_token: int
    """Experts that compute each token."""
    intermediate_size: int
    """Intermediate units of one expert."""
    normalise: bool
    """Whether the weights of a token's experts add up to 1."""
    dense_layers: frozenset[int]
    """Layers that have an ordinary MLP."""


def refuse_unsupported(values: dict[str, Any]) -> None:
    """Refuse keys that change the forward pass in a way that the decoder does not support.

    Raises:
        ConfigError: naming the key, its value and what is allowed.
    """
    family = values["model_type"]
    is_gemma = family == "gemma3_text"
    key, wanted = ("hidden_activation", "gelu_pytorch_tanh") if is_gemma else ("hidden_act", "silu")
    activation = values.get(key, wanted)
    if activation != wanted:
        raise ConfigError(f"{key}: {activation!r} is not supported; allowed: {wanted}")
    for key, allowed in _NEUTRAL.items():
        given = values.get(key)
        if given not in allowed:
            raise ConfigError(f"{key}: {str(given)[:60]} is not supported; allowed: {allowed[-1]}")


def read_windows(values: dict[str, Any], keys: Keys, num_layers: int) -> tuple[int, ...]:
    """Tokens that each layer attends to, its own included; 0 means all. Empty if every layer attends to all.

    Raises:
        ConfigError: a key is malformed.
    """
    family = values["model_type"]
    switched = family in ("llama", "qwen2", "qwen3", "qwen3_moe")  # Off unless `use_sliding_window` says otherwise.
    if family == "llama" or (switched and not keys.flag("use_sliding_window", default=False)):
        return ()
    defaults = {"phi3": None, "mixtral": None}
    window = values.get("sliding_window", defaults.get(family, 4096))
    if window is None and family != "gemma3_text":
        return ()
    size = Keys({"sliding_window": window}).positive("sliding_window")
    windows = [size if is_local else 0 for is_local in _local_layers(values, keys, num_layers)]
    return tuple(windows) if any(windows) else ()


def _local_layers(values: dict[str, Any], keys: Keys, num_layers: int) -> list[bool]:
    """Whether each layer has a window."""
    family, types = values["model_type"], values.get("layer_types")
    if family in ("mistral", "phi3", "mixtral", "qwen3_moe"):
        return [True] * num_layers
    if types is not None:
        known = isinstance(types, list) and all(kind in (_SLIDING, _FULL) for kind in types)
        if not known or len(types) != num_layers:
            raise ConfigError(
                f"layer_types: {str(types)[:60]} is not supported; allowed: a list of {num_layers} times {_SLIDING} or "
                f"{_FULL}"
            )
        return [kind == _SLIDING for kind in types]
    if family == "gemma3_text":
        period = keys.positive("sliding_window_pattern", 6)
        return [bool((layer + 1) % period) for layer in range(num_layers)]
    first = values.get("max_window_layers", 28)
    if type(first) is not int or first < 0:
        raise ConfigError(f"max_window_layers: {first!r} is not a whole number from 0")
    return [layer >= first for layer in range(num_layers)]


def read_experts(values: dict[str, Any], keys: Keys, num_layers: int) -> ExpertsConfig | None:
    """The experts of a model, or None for a dense one.

    Raises:
        ConfigError: a key is missing or malformed, or a token needs more experts than there are.
    """
    family = values["model_type"]
    if family not in ("mixtral", "qwen3_moe"):
        return None
    is_qwen = family == "qwen3_moe"
    name = "num_experts" if is_qwen and "num_experts" in values else "num_local_experts"
    num_experts = keys.positive(name, 128 if is_qwen else 8)
    per_token = keys.positive("num_experts_per_tok", 8 if is_qwen else 2)
    if per_token > num_experts:
        raise ConfigError(f"num_experts_per_tok: {per_token} is above {name}, which is {num_experts}")
    dense = set[int]()
    if is_qwen:
        step = keys.positive("decoder_sparse_step", 1)
        only = values.get("mlp_only_layers") or []
        if not isinstance(only, list) or not all(type(layer) is int for layer in only):
            raise ConfigError(f"mlp_only_layers: {str(only)[:60]} is not a list of layer numbers")
        dense = {layer for layer in range(num_layers) if layer in only or (layer + 1) % step}
    return ExpertsConfig(
        num_experts=num_experts,
        per_token=per_token,
        intermediate_size=keys.positive("moe_intermediate_size" if is_qwen else "intermediate_size"),
        normalise=keys.flag("norm_topk_prob", default=False) if is_qwen else True,
        dense_layers=frozenset(dense),
    )
