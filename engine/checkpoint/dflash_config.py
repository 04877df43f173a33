"""DFlash drafts in their two public layouts, read as a config of this package (Chen et al. 2026, arXiv 2602.06036).

Owns the keys of their `config.json`. An option that would change the result raises an error. Knows nothing of shapes:
those are checked when tensors are read.

    authors      `dflash_config`, `block_size`; tensors fc, hidden_norm, layers.N.*, norm; the rest is the target's
    speculators  `speculators_model_type: dflash`, `transformer_layer_config`; also embed_tokens, lm_head, d2t, t2d

Layer numbers: the authors' layout numbers the output of a layer, the speculators layout its input.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.checkpoint.config_keys import Keys
from engine.checkpoint.public_draft import check_mask_token, config_names
from engine.errors import ConfigError
from engine.tree import MAX_NODES

_OWN_KEYS = ("target_layer_ids", "mask_token_id", "block_size")
_WINDOW_KEYS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashVariant:
    """What a DFlash draft has beside the sizes of its layers."""

    block_size: int
    """Positions of a block: the last known token, and the masked positions after it."""
    mask_token_id: int
    """Token at the masked positions."""


def is_dflash(values: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is of a DFlash draft."""
    kind = values.get("speculators_model_type")
    return kind == "dflash" or (kind is None and ("dflash_config" in values or "dflash" in config_names(values)))


def translate_dflash(values: Mapping[str, Any]) -> tuple[dict[str, Any], DFlashVariant]:
    """The keys of a DFlash draft's `config.json` under the names of this package, and its variant.

    Raises:
        ConfigError: a key is missing or malformed, or an option is not supported; names it and what is supported.
    """
    is_speculators = "speculators_model_type" in values
    layer = values.get("transformer_layer_config", {}) if is_speculators else values
    own = values if is_speculators else values.get("dflash_config") or {}
    for name, part in (("transformer_layer_config", layer), ("dflash_config", own)):
        if not isinstance(part, dict):
            raise ConfigError(f"{name}: {part!r} is not an object")
    if "sliding_attention" in (layer.get("layer_types") or []):
        raise ConfigError("layer_types: sliding_attention is not supported in a DFlash draft; allowed: full_attention")
    options = [key for key in own if own[key] and key not in _OWN_KEYS] if not is_speculators else []
    options += ["sample_from_anchor"] if values.get("sample_from_anchor") else []
    if options:
        raise ConfigError(f"{options[0]}: not supported in a DFlash draft; allowed in dflash_config: {_OWN_KEYS}")
    block_size = Keys({"block_size": values.get("block_size") or own.get("block_size")}).positive("block_size")
    if not 2 <= block_size <= MAX_NODES:
        raise ConfigError(f"block_size: {block_size} given, allowed are 2 to {MAX_NODES}")
    layers = _input_layers(values) if is_speculators else _output_layers(values, own)
    if not layers or layers[0] < 0 or any(low >= high for low, high in itertools.pairwise(layers)):
        raise ConfigError(f"target_layer_ids: outputs of layers {layers} given, allowed is an ascending list")
    variant = DFlashVariant(
        block_size=block_size,
        mask_token_id=check_mask_token("mask_token_id", own.get("mask_token_id"), layer.get("vocab_size")),
    )
    kept = {key: value for key, value in layer.items() if key not in _WINDOW_KEYS}
    reduced = {"draft_vocab_size": values["draft_vocab_size"]} if values.get("draft_vocab_size") else {}
    return kept | reduced | {
        "model_type": "qwen3",  # The layers of every such draft have norms of q and k.
        "head_dim": layer.get("head_dim") or 128,
        "tie_word_embeddings": False,
        "architecture": "eagle",
        "feature_layers": layers,
        "positions_per_pass": block_size - 1,
    }, variant


def _input_layers(values: Mapping[str, Any]) -> list[int]:
    """Layers whose outputs a draft in the speculators layout reads."""
    return [layer - 1 for layer in _numbers("aux_hidden_state_layer_ids", values.get("aux_hidden_state_layer_ids"))]


def _output_layers(values: Mapping[str, Any], own: Mapping[str, Any]) -> list[int]:
    """Layers whose outputs a draft in the authors' layout reads: evenly spaced ones where it names none."""
    keys = Keys(dict(values))
    if own.get("target_layer_ids") is not None:
        layers = _numbers("target_layer_ids", own["target_layer_ids"])
    else:
        num_layers, num_read = keys.positive("num_target_layers"), keys.positive("num_hidden_layers")
        step = (num_layers - 4) / max(num_read - 1, 1)
        layers = [num_layers // 2] if num_read == 1 else [round(1 + index * step) for index in range(num_read)]
    if values.get("num_target_layers") in [layer + 1 for layer in layers]:
        raise ConfigError(
            f"target_layer_ids: {layers} has the target's last layer, which the authors' code reads after its final "
            "norm; that is not supported"
        )
    return layers


def _numbers(key: str, given: Any) -> list[int]:
    if not isinstance(given, list) or not given or any(type(number) is not int for number in given):
        raise ConfigError(f"{key}: {given!r} given, allowed is a list of layer numbers")
    return given
