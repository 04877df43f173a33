"""Models: a folder of weights becomes a `Decoder` that computes logits."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

import torch

from engine.attention import AttentionKind, make_attention
from engine.collectives import Collectives, Solo
from engine.errors import ConfigError
from engine.linear import LinearKind
from engine.model_config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.loading import Loader
from engine.native import NativeDecoder, NativeUnavailable, check_native, load_library
from engine.weights import ShardSpec

__all__ = ["Decoder", "KernelKind", "Model", "load_model"]

_log = logging.getLogger(__name__)

KernelKind = Literal["auto", "native", "torch"]
Model = Decoder | NativeDecoder


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
    kernel: KernelKind = "auto",
) -> Model:
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
        kernel: `torch` for PyTorch's operators, `native` to insist on the native library, `auto` for the faster one
            that serves.

    Raises:
        ConfigError: the folder does not hold a model of a supported family, more shards than KV heads are asked for, or
            `native` is asked for where it does not serve.
    """
    config = ModelConfig.load(folder)
    where = torch.device(device)
    collectives = collectives or Solo()
    shard = ShardSpec(collectives.rank, collectives.size)
    shard.kv_heads(config)
    if any(not 0 <= layer < config.num_layers for layer in feature_layers):
        raise ConfigError(f"feature_layers: {feature_layers} is not within [0, {config.num_layers})")
    loader = Loader(config, folder, shard=shard, dtype=dtype, device=where, linear=linear)
    return make_decoder(
        loader,
        config,
        target_folder=target_folder,
        collectives=collectives,
        feature_layers=feature_layers,
        dtype=dtype,
        device=where,
        linear=linear,
        attention=attention,
        kernel=kernel,
    )


def make_decoder(
    loader: Loader,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    collectives: Collectives,
    target_folder: Path | None,
    feature_layers: tuple[int, ...],
    linear: LinearKind,
    attention: AttentionKind,
    kernel: KernelKind,
) -> Model:
    """Load a decoder and bind it to the kernels that serve it. Arguments and errors as in `load_model`."""
    shard = ShardSpec(collectives.rank, collectives.size)
    native = kernel != "torch" and (linear, attention) == ("auto", "auto")
    if native:
        native = _serves_natively(config, dtype, device, shard, insist=kernel == "native")
    with torch.inference_mode():
        weights = loader.load(target_folder, linear="reference" if native else None)
        if native:
            return NativeDecoder(config, weights, feature_layers=feature_layers, num_threads=torch.get_num_threads())
        group_size = config.num_heads // config.num_kv_heads
        return Decoder(
            config,
            weights,
            collectives=collectives,
            attention=make_attention(attention, group_size=group_size, dtype=dtype, device=device),
            feature_layers=feature_layers,
            dtype=dtype,
            device=device,
        )


def _serves_natively(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, shard: ShardSpec, *, insist: bool
) -> bool:
    """Whether the native library takes this model here; why not is logged, or raised as ConfigError on `insist`."""
    try:
        if device.type != "cpu" or dtype is not torch.bfloat16 or shard.size > 1:
            raise NativeUnavailable(
                f"it serves one bfloat16 shard on cpu, not {dtype} in {shard.size} on {device.type}"
            )
        check_native(config)
        load_library()
    except NativeUnavailable as error:
        if insist:
            raise ConfigError(f"kernel: native is asked for, but {error}") from None
        _log.info("no native kernels: %s", error)
        return False
    return True
