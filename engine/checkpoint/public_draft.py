"""EAGLE-3 and P-EAGLE heads in their two public layouts, read as a config of this package.

Owns the keys of their `config.json`, the names of their tensors and the rule which layers of the target they read.
DFlash drafts are in `engine.checkpoint.dflash_config`; other published drafts are refused by name. Knows nothing of
shapes: those are checked when tensors are read.

    authors      flat config with `draft_vocab_size`; tensors fc, midlayer.*, norm, lm_head, d2t, t2d
    speculators  `speculators_model_type`, `transformer_layer_config`; tensors as above with layers.N.* for midlayer.*
    P-EAGLE      either one, with the tensor mask_hidden and the id of the mask: `ptd_token_id` or `mask_token_id`

Layer numbers: the reference implementation and vLLM number the input of a layer (j is the output of layer j - 1);
`eagle_config` of checkpoints made for SGLang numbers the output (j is the output of layer j).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.checkpoint.config_keys import Keys
from engine.errors import ConfigError

SUPPORTED = (
    "EAGLE-3 and P-EAGLE heads and DFlash drafts (the authors' layouts, or speculators_model_type eagle3, peagle, "
    "dflash), Medusa heads and drafts of `paceline distill`"
)
UNUSED_TENSORS = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight")
"""Tensors of public heads that drafting does not need: `t2d` follows from `d2t`, the others belong to the target."""
MASK_HIDDEN = "mask_hidden"
"""Tensor of P-EAGLE heads: what replaces the target's hidden states at masked positions."""
DEFAULT_POSITIONS = 8
"""Tokens that one pass of a P-EAGLE head drafts where its config names no number: the positions of its training."""
_MASK_KEYS = ("ptd_token_id", "mask_token_id")
_OTHER_NAMES = {"dspark": "a DSpark draft", "mlpspeculator": "an MLP draft"}
_DEFAULT_NUM_FEATURES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Variant:
    """What differs between EAGLE-3 heads, beside the sizes of their layers."""

    feature_size: int
    """Hidden size of the target."""
    num_features: int
    """Number of target layers that the head reads."""
    norm_before_residual: bool
    """Whether the residual of the first layer starts at the normalised input instead of the input."""
    norm_before_fc: bool
    """Whether one RMSNorm over all features comes before `fc`."""
    fc_norm: bool
    """Whether each feature layer has an RMSNorm of its own before `fc`."""
    norm_output: bool
    """Whether the next drafted token reads the output of the final norm instead of its input."""
    mask_token_id: int | None = None
    """Token at the masked positions of a P-EAGLE head; None for a chain."""


def is_public(values: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is of a published draft: an EAGLE-3 head, or another kind that names itself."""
    if "architecture" in values or "embed_tokens" in values:  # Paceline's own drafts say what they are.
        return False
    names = config_names(values)
    keys = ("speculators_model_type", "draft_vocab_size", "ptd_token_id")
    return any(key in values for key in keys) or "eagle" in names or any(name in names for name in _OTHER_NAMES)


def translate(values: Mapping[str, Any]) -> tuple[dict[str, Any], Eagle3Variant]:
    """The keys of a public head's `config.json` under the names of this package, and its variant.

    `feature_layers` is [] where the target's number of layers decides, see `default_feature_layers`.

    Raises:
        ConfigError: another kind of draft, or an option that is not supported; names it and what is supported.
    """
    _refuse_others(values)
    layer = values.get("transformer_layer_config", values)
    if not isinstance(layer, dict):
        raise ConfigError(f"transformer_layer_config: {layer!r} is not an object")
    layer_types = layer.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise ConfigError(f"layer_types: {layer_types!r} is not a list")
    if "sliding_attention" in layer_types:
        raise ConfigError("layer_types: sliding_attention is not supported in an EAGLE-3 head; allowed: full_attention")
    layers = _feature_layers(values)
    norms = {key: _flag(values, key) for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")}
    if norms["norm_before_fc"] and norms["fc_norm"]:
        raise ConfigError("norm_before_fc, fc_norm: both are true, allowed is one of them")
    mask = _mask_token(values)
    positions = {} if mask is None else {"positions_per_pass": num_positions(values)}
    feature_size = values.get("target_hidden_size") or layer.get("hidden_size")
    if type(feature_size) is not int or feature_size < 1:
        raise ConfigError(f"target_hidden_size: {feature_size!r} is not a whole number above 0")
    own = dict(layer) | {
        "draft_vocab_size": values.get("draft_vocab_size") or layer.get("vocab_size"),
        "tie_word_embeddings": False,  # A head has rows of its own, whatever the target whose config was copied has.
        "architecture": "eagle",
        "feature_layers": layers,
    }
    return own | positions, Eagle3Variant(
        feature_size=feature_size,
        num_features=len(layers) or _DEFAULT_NUM_FEATURES,
        mask_token_id=mask,
        **norms,
    )


def default_feature_layers(num_layers: int) -> tuple[int, ...]:
    """The layers whose outputs a head reads when its config names none: the inputs of layers 2, L / 2 and L - 3.

    Raises:
        ConfigError: the target has too few layers for three different ones.
    """
    inputs = (2, num_layers // 2, num_layers - 3)
    if not inputs[0] < inputs[1] < inputs[2]:
        raise ConfigError(
            f"eagle_aux_hidden_state_layer_ids: missing from the draft's config.json, and the target's {num_layers} "
            "layers are too few for the default (2, L / 2, L - 3); name the layers"
        )
    return tuple(layer - 1 for layer in inputs)


def tensor_name(name: str) -> str:
    """The name in this package of a tensor of either public layout."""
    name = name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)
    return f"model.{name}" if re.match(r"(layers\.\d+|norm|embed_tokens)\.", name) else name


def num_positions(values: Mapping[str, Any]) -> int:
    """Tokens that a draft in the speculators layout was trained to draft at once.

    Raises:
        ConfigError: the number is malformed, or 1.
    """
    proposals = (values.get("speculators_config") or {}).get("proposal_methods") or [{}]
    positions = Keys(proposals[0]).positive("speculative_tokens", DEFAULT_POSITIONS)
    if positions < 2:
        raise ConfigError(f"speculative_tokens: {positions} given, a parallel draft has at least 2")
    return positions


def config_names(values: Mapping[str, Any]) -> str:
    """The names that a config gives its architecture, in lower case without separators."""
    given = values.get("architectures")
    listed = [str(name) for name in given] if isinstance(given, list) else []
    return re.sub(r"[^a-z0-9 ]", "", " ".join([*listed, str(values.get("model_type", ""))]).lower())


def check_mask_token(key: str, token: Any, vocab_size: Any) -> int:
    """The id of a mask token.

    Raises:
        ConfigError: it is no id of the vocabulary.
    """
    if type(token) is not int or token < 0 or (type(vocab_size) is int and token >= vocab_size):
        raise ConfigError(f"{key}: {token!r} is not a token id below vocab_size, which is {vocab_size}")
    return token


def _mask_token(values: Mapping[str, Any]) -> int | None:
    """The mask token of a P-EAGLE head; None for a chain."""
    vocab_size = values.get("transformer_layer_config", values).get("vocab_size")
    found = [(key, values[key]) for key in _MASK_KEYS if values.get(key) is not None]
    if found:
        return check_mask_token(*found[0], vocab_size)
    if values.get("speculators_model_type") == "peagle" or "peagle" in config_names(values):
        raise ConfigError(f"mask_token_id: missing from the config.json of a P-EAGLE head; {_MASK_KEYS} are read")
    return None


def _refuse_others(values: Mapping[str, Any]) -> None:
    kind = values.get("speculators_model_type")
    if kind not in (None, "eagle3", "peagle"):
        raise ConfigError(f"speculators_model_type: {kind!r} is not supported; supported are {SUPPORTED}")
    names = config_names(values)
    for name, label in _OTHER_NAMES.items():
        if name in names:
            raise ConfigError(
                f"draft: its config.json names {label}, which is not supported; supported are {SUPPORTED}"
            )
    if kind is None and "draft_vocab_size" not in values and "eagle3" not in names and "peagle" not in names:
        raise ConfigError(f"draft: its config.json names EAGLE-1 or EAGLE-2, which is not supported; {SUPPORTED} are")


def _feature_layers(values: Mapping[str, Any]) -> list[int]:
    """Layers whose outputs the head reads, ascending; [] where the config names none."""
    own = values.get("eagle_config") or {}
    if not isinstance(own, dict):
        raise ConfigError(f"eagle_config: {own!r} is not an object")
    for key in ("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm"):
        if own.get(key, True) is not True:
            raise ConfigError(f"eagle_config.{key}: {own[key]!r} is not supported; allowed: true")
    key = "eagle_aux_hidden_state_layer_ids"
    first, given = (0, own[key]) if own.get(key) else (1, values.get(key) or [])
    is_valid = isinstance(given, list) and all(type(layer) is int and layer >= first for layer in given)
    if not is_valid or len(set(given)) < len(given):
        raise ConfigError(f"{key}: {given!r} given, allowed is a list of different layer numbers from {first}")
    return sorted(layer - first for layer in given)


def _flag(values: Mapping[str, Any], key: str) -> bool:
    value = values.get(key) or (values.get("eagle_config") or {}).get(key) or False
    if value is not True and value is not False:
        raise ConfigError(f"{key}: {value!r} is neither true nor false")
    return value
