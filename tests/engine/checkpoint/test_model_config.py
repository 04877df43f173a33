"""Reading config.json: every supported family, both spellings of RoPE, and refusals that name the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checkpoint.model_config import SHARED_EMBEDDING, ModelConfig, RopeScaling
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
    ("changes", "limit"),
    [
        ({"model_type": "mistral", "sliding_window": 512}, 512),
        ({"model_type": "mistral", "sliding_window": 9999}, 4096),
        ({"model_type": "mistral", "sliding_window": None}, 4096),
        ({"model_type": "qwen2", "sliding_window": 512, "use_sliding_window": False}, 4096),
        ({"model_type": "qwen2", "sliding_window": 512, "use_sliding_window": True}, 512),
        ({"model_type": "qwen3", "sliding_window": 512}, 4096),
    ],
)
def test_an_active_window_limits_the_context_so_that_full_attention_is_exact(
    changes: dict[str, Any], limit: int
) -> None:
    assert parse(**changes).max_model_len == limit


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, r"model_type: 'gpt2' is not supported; allowed: llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, r"model_type: None"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, r"rope_scaling.rope_type: 'yarn'.*allowed: default"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, r"rope_parameters.rope_type: 'dynamic'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, r"low_freq_factor: missing"),
        ({"rope_scaling": "linear"}, r"rope_scaling: 'linear' is not an object"),
        ({"hidden_act": "gelu"}, r"hidden_act: 'gelu'"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor: 0.5"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantization_config"),
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
)  # fmt: skip
KEYS = [
    *BASE, "head_dim", "rope_theta", "rope_scaling", "rope_parameters", "sliding_window", "use_sliding_window",
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
