"""Keys that would change the forward pass: neutral values are taken, every other one is refused by its name."""

from __future__ import annotations

from typing import Any

import pytest

from engine.checkpoint.model_config import ModelConfig
from engine.errors import ConfigError

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def parse(**changes: Any) -> ModelConfig:
    return ModelConfig.parse(BASE | changes)


@pytest.mark.parametrize(
    ("key", "neutral", "other"),
    [
        ("attn_logit_softcapping", None, 50.0),
        ("final_logit_softcapping", None, 30.0),
        ("use_bidirectional_attention", False, True),
        ("clip_qkv", None, 8.0),
        ("logit_scale", 1.0, 0.5),
        ("logits_scaling", 1.0, 2.0),
        ("embedding_multiplier", 1.0, 12.0),
        ("residual_multiplier", 1.0, 0.22),
        ("attention_multiplier", None, 0.5),
        ("attention_chunk_size", None, 8192),
        ("no_rope_layers", [], [1, 0]),
        ("alibi", False, True),
        ("shared_expert_intermediate_size", 0, 16),
        ("n_shared_experts", 0, 1),
    ],
)
def test_a_key_that_changes_the_forward_pass_is_refused_by_name(key: str, neutral: Any, other: Any) -> None:
    assert parse(**{key: neutral}) == parse(**{key: None}) == parse()
    with pytest.raises(ConfigError, match=f"^{key}: "):
        parse(**{key: other})


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", False),
        ("mistral", False),
        ("qwen2", False),
        ("qwen3", True),
        ("qwen3_moe", True),
    ],
)
def test_families_with_norms_of_queries_and_keys(family: str, expected: bool) -> None:
    assert parse(model_type=family, **(EXPERTS if family == "qwen3_moe" else {})).qk_norm == expected


def num_weights(config: ModelConfig, *, has_head: bool = True) -> int:
    return config.num_weights(
        heads=config.num_heads, kv_heads=config.num_kv_heads, part=lambda total: total, has_head=has_head
    )


def test_weights_are_counted_by_the_shape() -> None:
    """A layer has q, k and v of 64 outputs, o of 32, an MLP of three times 64 units, and two norms."""
    layers = 2 * (32 * 64 + 32 * 32 + 3 * 32 * 64 + 2 * 32)
    assert num_weights(parse()) == layers + 2 * 100 * 32 + 32
    assert num_weights(parse(), has_head=False) == layers + 100 * 32 + 32
    assert num_weights(parse(model_type="qwen2")) == layers + 2 * 64 + 2 * 100 * 32 + 32
    assert num_weights(parse(model_type="qwen3", head_dim=8)) == layers + 2 * 2 * 8 + 2 * 100 * 32 + 32
    assert num_weights(parse(draft_vocab_size=50)) == layers + 150 * 32 + 32
