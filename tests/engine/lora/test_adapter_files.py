"""Folders of adapters: what is read from them, and one clear error for each that is not served."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_adapters import write_adapter
from tiny_models import write_model

from engine.checkpoint.model_config import ModelConfig
from engine.config import LoraConfig
from engine.errors import ConfigError
from engine.lora import adapter_config
from engine.lora.adapter_files import AdapterSpec, module_shapes, num_adapter_values, read_adapter

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), "llama")


def read(folder: Path, model: Path, max_rank: int = 16) -> AdapterSpec:
    return read_adapter(folder, ModelConfig.load(model), max_rank=max_rank)


def change(folder: Path, **values: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_rank_and_scale_follow_the_first_pattern_that_matches(tmp_path: Path, model: Path) -> None:
    adapter = write_adapter(tmp_path, model, rank=2, alpha=6, ranks={"q_proj": 4})
    change(adapter, alpha_pattern={r"layers\.[01]\.self_attn\.q_proj": 8, "q_proj": 2, "proj": 99, "_proj": 98})
    modules = read(adapter, model).modules
    assert len(modules) == 21
    found = {name: (module.rank, module.scale) for name, module in modules.items()}
    assert found["model.layers.1.self_attn.q_proj"] == (4, 2.0)
    assert found["model.layers.2.self_attn.q_proj"] == (4, 0.5)
    assert found["model.layers.2.self_attn.k_proj"] == (2, 3.0), "a pattern matches whole parts of a name"
    change(adapter, use_rslora=True)
    assert read(adapter, model).modules["model.layers.0.self_attn.q_proj"].scale == 4.0
    assert read(adapter, model).rank == 4


@pytest.mark.parametrize(
    "targets",
    [
        "all-linear",
        r".*\.(q|k|v|o|gate|up|down)_proj",
        ["self_attn.q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "mlp.down_proj"],
    ],
)
def test_every_form_of_target_modules(tmp_path: Path, model: Path, targets: Any) -> None:
    adapter = write_adapter(tmp_path, model)
    change(adapter, target_modules=targets)
    assert set(read(adapter, model).modules) == set(module_shapes(ModelConfig.load(model)))


def test_layers_and_excluded_modules_are_left_out(tmp_path: Path, model: Path) -> None:
    adapter = write_adapter(tmp_path, model, targets=("q_proj", "k_proj"))
    tensors = load_file(adapter / WEIGHTS)
    kept = {name: tensor for name, tensor in tensors.items() if ".1.self_attn.q_proj" in name}
    save_file(kept, adapter / WEIGHTS)
    change(adapter, layers_to_transform=[1], exclude_modules=["k_proj"])
    assert list(read(adapter, model).modules) == ["model.layers.1.self_attn.q_proj"]
    change(adapter, layers_to_transform=None, target_modules=r".*\.1\..*q_proj", exclude_modules=".*k_proj")
    assert list(read(adapter, model).modules) == ["model.layers.1.self_attn.q_proj"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "bias 'all'"),
        ({"bias": "lora_only"}, "bias 'lora_only'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [1]}, "embedding"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "parameters"),
        ({"fan_in_fan_out": True}, "transposed"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4'"),
        ({"some_new_method": {"a": 1}}, "some_new_method"),
        ({"r": 0}, "r: 0"),
        ({"r": True}, "r: True"),
        ({"r": "3"}, "r: '3'"),
        ({"lora_alpha": float("nan")}, "lora_alpha: nan"),
        ({"lora_alpha": None}, "lora_alpha: None"),
        ({"use_rslora": "yes"}, "use_rslora"),
        ({"rank_pattern": {"q_proj": -1}}, "rank_pattern: -1"),
        ({"rank_pattern": {"(": 3}}, "no regular expression"),
        ({"rank_pattern": [1]}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern"),
        ({"target_modules": 7}, "target_modules: 7"),
        ({"target_modules": ["q_proj"]}, "does not name model.layers.0.self_attn.k_proj"),
        ({"target_modules": None}, "does not name"),
        ({"layers_to_transform": "0"}, "layers_to_transform"),
        ({"r": 4}, "rank and target imply"),
        ({"r": 40}, "max_lora_rank allows up to 16"),
        ({"target_modules": "x" * 5000}, "more than 2000 characters"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    tmp_path: Path, model: Path, values: dict[str, Any], message: str
) -> None:
    adapter = write_adapter(tmp_path, model)
    change(adapter, **values)
    with pytest.raises(ConfigError, match=r"^lora: ") as raised:
        read(adapter, model)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("base_model.model.lm_head.lora_A.weight", "adapters of the head"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "adapters of the embedding"),
        ("base_model.model.model.layers.0.mlp.experts.0.w1.lora_A.weight", "adapters of experts"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", "DoRA"),
        ("base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight", "no such module"),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", "no such module"),
    ],
)
def test_tensors_without_a_module_are_refused(tmp_path: Path, model: Path, name: str, message: str) -> None:
    adapter = write_adapter(tmp_path, model)
    save_file(load_file(adapter / WEIGHTS) | {name: torch.zeros(3, 48)}, adapter / WEIGHTS)
    with pytest.raises(ConfigError, match=message):
        read(adapter, model)


def test_missing_and_wrong_tensors_are_refused(tmp_path: Path, model: Path) -> None:
    adapter = write_adapter(tmp_path, model)
    tensors = load_file(adapter / WEIGHTS)
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, adapter / WEIGHTS)
    with pytest.raises(ConfigError, match=r"names model\.layers\.1\.mlp\.up_proj, .* the file has A"):
        read(adapter, model)
    save_file(tensors | {name: tensors[name].T.contiguous()}, adapter / WEIGHTS)
    with pytest.raises(ConfigError, match=r"has shape \[3, 80\]"):
        read(adapter, model)
    save_file(tensors | {name: tensors[name].to(torch.int32)}, adapter / WEIGHTS)
    with pytest.raises(ConfigError, match="of type I32"):
        read(adapter, model)
    (adapter / WEIGHTS).unlink()
    with pytest.raises(ConfigError, match="only safetensors"):
        read(adapter, model)
    with pytest.raises(ConfigError, match="no folder"):
        read(tmp_path / "none", model)


def test_a_slow_pattern_ends_with_an_error(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_config, "MATCH_TIMEOUT_S", 0.2)
    adapter = write_adapter(tmp_path, model)
    change(adapter, target_modules=r"(?:[a-z.]|[a-z.0-9_]|.)+(?<=!)")
    with pytest.raises(ConfigError, match=r"take over 0\.2 s to match"):
        read(adapter, model)


def test_mutated_files_give_an_error_or_the_right_shapes(tmp_path: Path, model: Path) -> None:
    adapter = write_adapter(tmp_path, model, targets=("q_proj", "v_proj"))
    rng = random.Random(5)
    original = {name: (adapter / name).read_bytes() for name in (WEIGHTS, "adapter_config.json")}
    expected = read(adapter, model).modules
    errors: list[str] = []
    for _ in range(400):
        name = rng.choice(sorted(original))
        data = bytearray(original[name])
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(min(len(data), 2000))
            kind = rng.randrange(3)
            if kind == 0:
                data[place] = rng.randrange(256)
            elif kind == 1:
                del data[place : place + rng.randint(1, 40)]
            else:
                data = data[: max(1, rng.randrange(len(data)))]
        (adapter / name).write_bytes(data)
        try:
            assert read(adapter, model).modules.keys() <= expected.keys()
        except ConfigError as error:
            errors.append(str(error))
        (adapter / name).write_bytes(original[name])
    assert len(errors) > 100
    assert all(error.startswith("lora: ") for error in errors)


def parsed(**changes: Any) -> ModelConfig:
    values = {
        "model_type": "llama",
        "vocab_size": 90,
        "hidden_size": 12,
        "intermediate_size": 7,
        "num_hidden_layers": 2,
    }
    return ModelConfig.parse(values | {"num_attention_heads": 3, "num_key_value_heads": 1} | changes)


def test_the_modules_of_a_target_and_their_shapes() -> None:
    shapes = module_shapes(parsed())
    assert list(shapes.items())[:7] == [
        ("model.layers.0.self_attn.q_proj", (12, 12)),
        ("model.layers.0.self_attn.k_proj", (4, 12)),
        ("model.layers.0.self_attn.v_proj", (4, 12)),
        ("model.layers.0.self_attn.o_proj", (12, 12)),
        ("model.layers.0.mlp.gate_proj", (7, 12)),
        ("model.layers.0.mlp.up_proj", (7, 12)),
        ("model.layers.0.mlp.down_proj", (12, 7)),
    ]
    assert len(shapes) == 14
    fused = module_shapes(parsed(model_type="phi3"))
    assert fused["model.layers.1.self_attn.qkv_proj"] == (20, 12)
    assert fused["model.layers.1.mlp.gate_up_proj"] == (14, 12)
    assert len(fused) == 8


@pytest.mark.parametrize(("num_shards", "per_layer"), [(1, 24 + 2 * 16 + 24 + 3 * 19), (2, 18 + 28 + 18 + 32 + 16)])
def test_the_room_for_adapters_on_one_shard(num_shards: int, per_layer: int) -> None:
    """Of two shards: half of the outputs of q, k, v, gate and up, and half of the inputs of o and down, rounded up."""
    lora = LoraConfig.model_validate({"max_loras": 3, "max_lora_rank": 5})
    assert num_adapter_values(lora, parsed(), num_shards=num_shards) == 2 * per_layer * 5 * 3
