"""The rotary embedding of a config.json: what each key means, and what a missing one does."""

from __future__ import annotations

import math
from typing import Any

import pytest

from engine.checkpoint.rope_config import RopeConfig, RopeScaling, read_rope
from engine.errors import ConfigError

FACTORS = {"short_factor": [1.0, 2.0], "long_factor": [3, 4.5]}
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 1024} | FACTORS
YARN = {"rope_type": "yarn", "original_max_position_embeddings": 1024}
LINEAR = {"rope_type": "linear", "factor": 8.0}


def rope(family: str, **values: Any) -> RopeConfig:
    return read_rope({"model_type": family, **values}, max_position=4096)


@pytest.mark.parametrize(
    ("family", "values", "expected"),
    [
        ("llama", {}, RopeConfig(theta=10_000.0)),
        ("mixtral", {}, RopeConfig(theta=1_000_000.0)),
        ("llama", {"rope_theta": 5.0}, RopeConfig(theta=5.0)),
        ("llama", {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 6.0}}, RopeConfig(theta=6.0)),
        ("llama", {"rope_parameters": {}, "rope_scaling": LINEAR}, RopeConfig(theta=10_000.0)),
        ("phi3", {"partial_rotary_factor": 0.75}, RopeConfig(theta=10_000.0, rotated_share=0.75)),
        ("phi3", {"rope_parameters": {"partial_rotary_factor": 0.5}}, RopeConfig(theta=10_000.0, rotated_share=0.5)),
        ("gemma3_text", {}, RopeConfig(theta=1_000_000.0, local_theta=10_000.0)),
        ("gemma3_text", {"rope_local_base_freq": 5.0}, RopeConfig(theta=1_000_000.0, local_theta=5.0)),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": {"rope_theta": 7.0}}},
            RopeConfig(theta=7.0, local_theta=10_000.0),
        ),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": {"rope_theta": 3.0, "rope_type": "default"}}},
            RopeConfig(theta=1_000_000.0, local_theta=3.0),
        ),
    ],
)
def test_the_base_and_the_rotated_share(family: str, values: dict[str, Any], expected: RopeConfig) -> None:
    assert rope(family, **values) == expected


@pytest.mark.parametrize(
    ("scaling", "expected", "max_len"),
    [
        ({"type": "linear", "factor": 2}, RopeScaling(kind="linear", factor=2.0), 0),
        (
            {"rope_type": "dynamic", "factor": 2.0},
            RopeScaling(kind="dynamic", factor=2.0, original_max_len=4096),
            8192,
        ),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 2.0,
                "high_freq_factor": 3.0,
                "original_max_position_embeddings": 77,
            },
            RopeScaling(kind="llama3", factor=8.0, low_freq_factor=2.0, high_freq_factor=3.0, original_max_len=77),
            0,
        ),
        (
            LONGROPE,
            RopeScaling(
                kind="longrope",
                factor=4.0,
                original_max_len=1024,
                short_factors=(1.0, 2.0),
                long_factors=(3.0, 4.5),
                attention_factor=math.sqrt(1 + math.log(4) / math.log(1024)),
            ),
            0,
        ),
        (
            YARN,
            RopeScaling(kind="yarn", factor=4.0, original_max_len=1024, attention_factor=0.1 * math.log(4) + 1),
            4096,
        ),
        (
            YARN | {"factor": 2.0, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "attention_factor": 1.5},
            RopeScaling(
                kind="yarn",
                factor=2.0,
                original_max_len=1024,
                beta_fast=16.0,
                beta_slow=2.0,
                truncate=False,
                attention_factor=1.5,
            ),
            2048,
        ),
    ],
)
def test_each_kind_of_scaling(scaling: dict[str, Any], expected: RopeScaling, max_len: int) -> None:
    assert rope("llama", rope_scaling=scaling) == RopeConfig(theta=10_000.0, scaling=expected, max_len=max_len)
    given = rope("llama", rope_parameters=scaling | {"rope_theta": 5.0})
    assert given == RopeConfig(theta=5.0, scaling=expected, max_len=max_len)


@pytest.mark.parametrize(
    ("changes", "attention_factor"),
    [
        ({"mscale": 0.5, "mscale_all_dim": 0.8}, (0.05 * math.log(4) + 1) / (0.08 * math.log(4) + 1)),
        ({"mscale": 0.5}, 0.1 * math.log(4) + 1),
        ({"mscale_all_dim": 0.5}, 0.1 * math.log(4) + 1),
        ({"factor": 1.0}, 1.0),
        ({"factor": 0.5}, 1.0),
    ],
)
def test_yarn_s_attention_factor_by_the_paper(changes: dict[str, Any], attention_factor: float) -> None:
    scaling = rope("llama", rope_scaling=YARN | changes).scaling
    assert scaling is not None
    assert scaling.attention_factor == pytest.approx(attention_factor, rel=1e-12)


@pytest.mark.parametrize(
    "changes",
    [
        {"factor": 1.0},
        {"factor": 0.5},
        {"original_max_position_embeddings": 1},
        {"attention_factor": 1.0},
        {"original_max_position_embeddings": None},
    ],
)
def test_longrope_without_a_longer_context_changes_no_attention(changes: dict[str, Any]) -> None:
    scaling = rope("llama", rope_scaling=LONGROPE | changes).scaling
    assert scaling is not None
    assert scaling.attention_factor == 1.0


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_phi_s_names_of_longrope_and_its_place_of_the_original_length(name: str) -> None:
    scaling = rope("phi3", rope_scaling={"type": name} | FACTORS, original_max_position_embeddings=2048).scaling
    assert scaling is not None
    assert (scaling.kind, scaling.original_max_len, scaling.factor) == ("longrope", 2048, 2.0)


def test_both_kinds_of_gemma_s_layers() -> None:
    expected = RopeConfig(theta=7.0, local_theta=3.0, scaling=RopeScaling(kind="linear", factor=8.0))
    layers = {"full_attention": LINEAR | {"rope_theta": 7.0}, "sliding_attention": {"rope_theta": 3.0}}
    assert rope("gemma3_text", rope_parameters=layers) == expected
    assert rope("gemma3_text", rope_theta=7.0, rope_local_base_freq=3.0, rope_scaling=LINEAR) == expected


def test_the_longest_context_is_bounded() -> None:
    assert rope("llama", rope_scaling=YARN | {"factor": 1e9}).max_len == 1 << 31


@pytest.mark.parametrize(
    ("family", "values", "message"),
    [
        (
            "llama",
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor: 0.5 is not supported for llama; allowed: 1.0",
        ),
        ("phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor: 1.5 is not supported for phi3; allowed: 1.0"),
        (
            "llama",
            {"rope_scaling": {"type": "su"}},
            "rope_scaling.rope_type: 'su' is not supported; allowed: default, ",
        ),
        ("llama", {"rope_parameters": {"rope_type": ["yarn"]}}, "rope_parameters.rope_type: ['yarn'] is not supported"),
        ("llama", {"rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta: 1.0 is not above 1, which yarn needs"),
        ("llama", {"rope_scaling": [1]}, "rope_scaling: [1] is not an object"),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": LINEAR}},
            "rope_parameters.sliding_attention.rope_type: 'linear' is not supported; allowed: default",
        ),
        ("gemma3_text", {"rope_parameters": {"full_attention": 3}}, "does not hold an object for each kind of layer"),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": 3}},
            "does not hold an object for each kind of layer",
        ),
    ],
)
def test_what_is_not_supported_is_named(family: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rope(family, **values)
    assert message in str(caught.value)


def test_yarn_takes_a_base_just_above_one() -> None:
    assert rope("llama", rope_scaling=YARN, rope_theta=1.01).theta == 1.01
