"""Reading config.json: every supported family, both spellings of RoPE, and refusals that name the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checkpoint.families import FAMILIES
from engine.checkpoint.model_config import SHARED_EMBEDDING, ModelConfig
from engine.checkpoint.rope_config import RopeScaling
from engine.errors import ConfigError

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def parse(**changes: Any) -> ModelConfig:
    return ModelConfig.parse(BASE | changes)


def test_defaults_follow_from_the_rest() -> None:
    config = parse()
    assert (config.head_dim, config.rope_theta, config.rope_scaling) == (8, 10000.0, None)
    flags = (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm, config.shares_embedding)
    assert not any(flags)
    assert config.draft_vocab_size is None
    assert ModelConfig.parse({k: v for k, v in BASE.items() if k != "num_key_value_heads"}).num_kv_heads == 4


def test_families_differ_in_biases_and_norms() -> None:
    qwen2, qwen3 = parse(model_type="qwen2", attention_bias=False), parse(model_type="qwen3", head_dim=64)
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 64)
    llama = parse(attention_bias=True, mlp_bias=True)
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
        {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}},
        {"rope_theta": 500000.0, "rope_parameters": LLAMA3},
    ],
)
def test_both_spellings_of_rope(spelling: dict[str, Any]) -> None:
    config = parse(**spelling)
    assert config.rope_theta == 500000.0
    assert config.rope_scaling == RopeScaling(
        kind="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_len=8192
    )


def test_linear_and_default_scaling() -> None:
    assert parse(rope_scaling={"type": "linear", "factor": 2.0}).rope_scaling == RopeScaling(kind="linear", factor=2.0)
    assert parse(rope_parameters={"rope_type": "default", "rope_theta": 5.0}).rope_scaling is None
    assert parse(rope_scaling=None).rope_scaling is None


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 512}, (512, 512)),
        ({"model_type": "mistral", "sliding_window": None}, ()),
        ({"model_type": "mistral"}, ()),
        ({"model_type": "qwen2", "sliding_window": 512, "use_sliding_window": False}, ()),
        ({"model_type": "qwen2", "sliding_window": 512, "use_sliding_window": True}, ()),
        ({"model_type": "qwen2", "sliding_window": 512, "use_sliding_window": True, "max_window_layers": 1}, (0, 512)),
        ({"model_type": "qwen3", "sliding_window": 512}, ()),
        ({"model_type": "phi3", "sliding_window": 512}, (512, 512)),
        ({"model_type": "phi3"}, ()),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 512,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (512, 0),
        ),
        ({"model_type": "gemma3_text", "sliding_window": 512, "sliding_window_pattern": 2}, (512, 0)),
    ],
)
def test_windows_of_the_layers(changes: dict[str, Any], windows: tuple[int, ...]) -> None:
    """As `transformers` reads them. A window of the context's length is none."""
    config = parse(**changes).for_context(4096)
    assert config.windows == windows
    assert config.max_model_len == 4096


def test_a_window_that_is_never_full_is_dropped() -> None:
    config = parse(model_type="mistral", sliding_window=512)
    assert config.for_context(513).windows == (512, 512)
    assert config.for_context(512).windows == ()
    assert config.for_context(512).max_model_len == 512
    assert config.for_context(None) == config


def test_scaled_contexts_are_longer() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    assert parse(rope_scaling=yarn).max_model_len == 8192
    assert parse(rope_scaling=yarn | {"factor": 1.5}).max_model_len == 4096
    assert parse(rope_scaling={"rope_type": "dynamic", "factor": 2.0}).max_model_len == 8192


def test_experts() -> None:
    qwen = parse(
        model_type="qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, mlp_only_layers=[0]
    )
    assert qwen.experts is not None
    assert (qwen.experts.num_experts, qwen.experts.intermediate_size, qwen.experts.normalise) == (8, 16, False)
    assert qwen.experts.dense_layers == {0}
    mixtral = parse(model_type="mixtral", num_local_experts=4, num_experts_per_tok=1)
    assert mixtral.experts is not None
    assert (mixtral.experts.intermediate_size, mixtral.experts.normalise) == (64, True)
    assert parse().experts is None


def test_the_first_feature_beyond_a_plain_llama_is_named() -> None:
    assert parse().beyond_llama is None
    assert parse(model_type="mistral", sliding_window=512).beyond_llama == "sliding windows"
    assert parse(model_type="mixtral").beyond_llama == "experts"
    assert parse(model_type="phi3", partial_rotary_factor=0.5).beyond_llama == "partly rotated heads"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, r"model_type: 'gpt2' is not supported; allowed: llama, mistral, qwen2, qwen3, gem"),
        ({"model_type": "gemma3"}, r"model_type: 'gemma3' with vision is not supported; allowed: gemma3_text"),
        ({"model_type": None}, r"model_type: None"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 4.0}}, r"rope_scaling.rope_type: 'ntk'.*allowed: default"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, r"factor: missing"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, r"long_factor: missing|short_factor"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            r"short_factor: 1 numbers given; 4 are needed, one per pair",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "rope_theta": 0.5}, r"rope_theta: 0.5 is not above 1"),
        ({"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping: 50.0 is not supported; allowed: None"),
        ({"logit_scale": 0.5}, r"logit_scale: 0.5 is not supported; allowed: 1.0"),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["chunked_attention"] * 2},
            r"layer_types: .* allowed: a list of 2 times sliding_attention or full_attention",
        ),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, r"num_experts_per_tok: 9 is above num_local_experts"),
        ({"model_type": "gemma3_text", "hidden_activation": "silu"}, r"hidden_activation: 'silu'.*gelu_pytorch_tanh"),
        ({"model_type": "gemma3_text", "sliding_window": None}, r"sliding_window: missing"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, r"low_freq_factor: missing"),
        ({"rope_scaling": "linear"}, r"rope_scaling: 'linear' is not an object"),
        ({"hidden_act": "gelu"}, r"hidden_act: 'gelu'"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor: 0.5"),
        ({"quantization_config": {"quant_method": "hqq"}}, r"quantization_config.quant_method: 'hqq'"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads: 3 does not divide num_attention_heads, which is 4"),
        ({"head_dim": 7}, r"head_dim: 7 is odd"),
        ({"hidden_size": None}, r"hidden_size: missing"),
        ({"hidden_size": "32"}, r"hidden_size: '32' is not a whole number"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers: 0"),
        ({"vocab_size": True}, r"vocab_size: True"),
        ({"rms_norm_eps": float("nan")}, r"rms_norm_eps: nan"),
        ({"tie_word_embeddings": "yes"}, r"tie_word_embeddings: 'yes'"),
        ({"eos_token_id": [2, "x"]}, r"eos_token_id"),
        ({"draft_vocab_size": -1}, r"draft_vocab_size: -1"),
        ({"embed_tokens": "elsewhere"}, r"embed_tokens: 'elsewhere'"),
    ],
)
def test_refusals_name_the_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(**changes)


def test_draft_keys() -> None:
    config = parse(draft_vocab_size=10, embed_tokens=SHARED_EMBEDDING)
    assert (config.draft_vocab_size, config.shares_embedding) == (10, True)


def test_generation_config_has_the_last_word_on_eos(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"eos_token_id": 7}))
    assert ModelConfig.load(tmp_path).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert ModelConfig.load(tmp_path).eos_token_ids == (5, 6)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00"])
def test_unreadable_files_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.load(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.load(tmp_path)


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.lists(st.integers(), max_size=2),
    st.dictionaries(st.sampled_from(["rope_type", "type", "factor", "rope_theta"]), st.integers(), max_size=2),
    st.sampled_from([*FAMILIES, "sliding_attention"]),
)  # fmt: skip
KEYS = [
    *BASE, "head_dim", "rope_theta", "rope_scaling", "rope_parameters", "sliding_window", "use_sliding_window",
    "model_type", "layer_types", "max_window_layers", "num_local_experts", "num_experts_per_tok", "quantization_config",
    "partial_rotary_factor", "rope_local_base_freq", "query_pre_attn_scalar", "mlp_only_layers",
    "hidden_act", "tie_word_embeddings", "eos_token_id", "draft_vocab_size", "embed_tokens", "attention_bias",
]  # fmt: skip


@settings(max_examples=300)
@given(changes=st.dictionaries(st.sampled_from(KEYS), JUNK, max_size=3))
def test_any_values_are_taken_or_refused(changes: dict[str, Any]) -> None:
    try:
        config = parse(**changes)
    except ConfigError:
        return
    assert config.num_heads % config.num_kv_heads == 0
    assert config.head_dim % 2 == 0
    assert config.max_model_len >= 1
