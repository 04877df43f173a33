"""Building one shard's weights from a model folder.

Owns the tensor names of Hugging Face checkpoints, and the part of each tensor that a shard takes: heads of q, k, v and
o, a part of the intermediate units of the MLP and of each expert, a part of the head's rows, all of the embedding, the
norms and the routers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from engine.checkpoint.draft_vocab import read_draft_vocab
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.public_draft import UNUSED_TENSORS
from engine.checkpoint.weights import ShardSpec, WeightFiles
from engine.errors import ConfigError
from engine.model.decoder import DecoderWeights, Layer
from engine.model.device import Compute
from engine.model.layers import Block, Experts, GatedMlp, Linear, LinearKind, RmsNorm, make_linear
from engine.quantization.weight import Quantised, Weight, stacked_rows

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
DRAFT_VOCAB = "draft_vocab"
DRAFT_TO_TARGET = "d2t"
"""Tensor of public heads: the distance from each draft id to its target id."""
_IGNORED = ("rotary_emb.inv_freq",)


class Loader:
    """Reads one shard of a model.

    Args:
        config: of the model.
        files: the tensors of the model folder.
        compute: device and dtype of the weights.
        shard: the shard to read.
        linear: kind of the linear layers and norms to build.
        packed: keep quantised matrices of the only shard as they are. They are read when they are used.
        on_layer: called after each layer with the number of layers read so far.
    """

    def __init__(
        self,
        config: ModelConfig,
        files: WeightFiles,
        compute: Compute,
        *,
        shard: ShardSpec,
        linear: LinearKind,
        packed: bool = False,
        on_layer: Callable[[int], None] | None = None,
    ) -> None:
        self._config = config
        self._files = files
        self._compute = compute
        self._shard = shard
        self._linear = linear
        self._packed = packed
        self._on_layer = on_layer

    def decoder(self, target_folder: Path | None) -> DecoderWeights:
        """Read the decoder. `check_all_read` tells afterwards whether it is all that the folder has.

        Args:
            target_folder: source of the embedding of a draft that shares its target's.

        Raises:
            ConfigError: a tensor is missing, or has another shape than the config implies.
        """
        config = self._config
        embedding = self._embedding(target_folder)
        layers = []
        for index in range(config.num_layers):
            layers.append(self._layer(index))
            if self._on_layer is not None:
                self._on_layer(index + 1)
        final_norm = self.final_norm()
        head = self._head(embedding)
        return DecoderWeights(embedding, tuple(layers), final_norm, head, self._draft_vocab())

    def check_all_read(self) -> None:
        """Check that all tensors of the folder have been read, once quantised ones have been used.

        Raises:
            ConfigError: names those that were not.
        """
        tied = (HEAD,) if self._config.tie_word_embeddings else ()
        unused = UNUSED_TENSORS if self._config.is_published else ()
        self._files.check_all_read(ignore=_IGNORED + tied + unused)

    def final_norm(self) -> RmsNorm:
        """Read the norm of the last layer's output.

        Raises:
            ConfigError: it is missing, or has another shape than the config implies.
        """
        return self._norm("model.norm.weight", self._config.hidden_size)

    def _embedding(self, target_folder: Path | None) -> Weight:
        config, files = self._config, self._files
        if config.shares_embedding:
            if target_folder is None:
                raise ConfigError(
                    f"draft: {files.folder} shares the target's embedding, but no target folder was given"
                )
            target = ModelConfig.load(target_folder)
            files = WeightFiles(target_folder, target.quantization, as_stored=self._packed)
        return self._weight(EMBEDDING, (config.vocab_size, config.hidden_size), files=files)

    def _layer(self, index: int) -> Layer:
        config, prefix = self._config, f"model.layers.{index}."
        hidden, dim = config.hidden_size, config.head_dim
        attention = prefix + "self_attn."
        query = _scaled(self._shard.query_heads(config), dim)
        names = ("post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
        before = names[1] if config.output_norms else names[0]
        # The first layer of an EAGLE-3 head reads the token beside the hidden state, whose norm has a name of its own.
        reads_both = config.eagle3 is not None and index == 0
        input_norm, width = ("hidden_norm", 2 * hidden) if reads_both else ("input_layernorm", hidden)
        return Layer(
            input_norm=self._norm(f"{prefix}{input_norm}.weight", hidden),
            qkv=self._qkv(attention, width),
            q_norm=self._norm(attention + "q_norm.weight", dim, scale=config.query_scale) if config.qk_norm else None,
            k_norm=self._norm(attention + "k_norm.weight", dim) if config.qk_norm else None,
            o=self._make(
                *self._part(attention + "o_proj", (hidden, config.num_heads * dim), cols=query, bias=config.o_bias)
            ),
            o_norm=self._norm(f"{prefix}{names[0]}.weight", hidden) if config.output_norms else None,
            mlp_norm=self._norm(f"{prefix}{before}.weight", hidden),
            mlp=self._mlp(index, prefix),
            output_norm=self._norm(f"{prefix}{names[2]}.weight", hidden) if config.output_norms else None,
            window=config.windows[index] if config.windows else 0,
            is_local=config.local_rope_theta is not None and index in config.local_layers,
        )

    def _qkv(self, prefix: str, width: int) -> Linear:
        """Query, key and value heads of this shard as one layer of `width` inputs. Phi-3 stores them as one tensor."""
        config, dim = self._config, self._config.head_dim
        query, kv = (_scaled(heads(config), dim) for heads in (self._shard.query_heads, self._shard.kv_heads))
        rows_q, rows_kv = config.num_heads * dim, config.num_kv_heads * dim
        if config.fused_projections:
            shape = (rows_q + 2 * rows_kv, width)
            places = [query, _shifted(kv, rows_q), _shifted(kv, rows_q + rows_kv)]
            parts = [self._part(prefix + "qkv_proj", shape, rows=rows, bias=config.qkv_bias) for rows in places]
        else:
            parts = [
                self._part(prefix + name, (size, width), rows=rows, bias=config.qkv_bias)
                for name, size, rows in (("q_proj", rows_q, query), ("k_proj", rows_kv, kv), ("v_proj", rows_kv, kv))
            ]
        biases = [bias for _, bias in parts if bias is not None]
        return self._make(stacked_rows([weight for weight, _ in parts]), torch.cat(biases) if biases else None)

    def _mlp(self, index: int, prefix: str) -> Block:
        """The MLP of a layer, or its experts."""
        config, experts = self._config, self._config.experts
        if experts is None or index in experts.dense_layers:
            return self._gated(prefix + "mlp.", ("gate_proj", "up_proj", "down_proj"), config.intermediate_size)
        is_mixtral = config.family == "mixtral"
        block = prefix + ("block_sparse_moe." if is_mixtral else "mlp.")
        names = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
        router = self._read(block + "gate.weight", (experts.num_experts, config.hidden_size))
        return Experts(
            self._make(router, None),
            [
                self._gated(f"{block}experts.{number}.", names, experts.intermediate_size)
                for number in range(experts.num_experts)
            ],
            per_token=experts.per_token,
            normalise=experts.normalise,
        )

    def _gated(self, prefix: str, names: tuple[str, str, str], size: int) -> GatedMlp:
        """A gated MLP of `size` intermediate units. Phi-3 stores gate and up as one tensor."""
        config = self._config
        hidden, inner = config.hidden_size, self._shard.part(size)
        gate, up, down = names
        if config.fused_projections:
            gate = up = "gate_up_proj"
        shape = (2 * size if config.fused_projections else size, hidden)
        up_rows = _shifted(inner, size) if config.fused_projections else inner
        return GatedMlp(
            self._make(*self._part(prefix + gate, shape, rows=inner, bias=config.mlp_bias)),
            self._make(*self._part(prefix + up, shape, rows=up_rows, bias=config.mlp_bias)),
            self._make(*self._part(prefix + down, (hidden, size), cols=inner, bias=config.mlp_bias)),
            activation=config.activation,
        )

    def _head(self, embedding: Weight) -> Linear:
        """This shard's rows of the head: rows of the embedding where head and embedding are tied."""
        config = self._config
        width = config.draft_vocab_size or config.vocab_size
        rows = self._shard.part(width)
        if config.tie_word_embeddings:
            if config.draft_vocab_size is not None:
                raise ConfigError("tie_word_embeddings: cannot be true together with draft_vocab_size")
            return self._make(embedding if isinstance(embedding, Quantised) else embedding[rows], None)
        return self._make(self._weight(HEAD, (width, config.hidden_size), rows=rows), None)

    def _draft_vocab(self) -> torch.Tensor | None:
        config = self._config
        if config.draft_vocab_size is None:
            return None
        name = DRAFT_TO_TARGET if config.is_published else DRAFT_VOCAB
        if config.is_published and config.draft_vocab_size == config.vocab_size and name not in self._files:
            return None
        ids = read_draft_vocab(
            *(self._files, name, config.draft_vocab_size),
            vocab_size=config.vocab_size,
            are_offsets=config.is_published,
        )
        return ids.to(self._compute.device)

    def _part(
        self,
        name: str,
        shape: tuple[int, int],
        *,
        rows: slice | None = None,
        cols: slice | None = None,
        bias: bool,
    ) -> tuple[Weight, torch.Tensor | None]:
        """Weight and bias of a linear layer. A layer cut by columns is summed over ranks: only rank 0 adds the bias."""
        weight = self._weight(name + ".weight", shape, rows, cols)
        if not bias:
            return weight, None
        vector = self._read(name + ".bias", shape[:1], rows=rows)
        return weight, vector if cols is None or self._shard.rank == 0 else None

    def _norm(self, name: str, length: int, *, scale: float = 1.0) -> RmsNorm:
        """A norm whose weight is `scale` times the stored one, offset included."""
        offset, compute = self._config.norm_offset, self._compute
        if offset == 0.0 and scale == 1.0:
            weight = self._read(name, (length,))
        else:
            stored = self._files.read_float(name, (length,), dtype=torch.float32)
            weight = ((stored.float() + offset) * scale).to(device=compute.device, dtype=compute.dtype)
        return RmsNorm(weight, self._config.rms_norm_eps, fast=self._linear == "auto")

    def _weight(
        self,
        name: str,
        shape: tuple[int, int],
        rows: slice | None = None,
        cols: slice | None = None,  # all of a weight that stays quantised
        files: WeightFiles | None = None,
    ) -> Weight:
        quantised = (files or self._files).quantised(name, shape, rows) if self._packed else None
        return quantised or self._read(name, shape, rows=rows, cols=cols, files=files)

    def _make(self, weight: Weight, bias: torch.Tensor | None) -> Linear:
        return make_linear(weight, bias, kind=self._linear)

    def _read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: slice | None = None,
        cols: slice | None = None,
        files: WeightFiles | None = None,
    ) -> torch.Tensor:
        """A contiguous copy of a tensor, or of a part of it, on the device and in the compute dtype."""
        compute = self._compute
        tensor = (files or self._files).read_float(name, shape, rows=rows, cols=cols, dtype=compute.dtype)
        return tensor.to(device=compute.device, dtype=compute.dtype, copy=True).contiguous()


def _scaled(part: slice, size: int) -> slice:
    """The elements of a part of units with `size` elements each."""
    return slice(part.start * size, part.stop * size)


def _shifted(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)
