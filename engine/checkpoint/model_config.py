"""The shape of a model, read from a Hugging Face `config.json`.

Owns the meaning of each config key that changes the forward pass, for the families Llama, Mistral, Qwen2 and Qwen3, and
for Paceline's own draft folders; `engine.checkpoint.public_draft` translates those of published drafts. An unsupported
key that would change the result raises an error. Knows nothing of tensors, weight files or devices.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args

from engine.checkpoint.public_draft import Eagle3Variant, is_public, translate
from engine.errors import ConfigError

SINGLE_FILE = "model.safetensors"
"""Weights of a model that fit into one file."""
INDEX_FILE = "model.safetensors.index.json"
"""Names the files of a model whose weights lie in several."""
Family = Literal["llama", "mistral", "qwen2", "qwen3"]
FAMILIES: tuple[str, ...] = get_args(Family)
Architecture = Literal["draft_model", "eagle"]
ARCHITECTURES: tuple[str, ...] = get_args(Architecture)
SHARED_EMBEDDING = "shared with the target"
"""Value of `embed_tokens` in a draft's config.json when the draft uses the target's embedding."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Scaling of the rotary frequencies for long contexts."""

    kind: Literal["linear", "llama3"]
    factor: float
    """Wavelengths are multiplied by this; with `llama3` only long ones."""
    low_freq_factor: float = 1.0
    """`llama3`: a pair with fewer turns than this within `original_max_len` is scaled by `factor`."""
    high_freq_factor: float = 4.0
    """`llama3`: a pair with more turns than this within `original_max_len` is not scaled."""
    original_max_len: int = 8192
    """`llama3`: context length of the original training, in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of one decoder-only model."""

    family: Family
    vocab_size: int
    """Rows of the token embedding. Also rows of the head, unless `draft_vocab_size` is set."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_model_len: int
    """Longest prompt and output together, in tokens. Bounded by an active sliding window."""
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """Whether each head of q and k has an RMSNorm before RoPE."""
    eos_token_ids: tuple[int, ...] = ()
    draft_vocab_size: int | None = None
    """Rows of the head of a draft with a reduced vocabulary. Its tensor `draft_vocab` has the token ids."""
    shares_embedding: bool = False
    """Whether a draft takes its token embedding from the target's folder."""
    architecture: Architecture = "draft_model"
    """Architecture of a draft: a separate model, or a decoder on the target's hidden states."""
    feature_layers: tuple[int, ...] = ()
    """Layers of the target whose outputs an `eagle` draft reads, ascending; empty for other models, and for an EAGLE-3
    head before `engine.checkpoint.draft_check` fills in those that follow from the target."""
    eagle3: Eagle3Variant | None = None
    """How the EAGLE-3 head of an `eagle` draft in a public layout differs from others; None for other models."""

    @classmethod
    def load(cls, folder: Path) -> ModelConfig:
        """Read `config.json` of a model folder, and the EOS ids of its `generation_config.json`, if any.

        Raises:
            ConfigError: a file is missing or unreadable, or a reason of `parse`.
        """
        values = _read_json(folder / "config.json")
        return cls.parse(values | {"eos_token_id": list(eos_token_ids(folder))})

    @classmethod
    def parse(cls, values: dict[str, Any]) -> ModelConfig:
        """Build from the keys of a `config.json`.

        Raises:
            ConfigError: the family or an active feature is not supported, or a key is missing or malformed.
        """
        variant = None
        if is_public(values):
            values, variant = translate(values)
        family = values.get("model_type")
        if family not in FAMILIES:
            raise ConfigError(f"model_type: {family!r} is not supported; allowed: {', '.join(FAMILIES)}")
        _refuse_unsupported(values)
        keys = _Keys(values)
        num_heads = keys.positive("num_attention_heads")
        num_kv_heads = keys.positive("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise ConfigError(
                f"num_key_value_heads: {num_kv_heads} does not divide num_attention_heads, which is {num_heads}"
            )
        hidden_size = keys.positive("hidden_size")
        attention_bias = keys.flag("attention_bias", default=False)
        theta, scaling = _rope(values)
        head_dim = keys.positive("head_dim", max(hidden_size // num_heads, 1))
        if head_dim % 2:
            raise ConfigError(f"head_dim: {head_dim} is odd; rotary embedding needs an even one")
        return cls(
            family=cast(Family, family),
            vocab_size=keys.positive("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=keys.positive("intermediate_size"),
            num_layers=keys.positive("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            max_model_len=_max_model_len(values, keys),
            tie_word_embeddings=keys.flag("tie_word_embeddings", default=False),
            qkv_bias=True if family == "qwen2" else attention_bias,
            o_bias=False if family == "qwen2" else attention_bias,
            mlp_bias=keys.flag("mlp_bias", default=False),
            qk_norm=family == "qwen3",
            eos_token_ids=_eos(values),
            draft_vocab_size=keys.positive("draft_vocab_size") if "draft_vocab_size" in values else None,
            shares_embedding=_shares_embedding(values),
            architecture=(architecture := _architecture(values)),
            feature_layers=_feature_layers(values, may_be_open=variant is not None) if architecture == "eagle" else (),
            eagle3=variant,
        )


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Ids of the tokens that end a text: those of generation_config.json, or of config.json where it names none.

    Raises:
        ConfigError: a file is unreadable, or holds something else than a token id or a list of them.
    """
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file() and (eos := _read_json(path).get("eos_token_id")) is not None:
            return _eos({"eos_token_id": eos})
    return ()


class _Keys:
    """Typed access to config values. Each error names the key."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def positive(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{key}: {value!r} is not a whole number above 0")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise ConfigError(f"{key}: {value!r} is not a finite number above 0")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{key}: {value!r} is neither true nor false")
        return value

    def _get(self, key: str, default: T | None) -> Any:
        value = self._values.get(key)
        if value is not None:
            return value
        if default is None:
            raise ConfigError(f"{key}: missing from config.json")
        return default


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model: cannot read {path}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"model: {path} does not hold a JSON object")
    return values


def _refuse_unsupported(values: dict[str, Any]) -> None:
    """Refuse keys that change the forward pass in a way that the decoder does not support."""
    if values.get("quantization_config") is not None:
        raise ConfigError(
            "quantization_config: quantised weights are not supported; allowed: float32, bfloat16, float16"
        )
    activation = values.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"hidden_act: {activation!r} is not supported; allowed: silu")
    partial = values.get("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise ConfigError(f"partial_rotary_factor: {partial!r} is not supported; allowed: 1.0")


def _rope(values: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """RoPE base and scaling, from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling`."""
    name = "rope_parameters" if values.get("rope_parameters") is not None else "rope_scaling"
    rope = values.get(name) or {}
    if not isinstance(rope, dict):
        raise ConfigError(f"{name}: {rope!r} is not an object")
    theta = _Keys({"rope_theta": rope.get("rope_theta", values.get("rope_theta"))}).number("rope_theta", 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    keys = _Keys(rope)
    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=keys.number("factor"))
    if kind == "llama3":
        return theta, RopeScaling(
            kind="llama3",
            factor=keys.number("factor"),
            low_freq_factor=keys.number("low_freq_factor"),
            high_freq_factor=keys.number("high_freq_factor"),
            original_max_len=keys.positive("original_max_position_embeddings"),
        )
    raise ConfigError(f"{name}.rope_type: {kind!r} is not supported; allowed: default, linear, llama3")


def _max_model_len(values: dict[str, Any], keys: _Keys) -> int:
    """The position limit, or an active sliding window if that is shorter: within it, full attention is the same."""
    limit = keys.positive("max_position_embeddings", 2048)
    active = values.get("use_sliding_window", values["model_type"] == "mistral")
    if not active or values.get("sliding_window") is None:
        return limit
    return min(limit, keys.positive("sliding_window"))


def _eos(values: dict[str, Any]) -> tuple[int, ...]:
    eos = values.get("eos_token_id")
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise ConfigError(f"eos_token_id: {eos!r} is neither a token id nor a list of them")
    return tuple(ids)


def _shares_embedding(values: dict[str, Any]) -> bool:
    source = values.get("embed_tokens")
    if source not in (None, SHARED_EMBEDDING):
        raise ConfigError(f"embed_tokens: {source!r} is not supported; allowed: {SHARED_EMBEDDING!r}")
    return source is not None


def _architecture(values: dict[str, Any]) -> Architecture:
    given = values.get("architecture", "draft_model")
    if given not in ARCHITECTURES:
        raise ConfigError(f"architecture: {given!r} is not supported; allowed: {', '.join(ARCHITECTURES)}")
    return cast(Architecture, given)


def _feature_layers(values: dict[str, Any], *, may_be_open: bool) -> tuple[int, ...]:
    given = values.get("feature_layers")
    if may_be_open and given == []:
        return ()
    is_valid = isinstance(given, list) and all(type(layer) is int and layer >= 0 for layer in given)
    if not is_valid or not given or any(low >= high for low, high in itertools.pairwise(given)):
        raise ConfigError(f"feature_layers: {given!r} given, allowed is an ascending list of layer numbers from 0")
    return tuple(given)
