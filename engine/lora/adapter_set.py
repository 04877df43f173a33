"""The adapters that one shard of a target holds: loading, dropping, and choosing those of a forward.

Owns where each module of `peft` lies in this shard's layers: rows of B where a layer is cut by outputs, columns of A
where it is cut by inputs. An adapter is a number here, given by whoever loads it and never used for another one, so
that a forward, a cached block and a retried request mean the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weights import ShardSpec
from engine.core.step import ForwardInput
from engine.errors import ConfigError, EngineError
from engine.lora.adapter_files import A_SUFFIX, B_SUFFIX, PREFIX, WEIGHTS_FILE, AdapterSpec
from engine.lora.layers import ActiveRows, AdaptedLinear, LowRank, OutputPart, RowGroup
from engine.lora.native_adapter import NativeAdapter
from engine.model.decoder import DecoderWeights, Layer
from engine.model.layers import GatedMlp, Linear
from engine.model.load import Model
from engine.model.native.decoder import NativeDecoder
from engine.sampling.staging import to_device


@dataclass(frozen=True, slots=True)
class _Piece:
    """The part of one module that goes into one layer of a shard."""

    module: str
    rows: slice
    """Of the module's outputs."""
    cols: slice
    """Of the module's inputs."""


class AdapterSet:
    """The adapters of one shard.

    Args:
        dtype: element type of the target's weights.
        device: of the target's weights.
    """

    def __init__(self, *, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = torch.float32 if device.type == "cpu" else dtype  # of the adapters' matrices
        self._device = device
        self._active = ActiveRows()
        self._layers: list[tuple[AdaptedLinear, tuple[_Piece, ...]]] = []
        self._loaded: set[int] = set()
        self._native: NativeDecoder | None = None
        self._native_adapters: dict[int, NativeAdapter] = {}
        self._in_forward: list[NativeAdapter] = []  # keeps their memory while the kernel reads it

    def wrap(self, config: ModelConfig, shard: ShardSpec, weights: DecoderWeights) -> DecoderWeights:
        """The same weights, with linear layers that add adapters. Call it once, as `adapt` of `load_model`.

        Args:
            config: of the target.
            shard: part of the target that the weights belong to.
            weights: from the files.
        """
        layers = [self._wrapped(config, shard, index, layer) for index, layer in enumerate(weights.layers)]
        return replace(weights, layers=tuple(layers))

    def bind(self, model: Model) -> None:
        """Note the model that was made of the wrapped weights, before an adapter is loaded."""
        self._native = model if isinstance(model, NativeDecoder) else None

    @torch.inference_mode()
    def load(self, number: int, spec: AdapterSpec) -> None:
        """Read an adapter. No forward may use its number yet. In any thread.

        Raises:
            ConfigError: the file cannot be read, or holds numbers that are not finite.
        """
        try:
            with safe_open(spec.folder / WEIGHTS_FILE, framework="pt") as file:
                reader = _Reader(file, spec, self._dtype, self._device)
                loaded = [(linear, reader.low_rank(pieces)) for linear, pieces in self._layers]
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"lora: cannot read {spec.folder / WEIGHTS_FILE}: {error}") from None
        if self._native is not None:
            config, products = self._native.config, [low_rank for _, low_rank in loaded]
            step = len(products) // config.num_layers
            layers = [products[first : first + step] for first in range(0, len(products), step)]
            self._native_adapters[number] = NativeAdapter(config, layers)
        else:
            for linear, low_rank in loaded:
                if low_rank is not None:
                    linear.adapters[number] = low_rank
        self._loaded.add(number)

    def drop(self, number: int) -> None:
        """Free an adapter; unknown numbers are ignored. No later forward may use its number. In any thread."""
        self._loaded.discard(number)
        self._native_adapters.pop(number, None)
        for linear, _ in self._layers:
            linear.adapters.pop(number, None)

    def choose(self, forward_input: ForwardInput) -> None:
        """Set the adapters of the forward that follows, in the thread that computes it.

        Raises:
            EngineError: an adapter is not loaded.
        """
        numbers = forward_input.adapters
        if numbers is None:
            self._active.groups = ()
            if self._native is not None:
                self._native.adapters_of_rows = None
            return
        by_row = np.repeat(numbers, forward_input.q_lens)
        chosen = [int(number) for number in np.unique(by_row) if number != 0]
        missing = [number for number in chosen if number not in self._loaded]
        if missing:
            raise EngineError(f"adapters {missing} are not loaded")
        if self._native is not None:
            self._in_forward = [self._native_adapters[number] for number in chosen]
            addresses = {0: 0} | {n: adapter.address for n, adapter in zip(chosen, self._in_forward, strict=True)}
            by_span = [addresses[int(number)] for number in numbers]
            self._native.adapters_of_rows = np.repeat(np.array(by_span, dtype=np.uint64), forward_input.q_lens)
            return
        if len(chosen) == 1 and (by_row == chosen[0]).all():
            self._active.groups = (RowGroup(chosen[0], None),)
            return
        rows = to_device([np.flatnonzero(by_row == number) for number in chosen], self._device)
        self._active.groups = tuple(map(RowGroup, chosen, rows))

    def _wrapped(self, config: ModelConfig, shard: ShardSpec, index: int, layer: Layer) -> Layer:
        attention, mlp = f"model.layers.{index}.self_attn.", f"model.layers.{index}.mlp."
        dim, whole, hidden = config.head_dim, slice(None), slice(0, config.hidden_size)
        query, kv = (_scaled(heads(config), dim) for heads in (shard.query_heads, shard.kv_heads))
        num_q, num_kv = config.num_heads * dim, config.num_kv_heads * dim
        if config.fused_projections:
            places = (query, _shifted(kv, num_q), _shifted(kv, num_q + num_kv))
            pieces = tuple(_Piece(attention + "qkv_proj", rows, whole) for rows in places)
        else:
            names = (("q_proj", query), ("k_proj", kv), ("v_proj", kv))
            pieces = tuple(_Piece(attention + name, rows, whole) for name, rows in names)
        if isinstance(layer.mlp, GatedMlp):
            inner = shard.part(config.intermediate_size)
            gate, up, up_rows = "gate_proj", "up_proj", inner
            if config.fused_projections:
                gate = up = "gate_up_proj"
                up_rows = _shifted(inner, config.intermediate_size)
            layer.mlp.gate = self._adapted(layer.mlp.gate, _Piece(mlp + gate, inner, whole))
            layer.mlp.up = self._adapted(layer.mlp.up, _Piece(mlp + up, up_rows, whole))
            layer.mlp.down = self._adapted(layer.mlp.down, _Piece(mlp + "down_proj", hidden, inner))
        return replace(
            layer,
            qkv=self._adapted(layer.qkv, *pieces),
            o=self._adapted(layer.o, _Piece(attention + "o_proj", hidden, query)),
        )

    def _adapted(self, base: Linear, *pieces: _Piece) -> AdaptedLinear:
        linear = AdaptedLinear(base, self._active)
        self._layers.append((linear, pieces))
        return linear


class _Reader:
    """Reads the parts of one adapter that a shard needs."""

    def __init__(self, file: Any, spec: AdapterSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._file = file
        self._spec = spec
        self._dtype = dtype
        self._device = device

    def low_rank(self, pieces: tuple[_Piece, ...]) -> LowRank | None:
        """The adapter's part in one layer; None if it leaves the layer as it is."""
        matrices: list[torch.Tensor] = []
        parts: list[OutputPart] = []
        places: dict[str, slice] = {}  # rows of A by module: the pieces of one module share them
        num_ranks = num_columns = 0
        for piece in pieces:
            module = self._spec.modules.get(piece.module)
            columns = slice(num_columns, num_columns + piece.rows.stop - piece.rows.start)
            num_columns = columns.stop
            if module is None:
                continue
            if piece.module not in places:
                matrices.append(self._read(piece.module + A_SUFFIX, slice(None), piece.cols))
                places[piece.module] = slice(num_ranks, num_ranks + module.rank)
                num_ranks += module.rank
            b = self._read(piece.module + B_SUFFIX, piece.rows, slice(None)) * module.scale
            parts.append(OutputPart(self._ready(b), columns, places[piece.module]))
        return LowRank(self._ready(torch.cat(matrices)), tuple(parts)) if parts else None

    def _read(self, name: str, rows: slice, cols: slice) -> torch.Tensor:
        """[rows, cols] float32 of a tensor.

        Raises:
            ConfigError: it holds numbers that are not finite.
        """
        tensor: torch.Tensor = self._file.get_slice(PREFIX + name)[rows, cols].float()
        if not bool(tensor.isfinite().all()):
            raise ConfigError(f"lora: tensor {PREFIX}{name} holds numbers that are not finite")
        return tensor

    def _ready(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix.to(device=self._device, dtype=self._dtype).contiguous()


def _scaled(part: slice, size: int) -> slice:
    """The elements of a part of units with `size` elements each."""
    return slice(part.start * size, part.stop * size)


def _shifted(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)
