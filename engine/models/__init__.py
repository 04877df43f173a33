"""Models: a folder of weights becomes a `Decoder` that computes logits."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.attention import AttentionKind, make_attention
from engine.collectives import Collectives, Solo
from engine.errors import ConfigError
from engine.linear import LinearKind
from engine.model_config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.loading import Loader
from engine.weights import ShardSpec

__all__ = ["Decoder", "load_model"]


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    collectives: Collectives | None = None,
    target_folder: Path | None = None,
    feature_layers: tuple[int, ...] = (),
    linear: LinearKind = "auto",
    attention: AttentionKind = "auto",
) -> Decoder:
    """Load one shard of a model.

    Args:
        folder: with config.json and safetensors, see `engine.model_store.resolve_model`.
        dtype: compute type of weights and activations: bfloat16 or float32.
        device: cpu or cuda.
        collectives: ties this shard to the others and says which part to load; None is a model on one device.
        target_folder: where a draft takes an embedding that it shares with its target.
        feature_layers: layers, ascending, whose outputs a forward also yields.
        linear: `reference` for plain linear layers and norms.
        attention: `reference` for plain loops.

    Raises:
        ConfigError: the folder does not hold a model of a supported family, or more shards than KV heads are asked for.
    """
    config = ModelConfig.load(folder)
    where = torch.device(device)
    collectives = collectives or Solo()
    shard = ShardSpec(collectives.rank, collectives.size)
    shard.kv_heads(config)
    if any(not 0 <= layer < config.num_layers for layer in feature_layers):
        raise ConfigError(f"feature_layers: {feature_layers} is not within [0, {config.num_layers})")
    loader = Loader(config, folder, shard=shard, dtype=dtype, device=where, linear=linear)
    group_size = config.num_heads // config.num_kv_heads
    with torch.inference_mode():
        return Decoder(
            config,
            loader.load(target_folder),
            collectives=collectives,
            attention=make_attention(attention, group_size=group_size, dtype=dtype, device=where),
            feature_layers=feature_layers,
            dtype=dtype,
            device=where,
        )
