"""One shard's weights: each part is the right slice of the file, and the parts of all shards are the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import write_model

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weights import ShardSpec, WeightFiles
from engine.errors import ConfigError
from engine.model.decoder import DecoderWeights, Layer, dense_mlp
from engine.model.device import Compute
from engine.model.layers import Linear, PlainLinear
from engine.model.shard_weights import Loader

COMPUTE = Compute(torch.float32, torch.device("cpu"), "reference")
ATTENTION, MLP = "model.layers.2.self_attn.", "model.layers.2.mlp."


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "llama", "llama-biased")


def load(folder: Path, rank: int, size: int) -> DecoderWeights:
    shard = ShardSpec(rank, size)
    loader = Loader(ModelConfig.load(folder), WeightFiles(folder), COMPUTE, shard=shard, linear="reference")
    return loader.decoder(None)


def plain(linear: Linear) -> PlainLinear:
    assert isinstance(linear, PlainLinear)
    return linear


def part_of(layer: Layer, name: str) -> Linear:
    linear: Linear = getattr(layer if name == "o" else dense_mlp(layer), name)
    return linear


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_parts_of_all_shards_are_the_whole_layer(biased: Path, size: int) -> None:
    tensors = load_file(biased / "model.safetensors")
    shards = [load(biased, rank, size) for rank in range(size)]
    layers = [shard.layers[2] for shard in shards]
    heads, groups, dim = 6, 3, 8
    parts: dict[str, list[torch.Tensor]] = {"q_proj": [], "k_proj": [], "v_proj": []}
    for rank, layer in enumerate(layers):
        own = ShardSpec(rank, size).parts(groups)[rank]
        sizes = [own * heads // groups * dim, own * dim, own * dim]
        for name, part in zip(parts, plain(layer.qkv).weight.split(sizes), strict=True):
            parts[name].append(part)
    for name, weights in parts.items():
        assert torch.equal(torch.cat(weights), tensors[f"{ATTENTION}{name}.weight"]), name
    for name, attribute, dim_of in (
        (ATTENTION + "o_proj", "o", 1),
        (MLP + "gate_proj", "gate", 0),
        (MLP + "up_proj", "up", 0),
        (MLP + "down_proj", "down", 1),
    ):
        weights = [plain(part_of(layer, attribute)).weight for layer in layers]
        assert torch.equal(torch.cat(weights, dim=dim_of), tensors[f"{name}.weight"]), name
    assert torch.equal(torch.cat([plain(shard.head).weight for shard in shards]), tensors["lm_head.weight"])
    for shard in shards:
        assert torch.equal(shard.embedding, tensors["model.embed_tokens.weight"])
        assert torch.equal(shard.final_norm.weight, tensors["model.norm.weight"])


def test_only_rank_0_adds_the_bias_of_a_layer_that_is_summed(biased: Path) -> None:
    tensors = load_file(biased / "model.safetensors")
    first, second = (load(biased, rank, 2).layers[2] for rank in range(2))
    for name, attribute in ((ATTENTION + "o_proj", "o"), (MLP + "down_proj", "down")):
        bias = plain(part_of(first, attribute)).bias
        assert bias is not None
        assert torch.equal(bias, tensors[f"{name}.bias"])
        assert plain(part_of(second, attribute)).bias is None
    for name, attribute in ((MLP + "gate_proj", "gate"), (MLP + "up_proj", "up")):
        biases = [plain(part_of(layer, attribute)).bias for layer in (first, second)]
        assert torch.equal(torch.cat([bias for bias in biases if bias is not None]), tensors[f"{name}.bias"])


def test_a_tied_head_is_the_shards_rows_of_the_embedding(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "qwen2", "qwen2")
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    parts = [plain(load(folder, rank, 2).head).weight for rank in range(2)]
    assert torch.equal(torch.cat(parts), embedding)


def test_a_tied_head_with_a_reduced_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "qwen2", "qwen2")
    path = folder / "config.json"
    path.write_text(path.read_text().replace("{", '{"architecture": "draft_model", "draft_vocab_size": 5,', 1))
    with pytest.raises(ConfigError, match="tie_word_embeddings"):
        load(folder, 0, 1)
