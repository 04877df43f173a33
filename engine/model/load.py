"""Models: a folder of weights becomes a `Decoder` that computes logits."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.checkpoint.draft_check import check_draft
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weights import WHOLE, ShardSpec, WeightFiles
from engine.errors import ConfigError
from engine.model.attention import make_attention
from engine.model.collectives import Collectives, Solo
from engine.model.decoder import Decoder
from engine.model.device import Compute, KernelKind
from engine.model.eagle_head import EagleHead
from engine.model.native import NativeUnavailable, load_library
from engine.model.native_decoder import NativeDecoder, check_native
from engine.model.shard_weights import Loader

__all__ = ["Decoder", "Model", "load_decoder", "load_model"]

_log = logging.getLogger(__name__)

Model = Decoder | NativeDecoder


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    kernel: KernelKind = "auto",
    collectives: Collectives | None = None,
    target_folder: Path | None = None,
    feature_layers: tuple[int, ...] = (),
) -> Model:
    """Load one shard of a model.

    Args:
        folder: with config.json and safetensors, see `engine.checkpoint.store.resolve_model`.
        dtype: compute type of weights and activations: bfloat16 or float32.
        device: cpu or cuda.
        kernel: who computes a forward; `auto` for the fastest that serves.
        collectives: ties this shard to the others and says which part to load; None is a model on one device.
        target_folder: where a draft takes an embedding that it shares with its target.
        feature_layers: layers, ascending, whose outputs a forward also yields.

    Raises:
        ConfigError: the folder does not hold a model of a supported family, more shards than KV heads are asked for, or
            `native` is asked for where it does not serve.
    """
    return load_decoder(
        ModelConfig.load(folder),
        WeightFiles(folder),
        Compute(dtype, torch.device(device), kernel),
        collectives=collectives or Solo(),
        target_folder=target_folder,
        feature_layers=feature_layers,
    )


def load_decoder(
    config: ModelConfig,
    files: WeightFiles,
    compute: Compute,
    *,
    collectives: Collectives,
    target_folder: Path | None,
    feature_layers: tuple[int, ...],
) -> Model:
    """Load what `files` hold beyond what was read of them before, bound to the kernels that serve it.

    Arguments and errors as in `load_model`.
    """
    if any(not 0 <= layer < config.num_layers for layer in feature_layers):
        raise ConfigError(f"feature_layers: {feature_layers} is not within [0, {config.num_layers})")
    shard = ShardSpec(collectives.rank, collectives.size)
    shard.kv_heads(config)  # Too many shards are refused before anything is read.
    native = compute.kernel in ("auto", "native") and _serves_natively(config, compute, shard)
    loader = Loader(config, files, compute, shard=shard, linear="reference" if native else compute.layers)
    with torch.inference_mode():
        weights = loader.decoder(target_folder)
        if native:
            return NativeDecoder(config, weights, feature_layers=feature_layers, num_threads=torch.get_num_threads())
        fused = compute.kernel == "triton"
        attention = make_attention(
            "triton" if fused else compute.layers,
            group_size=config.num_heads // config.num_kv_heads,
            dtype=compute.dtype,
            device=compute.device,
        )
        decoder = Decoder
        if fused:
            from engine.model.fused_decoder import FusedDecoder  # Imports Triton, which only GPUs need.

            decoder = FusedDecoder
        return decoder(
            config, weights, compute, collectives=collectives, attention=attention, feature_layers=feature_layers
        )


def _serves_natively(config: ModelConfig, compute: Compute, shard: ShardSpec) -> bool:
    """Whether the native library takes this model here.

    Why not is logged, or raised as ConfigError where `native` is asked for.
    """
    try:
        if compute.device.type != "cpu" or compute.dtype is not torch.bfloat16 or shard.size > 1:
            raise NativeUnavailable(
                f"it serves one bfloat16 shard on cpu, not {compute.dtype} in {shard.size} on {compute.device.type}"
            )
        check_native(config)
        load_library()
    except NativeUnavailable as error:
        if compute.kernel == "native":
            raise ConfigError(f"kernel: native is asked for, but {error}") from None
        _log.info("no native kernels: %s", error)
        return False
    return True


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft, of either architecture."""

    decoder: Model
    head: EagleHead | None
    """Of an `eagle` draft, whose decoder then also yields the output of its last layer."""


def load_draft(
    folder: Path,
    target_folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    kernel: KernelKind = "auto",
) -> LoadedDraft:
    """Load a draft for a target. Arguments as in `load_model`.

    Raises:
        ConfigError: it does not belong to the target, with the field and both values; or any reason of `load_model`.
    """
    config = check_draft(folder, target_folder)
    files = WeightFiles(folder)
    compute = Compute(dtype, torch.device(device), kernel)
    head = None
    if config.architecture == "eagle":
        with torch.inference_mode():
            head = Loader(config, files, compute, shard=WHOLE, linear=compute.layers).eagle_head()
    decoder = load_decoder(
        config,
        files,
        compute,
        collectives=Solo(),
        target_folder=target_folder,
        feature_layers=() if head is None else (config.num_layers - 1,),
    )
    return LoadedDraft(decoder, head)
