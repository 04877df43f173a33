"""`adapter_config.json`: what each key means, and the bounds on what anybody may put there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from engine.lora.adapter_config import (
    CONFIG_FILE,
    MAX_CONFIG_BYTES,
    MAX_PATTERN_CHARS,
    MAX_PATTERNS,
    AdapterConfig,
    ModuleScale,
    scales,
)

Q0, Q1, K1 = (f"model.layers.{name}_proj" for name in ("0.self_attn.q", "1.self_attn.q", "1.self_attn.k"))


def load(folder: Path, **values: Any) -> AdapterConfig:
    (folder / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", **values}))
    return AdapterConfig.load(folder)


DEFAULT = AdapterConfig(
    rank=8,
    alpha=8.0,
    is_rank_stabilised=False,
    target_modules=(),
    exclude_modules=(),
    layers=None,
    rank_pattern=(),
    alpha_pattern=(),
)


def test_the_defaults_of_every_key(tmp_path: Path) -> None:
    assert load(tmp_path) == DEFAULT
    unset = dict.fromkeys(("use_rslora", "target_modules", "exclude_modules", "layers_to_transform", "rank_pattern"))
    assert load(tmp_path, **unset, alpha_pattern=None, bias="none", init_lora_weights=None) == DEFAULT


def test_every_key_is_read(tmp_path: Path) -> None:
    assert load(
        tmp_path,
        r=3,
        lora_alpha=1.5,
        use_rslora=True,
        target_modules=["q_proj"],
        exclude_modules="k.*",
        layers_to_transform=[1, 0],
        rank_pattern={"a": 1, "b": 2},
        alpha_pattern={"c": 3},
    ) == AdapterConfig(
        rank=3,
        alpha=1.5,
        is_rank_stabilised=True,
        target_modules=("q_proj",),
        exclude_modules="k.*",
        layers=frozenset({0, 1}),
        rank_pattern=(("a", 1), ("b", 2)),
        alpha_pattern=(("c", 3.0),),
    )
    assert load(tmp_path, layers_to_transform=2).layers == frozenset({2})
    assert load(tmp_path, layers_to_transform=[]).layers is None
    assert load(tmp_path, layers_to_transform=0).layers == frozenset({0})


@pytest.mark.parametrize(
    "key",
    [
        *("auto_mapping", "base_model_name_or_path", "eva_config", "inference_mode", "layers_pattern", "lora_dropout"),
        *("megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type"),
    ],
)
def test_keys_without_an_effect_may_have_any_value(tmp_path: Path, key: str) -> None:
    assert load(tmp_path, **{key: {"a": 1}}) == DEFAULT


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_an_unknown_key_that_is_off_is_ignored(tmp_path: Path, value: Any) -> None:
    assert load(tmp_path, some_new_method=value, use_dora=value) == DEFAULT


@pytest.mark.parametrize("start", [True, False, "gaussian", "eva", "orthogonal"])
def test_starts_that_leave_the_base_model_as_it_is(tmp_path: Path, start: Any) -> None:
    assert load(tmp_path, init_lora_weights=start) == DEFAULT


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lora_bias": True}, "lora_bias: biases of adapters is not supported; train the adapter without it"),
        ({"use_qalora": True}, "use_qalora: QALoRA is not supported"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens: activated LoRA is not supported"),
        ({"layer_replication": [[0, 1]]}, "layer_replication: replicated layers is not supported"),
        ({"init_lora_weights": 1}, "init_lora_weights 1 may have changed the base model"),
        ({"r": 1.0}, "r: 1.0 is no whole number above 0"),
        ({"lora_alpha": True}, "lora_alpha: True is no finite number"),
        ({"layers_to_transform": [True]}, "layers_to_transform: [True] is neither a layer number nor a list of them"),
        ({"use_rslora": "yes"}, "lora: use_rslora: 'yes' is neither true nor false"),
        ({"exclude_modules": [1]}, "exclude_modules: [1] is neither a regular expression nor a list of names"),
        ({"exclude_modules": ["x" * 2001]}, "exclude_modules: an entry has more than 2000 characters"),
        ({"rank_pattern": {"x" * 2001: 1}}, "rank_pattern: a pattern has more than 2000 characters"),
        ({"rank_pattern": {str(n): 1 for n in range(2049)}}, "rank_pattern: an object of at most 2048 patterns"),
    ],
)
def test_refusals_name_the_key(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, **values)
    assert message in str(caught.value)


def test_the_largest_patterns_are_taken(tmp_path: Path) -> None:
    longest = "x" * MAX_PATTERN_CHARS
    found = load(tmp_path, target_modules=[longest], rank_pattern={longest: 1})
    assert (found.target_modules, found.rank_pattern) == ((longest,), ((longest, 1),))
    most = load(tmp_path, alpha_pattern={str(n): 1 for n in range(MAX_PATTERNS)})
    assert len(most.alpha_pattern) == MAX_PATTERNS


def test_a_file_is_read_up_to_its_largest_size(tmp_path: Path) -> None:
    load(tmp_path)
    path = tmp_path / CONFIG_FILE
    text = path.read_text()
    path.write_text(text + " " * (MAX_CONFIG_BYTES - len(text)))
    assert AdapterConfig.load(tmp_path) == DEFAULT
    path.write_text(text + " " * (MAX_CONFIG_BYTES - len(text) + 1))
    with pytest.raises(ConfigError, match="has more than 1048576 bytes"):
        AdapterConfig.load(tmp_path)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="does not hold a JSON object"):
        AdapterConfig.load(tmp_path)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"target_modules": ["q_proj"]}, {Q0: (8, 1.0), Q1: (8, 1.0)}),
        ({"target_modules": ["proj"]}, {}),
        ({"target_modules": [Q0, K1]}, {Q0: (8, 1.0), K1: (8, 1.0)}),
        ({"target_modules": ["q_proj"], "layers_to_transform": 1}, {Q1: (8, 1.0)}),
        ({"target_modules": "all-linear", "layers_to_transform": 1}, dict.fromkeys((Q0, Q1, K1), (8, 1.0))),
        ({"target_modules": r".*q_proj", "exclude_modules": r".*0.*"}, {Q1: (8, 1.0)}),
        ({"target_modules": "q_proj"}, {}),
        ({"target_modules": ""}, {}),
        ({"target_modules": "all-linear", "exclude_modules": "all-linear"}, {}),
        ({"target_modules": ["q_proj"], "r": 4, "lora_alpha": 6}, {Q0: (4, 1.5), Q1: (4, 1.5)}),
        (
            {"target_modules": ["q_proj"], "r": 4, "lora_alpha": 6, "use_rslora": True, "rank_pattern": {"1.*": 9}},
            {Q0: (4, 3.0), Q1: (9, 2.0)},
        ),
        (
            {"target_modules": ["q_proj"], "alpha_pattern": {"0.self_attn.q_proj": 4, "q_proj": 16, ".*": 1}},
            {Q0: (8, 0.5), Q1: (8, 2.0)},
        ),
    ],
)
def test_rank_and_scale_of_each_module(
    tmp_path: Path, values: dict[str, Any], expected: dict[str, tuple[int, float]]
) -> None:
    found = scales(load(tmp_path, **values), [Q0, Q1, K1])
    assert found == {name: ModuleScale(rank, scale) for name, (rank, scale) in expected.items()}
