"""The shape of a model, read from a Hugging Face `config.json`.

Owns the meaning of each config key that changes the forward pass, for the families of `engine.checkpoint.families` and
for Paceline's own draft folders; `engine.checkpoint.public_draft` translates those of published drafts. An unsupported
key that would change the result raises an error. Knows nothing of tensors, weight files or devices.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from engine.checkpoint.config_keys import Keys
from engine.checkpoint.dflash_config import DFlashVariant, is_dflash, translate_dflash
from engine.checkpoint.families import (
    FAMILIES,
    Activation,
    ExpertsConfig,
    Family,
    read_experts,
    read_windows,
    refuse_unsupported,
)
from engine.checkpoint.medusa_config import MedusaVariant, is_medusa, medusa_fields
from engine.checkpoint.public_draft import Eagle3Variant, is_public, translate
from engine.checkpoint.rope_config import RopeScaling, read_rope, rotary_dim
from engine.errors import ConfigError
from engine.quantization.config import Quantization

SINGLE_FILE = "model.safetensors"
"""Weights of a model that fit into one file."""
INDEX_FILE = "model.safetensors.index.json"
"""Names the files of a model whose weights lie in several."""
Architecture = Literal["draft_model", "eagle", "medusa"]
ARCHITECTURES: tuple[str, ...] = get_args(Architecture)
SHARED_EMBEDDING = "shared with the target"
"""Value of `embed_tokens` in a draft's config.json when the draft uses the target's embedding."""


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
    """Longest prompt and output together, in tokens."""
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """Whether each head of q and k has an RMSNorm before RoPE."""
    rotary_dim: int = 0
    """Dimensions of each head that are rotated; 0 means all."""
    local_rope_theta: float | None = None
    """RoPE base of the local layers, which is not scaled; None if it is that of the others."""
    local_layers: frozenset[int] = frozenset()
    """Layers that have, or would have in a longer context, a window."""
    windows: tuple[int, ...] = ()
    """Tokens that each layer attends to, its own included; 0 means all. Empty if every layer attends to all."""
    activation: Activation = "silu"
    fused_projections: bool = False
    """Whether q, k, v are one tensor in the files, and gate and up are another."""
    norm_offset: float = 0.0
    """Added to the stored weights of the norms."""
    output_norms: bool = False
    """Whether the outputs of attention and of the MLP have norms of their own."""
    embedding_scale: float = 1.0
    """Factor of the token embeddings."""
    query_scale: float = 1.0
    """Factor of the queries beyond 1 / sqrt(head_dim). Needs `qk_norm`."""
    experts: ExpertsConfig | None = None
    """The experts of a mixture-of-experts model; None for a dense one."""
    eos_token_ids: tuple[int, ...] = ()
    draft_vocab_size: int | None = None
    """Rows of the head of a draft with a reduced vocabulary. Its tensor `draft_vocab` has the token ids."""
    shares_embedding: bool = False
    """Whether a draft takes its token embedding from the target's folder."""
    architecture: Architecture = "draft_model"
    """Architecture of a draft: a separate model, or a decoder or Medusa heads on the target's hidden states."""
    feature_layers: tuple[int, ...] = ()
    """Layers of the target whose outputs an `eagle` draft reads, ascending; empty for other models, and for an EAGLE-3
    head before `engine.checkpoint.draft_check` fills in those that follow from the target."""
    eagle3: Eagle3Variant | None = None
    """How the EAGLE-3 head of an `eagle` draft in a public layout differs from others; None for other models."""
    dflash: DFlashVariant | None = None
    """The block of an `eagle` draft that is a DFlash draft; None for other models."""
    positions_per_pass: int = 1
    """Tokens that one forward of a draft drafts: 1 for a chain, more for a parallel `eagle` draft and for `medusa`."""
    medusa: MedusaVariant | None = None
    """How the heads of a `medusa` draft differ from others; None for other models. Such a config has no layers."""
    quantization: Quantization | None = None
    """How the weights in the files are quantised; None for floats."""

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
        if is_medusa(values):
            return cls(**medusa_fields(values))
        variant, dflash = None, None
        if is_dflash(values):
            values, dflash = translate_dflash(values)
        elif is_public(values):
            values, variant = translate(values)
        family = values.get("model_type")
        if family == "gemma3":
            raise ConfigError(
                "model_type: 'gemma3' with vision is not supported; allowed: gemma3_text, the model without its tower"
            )
        if family not in FAMILIES:
            raise ConfigError(f"model_type: {family!r} is not supported; allowed: {', '.join(FAMILIES)}")
        refuse_unsupported(values)
        keys = Keys(values)
        is_gemma = family == "gemma3_text"
        num_heads = keys.positive("num_attention_heads")
        num_kv_heads = keys.positive("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise ConfigError(
                f"num_key_value_heads: {num_kv_heads} does not divide num_attention_heads, which is {num_heads}"
            )
        hidden_size, num_layers = keys.positive("hidden_size"), keys.positive("num_hidden_layers")
        attention_bias = keys.flag("attention_bias", default=False)
        max_position = keys.positive("max_position_embeddings", 2048)
        rope = read_rope(values, max_position=max_position)
        head_dim = keys.positive("head_dim", 256 if is_gemma else max(hidden_size // num_heads, 1))
        if head_dim % 2:
            raise ConfigError(f"head_dim: {head_dim} is odd; rotary embedding needs an even one")
        windows = read_windows(values, keys, num_layers)
        query_scale = (keys.number("query_pre_attn_scalar", 256.0) / head_dim) ** -0.5 if is_gemma else 1.0
        return cls(
            family=cast(Family, family),
            vocab_size=keys.positive("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=keys.positive("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
            rope_theta=rope.theta,
            rope_scaling=rope.scaling,
            max_model_len=max(max_position, rope.max_len),
            tie_word_embeddings=keys.flag("tie_word_embeddings", default=is_gemma),
            qkv_bias=True if family == "qwen2" else attention_bias,
            o_bias=False if family == "qwen2" else attention_bias,
            mlp_bias=keys.flag("mlp_bias", default=False),
            qk_norm=family in ("qwen3", "qwen3_moe", "gemma3_text"),
            rotary_dim=rotary_dim(head_dim, rope.rotated_share, rope.scaling),
            local_rope_theta=rope.local_theta,
            local_layers=frozenset(layer for layer, window in enumerate(windows) if window),
            windows=windows,
            activation="gelu_tanh" if is_gemma else "silu",
            fused_projections=family == "phi3",
            norm_offset=1.0 if is_gemma else 0.0,
            output_norms=is_gemma,
            embedding_scale=hidden_size**0.5 if is_gemma else 1.0,
            query_scale=query_scale,
            experts=read_experts(values, keys, num_layers),
            eos_token_ids=_eos(values),
            draft_vocab_size=keys.positive("draft_vocab_size") if "draft_vocab_size" in values else None,
            shares_embedding=_shares_embedding(values),
            architecture=(architecture := _architecture(values)),
            feature_layers=_feature_layers(values, may_be_open=variant is not None) if architecture == "eagle" else (),
            eagle3=variant,
            dflash=dflash,
            positions_per_pass=_positions_per_pass(keys, is_chain=architecture != "eagle"),
            quantization=Quantization.parse(values.get("quantization_config")),
        )

    def for_context(self, max_model_len: int | None) -> ModelConfig:
        """The config of a model that serves at most this many tokens. Windows that are never full are dropped.

        Dynamic scaling and longrope depend on the served context, not on the length of a request, so that a token's
        key never depends on the tokens after it.

        Args:
            max_model_len: longest prompt and output together; None means the model's limit.
        """
        limit = self.max_model_len if max_model_len is None else min(self.max_model_len, max_model_len)
        windows = tuple(window if window < limit else 0 for window in self.windows)
        return dataclasses.replace(self, max_model_len=limit, windows=windows if any(windows) else ())

    def num_weights(self, *, heads: int, kv_heads: int, part: Callable[[int], int], has_head: bool) -> int:
        """Number of weights of a shard, whatever their form in the files.

        Args:
            heads, kv_heads: query and KV heads of the shard.
            part: the shard's number of units out of a total.
            has_head: whether the head is a tensor of its own in memory.
        """
        hidden, dim, experts = self.hidden_size, self.head_dim, self.experts
        qkv = dim * (heads + 2 * kv_heads)
        layer = hidden * (qkv + dim * heads) + 2 * hidden * (2 if self.output_norms else 1)
        layer += qkv * int(self.qkv_bias) + 2 * dim * int(self.qk_norm)
        num_sparse = 0 if experts is None else self.num_layers - len(experts.dense_layers)
        count = self.num_layers * layer + (self.num_layers - num_sparse) * 3 * hidden * part(self.intermediate_size)
        if experts is not None:
            count += num_sparse * experts.num_experts * hidden * (3 * part(experts.intermediate_size) + 1)
        head = part(self.draft_vocab_size or self.vocab_size) * hidden if has_head else 0
        return count + self.vocab_size * hidden + head + hidden

    @property
    def is_published(self) -> bool:
        """Whether it is a draft on the target's hidden states in a layout that others define."""
        return self.eagle3 is not None or self.dflash is not None

    @property
    def beyond_llama(self) -> str | None:
        """The first feature that only the PyTorch kernels compute; None if there is none."""
        features = {
            "sliding windows": bool(self.windows),
            "experts": self.experts is not None,
            "an activation other than silu": self.activation != "silu",
            "partly rotated heads": self.rotary_dim not in (0, self.head_dim),
            "two bases of RoPE": self.local_rope_theta is not None,
            "norms of outputs": self.output_norms,
            "scaled embeddings": self.embedding_scale != 1.0,
        }
        return next((name for name, is_used in features.items() if is_used), None)


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


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model: cannot read {path}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"model: {path} does not hold a JSON object")
    return values


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


def _positions_per_pass(keys: Keys, *, is_chain: bool) -> int:
    positions = keys.positive("positions_per_pass", 1)
    if is_chain and positions > 1:
        raise ConfigError(f"positions_per_pass: {positions} given, but only Paceline's own eagle drafts are parallel")
    return positions


def _feature_layers(values: dict[str, Any], *, may_be_open: bool) -> tuple[int, ...]:
    given = values.get("feature_layers")
    if may_be_open and given == []:
        return ()
    is_valid = isinstance(given, list) and all(type(layer) is int and layer >= 0 for layer in given)
    if not is_valid or not given or any(low >= high for low, high in itertools.pairwise(given)):
        raise ConfigError(f"feature_layers: {given!r} given, allowed is an ascending list of layer numbers from 0")
    return tuple(given)
