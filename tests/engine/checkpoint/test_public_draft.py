"""Configs and tensor names of published EAGLE-3 heads, as values of this package, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from engine.checkpoint.public_draft import Eagle3Variant, default_feature_layers, is_public, tensor_name, translate
from engine.errors import ConfigError

IDS = "eagle_aux_hidden_state_layer_ids"
FLAT: dict[str, Any] = {"draft_vocab_size": 50, "hidden_size": 8, "vocab_size": 90, "tie_word_embeddings": True}
PLAIN = Eagle3Variant(
    feature_size=8, num_features=3, norm_before_residual=False, norm_before_fc=False, fc_norm=False, norm_output=False
)


def variant(**values: Any) -> Eagle3Variant:
    return translate(FLAT | values)[1]


def test_the_authors_layout() -> None:
    own, found = translate(FLAT)
    assert found == PLAIN
    assert own == FLAT | {"tie_word_embeddings": False, "architecture": "eagle", "feature_layers": []}


def test_the_layout_of_speculators() -> None:
    values = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": {"hidden_size": 8, "vocab_size": 90, "layer_types": ["full_attention"]},
        "target_hidden_size": 16,
        "norm_before_residual": True,
        IDS: [5, 2],
    }
    own, found = translate(values)
    assert own == {
        "hidden_size": 8,
        "vocab_size": 90,
        "layer_types": ["full_attention"],
        "draft_vocab_size": 90,
        "tie_word_embeddings": False,
        "architecture": "eagle",
        "feature_layers": [1, 4],
    }
    expected = {"feature_size": 16, "num_features": 2, "norm_before_residual": True}
    assert {key: getattr(found, key) for key in expected} == expected


@pytest.mark.parametrize("key", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"])
def test_each_norm_is_set_by_its_key_on_top_or_in_eagle_config(key: str) -> None:
    for values in ({key: True}, {"eagle_config": {key: True}}, {key: None, "eagle_config": {key: True}}):
        found = variant(**values)
        assert [name for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
                if getattr(found, name)] == [key]  # fmt: skip
    assert variant(**{key: False}) == PLAIN


def test_layers_are_numbered_by_their_input_or_in_eagle_config_by_their_output() -> None:
    assert translate(FLAT | {IDS: [3, 1]})[0]["feature_layers"] == [0, 2]
    assert translate(FLAT | {"eagle_config": {IDS: [3, 0]}})[0]["feature_layers"] == [0, 3]
    assert translate(FLAT | {"eagle_config": {IDS: [7]}, IDS: [3]})[0]["feature_layers"] == [7]
    assert translate(FLAT | {"eagle_config": {IDS: []}, IDS: [3]})[0]["feature_layers"] == [2]


def test_layers_that_no_config_names_are_early_middle_and_late() -> None:
    assert default_feature_layers(32) == (1, 15, 28)
    assert default_feature_layers(7) == (1, 2, 3)
    for num_layers in (6, 5, 4):
        with pytest.raises(ConfigError, match=f"the target's {num_layers} layers are too few"):
            default_feature_layers(num_layers)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"draft_vocab_size": 5}, True),
        ({"speculators_model_type": "eagle3"}, True),
        ({"dflash_config": {}}, False),
        ({"ptd_token_id": 3}, True),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, True),
        ({"model_type": "MLP_Speculator"}, True),
        ({"architectures": ["PEagleDraft"]}, True),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, False),
        ({"architectures": "Eagle3"}, False),
        ({"draft_vocab_size": 5, "architecture": "eagle"}, False),
        ({"draft_vocab_size": 5, "embed_tokens": "target"}, False),
    ],
)
def test_which_configs_are_of_published_drafts(values: dict[str, Any], expected: bool) -> None:
    assert is_public(values) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("midlayer.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("model.midlayer.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("layers.12.hidden_norm.weight", "model.layers.12.hidden_norm.weight"),
        ("model.norm.weight", "model.norm.weight"),
        ("embed_tokens.weight", "model.embed_tokens.weight"),
        ("fc.weight", "fc.weight"),
        ("model.fc.weight", "fc.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("d2t", "d2t"),
        ("fc_norm.0.weight", "fc_norm.0.weight"),
    ],
)
def test_tensors_get_the_names_of_one_layout(name: str, expected: str) -> None:
    assert tensor_name(name) == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"speculators_model_type": "eagle"},
            "speculators_model_type: 'eagle' is not supported; supported are EAGLE-3",
        ),
        (FLAT | {"model_type": "dspark"}, "its config.json names a DSpark draft, which is not supported"),
        (FLAT | {"model_type": "mlp_speculator"}, "its config.json names an MLP draft, which is not supported"),
        ({"architectures": ["EagleModel"]}, "its config.json names EAGLE-1 or EAGLE-2, which is not supported"),
        (FLAT | {"transformer_layer_config": 3}, "transformer_layer_config: 3 is not an object"),
        (FLAT | {"layer_types": "full"}, "layer_types: 'full' is not a list"),
        (FLAT | {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention is not supported"),
        (FLAT | {"norm_before_fc": True, "fc_norm": True}, "norm_before_fc, fc_norm: both are true"),
        (FLAT | {"norm_output": 1}, "norm_output: 1 is neither true nor false"),
        (FLAT | {"hidden_size": 0}, "target_hidden_size: 0 is not a whole number above 0"),
        (FLAT | {"hidden_size": True}, "target_hidden_size: True is not a whole number above 0"),
        (FLAT | {"eagle_config": [1]}, "eagle_config: [1] is not an object"),
        *(
            (FLAT | {"eagle_config": {key: False}}, f"eagle_config.{key}: False is not supported; allowed: true")
            for key in ("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm")
        ),
        (FLAT | {IDS: [0]}, f"{IDS}: [0] given, allowed is a list of different layer numbers from 1"),
        (FLAT | {IDS: [2, 2]}, "allowed is a list of different layer numbers from 1"),
        (FLAT | {IDS: [True]}, "allowed is a list of different layer numbers from 1"),
        (FLAT | {IDS: 3}, f"{IDS}: 3 given"),
        (FLAT | {"eagle_config": {IDS: [-1]}}, "[-1] given, allowed is a list of different layer numbers from 0"),
    ],
)
def test_what_is_not_supported_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        translate(values)
    assert message in str(caught.value)


def test_a_head_may_be_known_by_its_name_alone() -> None:
    values = {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 1, "vocab_size": 90}
    own, found = translate(values)
    assert (own["draft_vocab_size"], found.feature_size) == (90, 1)
