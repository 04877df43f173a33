"""Loading models: a folder of weights becomes a `Decoder` or `NativeDecoder`, a draft's folder a `LoadedDraft`.

Owns the choice between the native kernels and PyTorch's operators. Reading files is in `engine.checkpoint`, the names
of tensors are in `engine.model.shard_weights`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.checkpoint.draft_check import check_draft
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.public_draft import MASK_HIDDEN, SUPPORTED, tensor_name
from engine.checkpoint.weights import WHOLE, ShardSpec, WeightFiles
from engine.errors import ConfigError
from engine.model.attention import make_attention
from engine.model.collectives import Collectives, Solo
from engine.model.decoder import Decoder, DecoderWeights
from engine.model.device import Compute, KernelKind
from engine.model.eagle_head import Eagle3Decoder, Eagle3Head, EagleHead
from engine.model.eagle_weights import EagleLoader
from engine.model.native import NativeUnavailable, load_library
from engine.model.native.decoder import NativeDecoder
from engine.model.native.limits import check_native
from engine.model.native.matrices import PackedWeights
from engine.model.shard_weights import EMBEDDING, Loader

__all__ = ["Decoder", "LoadedDraft", "Model", "load_draft", "load_model"]

_log = logging.getLogger(__name__)

Model = Decoder | NativeDecoder
Adapt = Callable[[ModelConfig, ShardSpec, DecoderWeights], DecoderWeights]
"""Makes other layers of a shard's weights."""


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    kernel: KernelKind = "auto",
    collectives: Collectives | None = None,
    target_folder: Path | None = None,
    feature_layers: tuple[int, ...] = (),
    max_model_len: int | None = None,
    packed: bool = True,
    adapt: Adapt | None = None,
    fp8_cache: bool = False,
) -> Model:
    """Load one shard of a model.

    Args:
        folder: holds config.json and safetensors, see `engine.checkpoint.store.resolve_model`.
        dtype: dtype of weights and activations, bfloat16 or float32.
        device: cpu or cuda.
        kernel: implementation of the forward; `auto` is the fastest one that supports this model and machine.
        collectives: connects the shards and gives the rank to load; None loads a whole model on one device.
        target_folder: source of the embedding of a draft that shares its target's.
        feature_layers: layers whose outputs a forward also returns, ascending.
        max_model_len: longest prompt and output that will be served; None means the model's limit.
        packed: let the native kernel multiply quantised weights as they are. The result has the same bits as with
            dequantised ones.
        adapt: wraps the layers of a model before it is made. The native kernel computes what is in the wrappers.
        fp8_cache: whether the KV cache will have the element type `FP8`.

    Raises:
        ConfigError: the model's family is not supported, it cannot be divided into so many shards, or `kernel` is
            `native`, `triton` or `invariant` and does not support this model or machine, or `fp8_cache` does not.
    """
    config = ModelConfig.load(folder).for_context(max_model_len)
    compute = Compute(dtype, torch.device(device), kernel)
    collectives = collectives or Solo()
    shard = ShardSpec(collectives.rank, collectives.size)
    shard.kv_heads(config)  # Refuses too many shards before any file is read.
    native = _supports_native(config, compute, shard)
    return _load_decoder(
        config,
        WeightFiles(folder, config.quantization, as_stored=native and packed),
        compute,
        native=native,
        packed=packed,
        collectives=collectives,
        target_folder=target_folder,
        feature_layers=feature_layers,
        adapt=adapt,
        fp8_cache=fp8_cache,
    )


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A loaded draft of either architecture."""

    decoder: Model
    """Computes the logits. For an `eagle` draft it also returns the output of its last layer."""
    head: EagleHead | Eagle3Head | None
    """Computes the decoder's input of an `eagle` draft; None for a `draft_model`."""


def load_draft(
    folder: Path,
    target_folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    kernel: KernelKind = "auto",
    max_model_len: int | None = None,
    packed: bool = True,
    num_threads: int | None = None,
) -> LoadedDraft:
    """Load a draft for a target. The other arguments are those of `load_model`.

    Args:
        folder: model folder of the draft.
        target_folder: model folder of the target.
        num_threads: threads of a native forward; None takes as many as PyTorch has in this thread.

    Raises:
        ConfigError: the draft does not fit the target (names the field and both values), or a reason of `load_model`.
    """
    config = check_draft(folder, target_folder).for_context(max_model_len)
    compute = Compute(dtype, torch.device(device), kernel)
    native = _supports_native(config, compute, WHOLE)
    packed = packed and config.architecture != "eagle"  # A head stays in the cache, where bfloat16 is faster.
    rename = tensor_name if config.eagle3 is not None else None
    files = WeightFiles(folder, config.quantization, rename=rename, as_stored=native and packed)
    _refuse_other_drafts(config, files)
    if config.eagle3 is not None:
        config = replace(config, shares_embedding=EMBEDDING not in files)
    head: EagleHead | Eagle3Head | None = None
    if config.architecture == "eagle":
        with torch.inference_mode():
            loader = EagleLoader(config, files, compute, shard=WHOLE, linear=compute.layers)
            head = loader.eagle_head() if config.eagle3 is None else loader.eagle3_head()
    decoder = _load_decoder(
        config,
        files,
        compute,
        native=native,
        packed=packed,
        collectives=Solo(),
        target_folder=target_folder,
        feature_layers=() if head is None else (config.num_layers - 1,),
        num_threads=num_threads,
    )
    if isinstance(head, Eagle3Head) and config.eagle3 is not None and config.eagle3.mask_token_id is not None:
        with torch.inference_mode():
            head = head.with_mask(decoder.embedding[config.eagle3.mask_token_id])
    return LoadedDraft(decoder, head)


def _refuse_other_drafts(config: ModelConfig, files: WeightFiles) -> None:
    """Refuse published drafts of other kinds whose config.json looks like that of a supported one.

    Raises:
        ConfigError: names the kind, and what is supported.
    """
    if config.architecture == "draft_model" and "fc.weight" in files:
        raise ConfigError(
            f"draft: the tensors in {files.folder} are of EAGLE-1 or EAGLE-2, which is not supported; {SUPPORTED} are"
        )
    if config.eagle3 is not None and config.eagle3.mask_token_id is None and MASK_HIDDEN in files:
        raise ConfigError(
            f"draft: {files.folder} has the tensor {MASK_HIDDEN} of a P-EAGLE head, but its config.json names no "
            "ptd_token_id or mask_token_id"
        )


def _load_decoder(
    config: ModelConfig,
    files: WeightFiles,
    compute: Compute,
    *,
    native: bool,
    packed: bool,
    collectives: Collectives,
    target_folder: Path | None,
    feature_layers: tuple[int, ...],
    adapt: Adapt | None = None,
    fp8_cache: bool = False,
    num_threads: int | None = None,
) -> Model:
    """Load the decoder from `files`, for the fastest kernels. Arguments and errors are those of `load_model`.

    Everything in `files` must be part of the decoder, or have been read before.
    """
    if config.medusa is not None:
        raise ConfigError(f"model: {files.folder} holds Medusa heads, which are a draft and no model")
    if any(not 0 <= layer < config.num_layers for layer in feature_layers):
        raise ConfigError(f"feature_layers: {feature_layers} is not within [0, {config.num_layers})")
    shard = ShardSpec(collectives.rank, collectives.size)
    loader = Loader(
        config,
        files,
        compute,
        shard=shard,
        linear="reference" if native else compute.layers,
        packed=native and packed,
        on_layer=LoadProgress(files, config.num_layers),
    )
    with torch.inference_mode():
        weights = loader.decoder(target_folder)
        if adapt is not None:
            weights = adapt(config, shard, weights)
        if native:
            threads = num_threads or torch.get_num_threads()
            native_decoder = NativeDecoder(config, weights, feature_layers=feature_layers, num_threads=threads)
            loader.check_all_read()
            _report_quantised(files, compute, native_decoder.packed)
            return native_decoder
        loader.check_all_read()
        _report_quantised(files, compute, None)
        fused = compute.kernel in ("triton", "invariant")
        if fused and config.beyond_llama is not None:
            raise ConfigError(f"kernel: {compute.kernel} does not compute {config.beyond_llama}; allowed: auto, torch")
        if fp8_cache and (size := config.head_dim) & (size - 1):
            raise ConfigError(f"kv_cache_dtype: fp8 takes heads of a power of two, not {size}; allowed: auto")
        heads, kv_heads = shard.query_heads(config), shard.kv_heads(config)
        attention = {
            window: make_attention(
                compute.kernel if compute.kernel in ("triton", "invariant") else compute.layers,
                group_size=(heads.stop - heads.start) // (kv_heads.stop - kv_heads.start),
                dtype=compute.dtype,
                device=compute.device,
                window=window,
                fp8_cache=fp8_cache,
            )
            for window in set(config.windows or (0,))
        }
        decoder = Decoder
        if config.eagle3 is not None:
            decoder = Eagle3Decoder
        elif fused:
            from engine.model.fused_decoder import FusedDecoder, InvariantDecoder  # Imports Triton; only GPUs need it.

            decoder = InvariantDecoder if compute.kernel == "invariant" else FusedDecoder
        return decoder(
            config, weights, compute, collectives=collectives, attention=attention, feature_layers=feature_layers
        )


class LoadProgress:
    """Logs how far a long load is: bytes read and time left, at most once every `PERIOD_S` seconds.

    Args:
        files: that are read.
        num_layers: of the model.
        clock: returns seconds.
    """

    PERIOD_S = 5.0

    def __init__(self, files: WeightFiles, num_layers: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._files = files
        self._num_layers = num_layers
        self._clock = clock
        self._begin = self._last = clock()

    def __call__(self, done: int) -> None:
        """So many layers are read."""
        now = self._clock()
        if now - self._last < self.PERIOD_S or done == self._num_layers:
            return
        self._last = now
        left_s = (now - self._begin) * (self._num_layers - done) / done
        read = self._files.read_bytes / 1e9
        _log.info("loading: %d of %d layers, %.1f GB read, about %.0f s left", done, self._num_layers, read, left_s)


def _report_quantised(files: WeightFiles, compute: Compute, packed: PackedWeights | None) -> None:
    """Log what was made of quantised weights, with the bytes of the files and in memory."""
    if files.packing is None:
        return
    asked = files.quantization is not None and files.quantization.quantises_activations
    dequantised = f"dequantised once to {str(compute.dtype).removeprefix('torch.')}"
    if packed is not None and packed.num_bytes:
        rest = f", {files.dequantised_bytes / 1e9:.3f} GB {dequantised}" if files.dequantised_bytes else ""
        form = f"multiplied as they are ({packed.label}): {packed.num_bytes / 1e9:.3f} GB in memory{rest}"
    else:
        form = f"{dequantised}: {files.dequantised_bytes / 1e9:.3f} GB in memory"
    _log.info(
        "quantised weights (%s), %.3f GB in the files, are %s%s",
        files.packing,
        files.stored_bytes() / 1e9,
        form,
        "; activations stay unquantised, and the KV cache is as kv_cache_dtype says" if asked else "",
    )


def _supports_native(config: ModelConfig, compute: Compute, shard: ShardSpec) -> bool:
    """Whether the native library is to compute this model, and supports it on this machine. Logs the reason if not.

    Raises:
        ConfigError: it does not, and `compute.kernel` is `native`.
    """
    if compute.kernel not in ("auto", "native"):
        return False
    try:
        if compute.device.type != "cpu" or compute.dtype is not torch.bfloat16 or shard.size > 1:
            raise NativeUnavailable(
                f"it needs one bfloat16 shard on cpu, given {shard.size} of {compute.dtype} on {compute.device.type}"
            )
        if config.eagle3 is not None:
            raise NativeUnavailable("it does not compute the first layer of an EAGLE-3 head")
        check_native(config)
        load_library()
    except NativeUnavailable as error:
        if compute.kernel == "native":
            raise ConfigError(f"kernel: native given, but {error}") from None
        _log.info("native kernels are not used: %s", error)
        return False
    return True
