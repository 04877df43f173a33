"""A model's forward through the native library: the fast twin of `engine.model.decoder.Decoder`.

Owns the order of the rows of packed weights, and the conversion of a forward input to the library's structures.
Supports whole models (one shard) in bf16 whose sizes are multiples of the SIMD width. Quantised weights may stay so:
the results have the bits of those with dequantised ones. The KV cache has the memory of the slow twin's, but another
order inside (see decoder.cpp): a cache must be written and read by the same twin.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weights import WHOLE
from engine.core.step import ForwardInput, ForwardResult
from engine.gguf.codes import stacked
from engine.model.decoder import DecoderWeights, Layer, LayerCache, dense_mlp
from engine.model.layers import Linear, PlainLinear, QuantisedLinear, make_linear, unwrapped
from engine.model.native.library import LayerWeights, NativeForward, Shape, load_library
from engine.model.native.limits import check_native
from engine.model.native.matrices import Matrices, PackedWeights
from engine.model.rope import attention_factor, inverse_frequencies

TILE = 16
"""Tokens per tile of the KV cache. The block size is a multiple of it."""
WIDE, NARROW = 4, 2
"""Column blocks per panel: WIDE for matrices with enough columns for all threads, NARROW for the others."""


class NativeDecoder:
    """One whole model. `engine.model.load.load_model` makes it.

    Args:
        config: of the model.
        weights: on the CPU, bf16 in `PlainLinear` layers or quantised in `QuantisedLinear` layers. Layers may be
            wrapped. They are copied and may be freed.
        feature_layers: layers whose outputs a forward also returns, ascending.
        num_threads: threads of a forward, the caller's included.

    Raises:
        NativeUnavailable: the library does not support this machine or the model's sizes.
    """

    own_threads = True
    """Whether a forward uses threads of its own instead of PyTorch's."""

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, *, feature_layers: tuple[int, ...], num_threads: int
    ) -> None:
        check_native(config)
        self.config = config
        self.shard = WHOLE
        self.dtype = torch.bfloat16
        self.device = torch.device("cpu")
        self.draft_vocab = weights.draft_vocab
        self.feature_layers = feature_layers
        self.adapters_of_rows: npt.NDArray[np.uint64] | None = None
        """[N] addresses of the adapters of the next forward's rows, 0 for none; None if no row has one."""
        self.num_kv_heads = config.num_kv_heads
        self.logit_width = config.draft_vocab_size or config.vocab_size
        self._library = load_library()
        self._matrices = Matrices()
        head = self._matrix([weights.head], WIDE)
        table = weights.embedding
        self._embedding = table if isinstance(table, torch.Tensor) else self._embedding_rows(weights, head)
        self._vectors: list[Any] = []
        self._inverse_freq = inverse_frequencies(config)
        self._rope_factor = attention_factor(config)
        self._feature_layers = np.array(feature_layers, np.int32)
        self._addresses: tuple[list[LayerCache], Any, Any] | None = None
        shape = Shape(
            num_layers=config.num_layers,
            hidden=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            inner=config.intermediate_size,
            vocab=self.logit_width,
            num_threads=num_threads,
            eps=config.rms_norm_eps,
        )
        layers = (LayerWeights * config.num_layers)(*(self._layer(layer) for layer in weights.layers))
        self._model = self._library.model_new(
            ctypes.byref(shape),
            layers,
            self._embedding.data_ptr() if isinstance(self._embedding, torch.Tensor) else None,
            None if isinstance(self._embedding, torch.Tensor) else self._embedding,
            self._floats(weights.final_norm.weight),
            head,
        )
        weakref.finalize(self, self._library.model_free, self._model)

    @property
    def packed(self) -> PackedWeights:
        """What stays quantised."""
        return self._matrices.packed

    @property
    def embedding(self) -> torch.Tensor:
        """[vocab_size, hidden_size] bfloat16 token embeddings. Each call dequantises them where they are quantised."""
        return self._embedding if isinstance(self._embedding, torch.Tensor) else self._matrices.read(self._embedding)

    def forward(
        self, forward_input: ForwardInput, caches: list[LayerCache], embedded: torch.Tensor | None = None
    ) -> ForwardResult:
        """As `Decoder.forward`. The result of a row does not depend on the other rows of the forward."""
        keys, values = self._cache_addresses(caches)
        angles = torch.from_numpy(forward_input.positions)[:, None].float() * self._inverse_freq  # [N, head_dim / 2]
        cos, sin = angles.cos() * self._rope_factor, angles.sin() * self._rope_factor
        if embedded is not None:
            embedded = embedded.to(torch.bfloat16).contiguous()
        num_rows, num_logits = len(forward_input.token_ids), len(forward_input.logit_rows)
        logits = torch.empty(num_logits, self.logit_width, dtype=torch.float32)
        width = len(self.feature_layers) * self.config.hidden_size
        features = torch.empty(num_rows, width, dtype=torch.bfloat16) if width else None
        integers = [
            _contiguous(values, np.int32)
            for values in (
                *(forward_input.token_ids, forward_input.slots, forward_input.q_lens, forward_input.kv_lens),
                *(forward_input.block_tables, forward_input.logit_rows, self._feature_layers),
            )
        ]
        tree = forward_input.tree
        masks = [] if tree is None else [_contiguous(tree.num_slots, np.int32), _contiguous(tree.ancestors, np.uint64)]
        native = NativeForward(
            *(num_rows, len(forward_input.q_lens), forward_input.block_tables.shape[1], num_logits),
            caches[0].keys.shape[1],
            len(self.feature_layers),
            caches[0].keys.dtype is torch.int8,
            *(array.ctypes.data for array in integers),
            *((array.ctypes.data for array in masks) if masks else (None, None)),
            None if self.adapters_of_rows is None else self.adapters_of_rows.ctypes.data,
            *(cos.data_ptr(), sin.data_ptr()),
            *(ctypes.addressof(keys), ctypes.addressof(values)),
            embedded.data_ptr() if embedded is not None else None,
            logits.data_ptr(),
            features.data_ptr() if features is not None else None,
        )
        self._library.model_forward(self._model, ctypes.byref(native))
        return ForwardResult(logits=logits, hidden=features)

    def move(self, moves: npt.NDArray[np.int32], caches: list[LayerCache]) -> None:
        """As `Decoder.move`."""
        keys, values = self._cache_addresses(caches)
        integers = _contiguous(moves, np.int32)
        is_int8 = caches[0].keys.dtype is torch.int8
        self._library.model_move(
            *(self._model, integers.ctypes.data, len(integers), is_int8),
            *(ctypes.addressof(keys), ctypes.addressof(values)),
        )

    def _cache_addresses(self, caches: list[LayerCache]) -> tuple[Any, Any]:
        if self._addresses is None or self._addresses[0] is not caches:
            if caches[0].keys.shape[1] % TILE:
                raise ValueError(
                    f"block_size: {caches[0].keys.shape[1]} given, native kernels need multiples of {TILE}"
                )
            kind = ctypes.c_void_p * len(caches)
            keys = kind(*(cache.keys.data_ptr() for cache in caches))
            self._addresses = (caches, keys, kind(*(cache.values.data_ptr() for cache in caches)))
        return self._addresses[1:]

    def _embedding_rows(self, weights: DecoderWeights, head: int) -> int:
        """Address of the matrix with a token per column of a quantised embedding: the head if they are tied."""
        table = weights.embedding
        if isinstance(weights.head, QuantisedLinear) and weights.head.weight is table:
            return head
        return self._matrix([make_linear(table)], WIDE)

    def _layer(self, layer: Layer) -> LayerWeights:
        mlp = dense_mlp(layer)
        half = WIDE * TILE // 2
        units = np.arange(self.config.intermediate_size).reshape(-1, half)
        biases = {"qkv": layer.qkv, "o": layer.o, "gate": mlp.gate, "up": mlp.up, "down": mlp.down}
        return LayerWeights(
            qkv=self._matrix([layer.qkv], NARROW),
            o=self._matrix([layer.o], NARROW),
            gate_up=self._matrix([mlp.gate, mlp.up], WIDE, np.stack((units, units + units.size), 1).reshape(-1)),
            down=self._matrix([mlp.down], NARROW),
            **{f"{name}_bias": self._floats(_supported(part).bias) for name, part in biases.items()},
            input_norm=self._floats(layer.input_norm.weight),
            q_norm=self._floats(layer.q_norm.weight if layer.q_norm else None),
            k_norm=self._floats(layer.k_norm.weight if layer.k_norm else None),
            mlp_norm=self._floats(layer.mlp_norm.weight),
        )

    def _matrix(self, layers: Sequence[Linear], blocks: int, order: npt.NDArray[np.int64] | None = None) -> int:
        """Address of the rows of one or more layers, one below the other, in `order`; None keeps theirs."""
        parts = [_supported(layer) for layer in layers]
        quantised = [part.weight for part in parts if isinstance(part, QuantisedLinear)]
        if len(quantised) == len(parts):
            codes = stacked([weight.codes() for weight in quantised])
            return self._matrices.pack_codes(codes if order is None else codes.rows(order), blocks)
        weight = torch.cat([_plain(part).weight for part in parts])
        return self._matrices.pack(weight if order is None else weight[torch.from_numpy(order)], blocks)

    def _floats(self, vector: torch.Tensor | None) -> int | None:
        if vector is None:
            return None
        self._vectors.append(vector.float().contiguous())
        address: int = self._vectors[-1].data_ptr()
        return address


def _contiguous(values: npt.NDArray[Any], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.ascontiguousarray(values, dtype)


def _supported(linear: Linear) -> PlainLinear | QuantisedLinear:
    linear = unwrapped(linear)
    if not isinstance(linear, PlainLinear | QuantisedLinear):
        raise TypeError(f"native weights are packed from plain or quantised layers, not {type(linear).__name__}")
    return linear


def _plain(linear: PlainLinear | QuantisedLinear) -> PlainLinear:
    return linear.plain() if isinstance(linear, QuantisedLinear) else linear
