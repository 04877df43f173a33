"""Medusa heads: logits of the next positions from one hidden state of the target, after Medusa (Cai et al. 2024).

Owns the heads' forward and how they are read from a draft's folder. Knows nothing of requests, and of the target only
its final norm.

    h = norm f[p-1]                       f: output of the target's last layer, norm: the target's final norm
    head j    z = h;  z += silu(W_ij z + b_ij), block by block;  output_j z = logits of x[p+1+j]

The tokens of a draft are independent of each other given the text, so each is drawn from a distribution of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from engine.checkpoint.draft_check import check_draft
from engine.checkpoint.draft_vocab import read_draft_vocab
from engine.checkpoint.medusa_config import TOKEN_MAP, file_names, tensor_name
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weights import WHOLE, WeightFiles
from engine.errors import ConfigError
from engine.model.device import Compute, KernelKind
from engine.model.layers import Linear, RmsNorm, make_linear
from engine.model.shard_weights import Loader
from engine.sampling.staging import to_device


@dataclass(frozen=True, slots=True)
class MedusaHeads:
    """The heads of one draft, for hidden size H and V logit columns."""

    config: ModelConfig
    """Of the draft, with the sizes of its target."""
    norm: RmsNorm
    """The target's final norm."""
    blocks: tuple[tuple[Linear, ...], ...]
    """Per head, its residual blocks, H -> H."""
    outputs: tuple[Linear, ...]
    """H -> V per head, or one of all heads."""
    draft_vocab: torch.Tensor | None
    """[V] int64 target token id of each logit column; None when column i is token i."""
    device: torch.device
    num_bytes: int
    """Size of the weights."""

    @property
    def num_columns(self) -> int:
        """V, the columns of the logits."""
        return self.config.draft_vocab_size or self.config.vocab_size

    @torch.inference_mode()
    def logits(self, features: torch.Tensor, num_heads: npt.NDArray[np.int64]) -> torch.Tensor:
        """Logits of the first heads of each row. Every weight is read once, for all rows together.

        Args:
            features: [R, H] outputs of the target's last layer, before its final norm.
            num_heads: [R] heads to compute for each row, at least 1.

        Returns:
            [sum of num_heads, V] float32, those of a row one after another.
        """
        if len(num_heads) == 0:
            return torch.empty(0, self.num_columns, device=self.device)
        rows = [np.flatnonzero(num_heads > head) for head in range(int(num_heads.max()))]
        firsts = np.cumsum(num_heads) - num_heads
        # The states are computed head by head, and put into the order of the rows.
        order = np.argsort(np.concatenate([firsts[each] + head for head, each in enumerate(rows)]))
        *indices, places = to_device([*rows, order], self.device)
        hidden = self.norm(features)
        states = [
            self._state(head, hidden if len(index) == len(hidden) else hidden.index_select(0, index))
            for head, index in enumerate(indices)
        ]
        if len(self.outputs) == 1:
            return self.outputs[0](torch.cat(states).index_select(0, places)).float()
        parts = [output(state) for output, state in zip(self.outputs, states, strict=False)]
        return torch.cat(parts).index_select(0, places).float()

    def head_logits(self, features: torch.Tensor, head: int) -> torch.Tensor:
        """[R, V] logits of one head for all rows of [R, H] features. Neither reads nor copies from the host."""
        return self.outputs[head if len(self.outputs) > 1 else 0](self._state(head, self.norm(features)))

    def _state(self, head: int, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[head]:
            hidden = hidden + block.silu(hidden)
        return hidden


def load_heads(
    folder: Path,
    target_folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    kernel: KernelKind = "auto",
) -> MedusaHeads:
    """Load the heads for a target.

    Args:
        folder: model folder of the heads, in either public layout.
        target_folder: model folder of the target, which has the final norm.
        dtype: of weights and activations.
        device: cpu or cuda.
        kernel: `reference` computes with plain operators, every other one with the fastest layers of the device.

    Raises:
        ConfigError: the folder holds no Medusa heads, they do not fit the target, or a tensor is missing, unknown or
            misshaped.
    """
    config = check_draft(folder, target_folder)
    if config.medusa is None:
        raise ConfigError(f"draft: {folder} holds no Medusa heads")
    compute = Compute(dtype, torch.device(device), kernel)
    files = WeightFiles(folder, names=file_names(folder), rename=tensor_name(config.medusa.num_blocks))
    target = ModelConfig.load(target_folder)
    target_files = WeightFiles(target_folder, target.quantization)
    with torch.inference_mode():
        norm = Loader(target, target_files, compute, shard=WHOLE, linear=compute.layers).final_norm()
        return _Reader(config, files, compute).heads(norm)


class _Reader:
    """Reads the tensors of heads.

    Args:
        config: of the heads, with the sizes of their target.
        files: their tensors, under the names of vLLM's layout.
        compute: device and dtype of the weights.
    """

    def __init__(self, config: ModelConfig, files: WeightFiles, compute: Compute) -> None:
        self._config = config
        self._files = files
        self._compute = compute
        self._num_bytes = 0

    def heads(self, norm: RmsNorm) -> MedusaHeads:
        """Read all of them. Every tensor of the files must be part of a head.

        Raises:
            ConfigError: a reason of `load_heads`.
        """
        config, files, variant = self._config, self._files, self._config.medusa
        if variant is None:
            raise ConfigError(f"draft: {files.folder} holds no Medusa heads")
        self._check_size("hidden_size", "blocks.0.layers.0.weight", config.hidden_size)
        vocab = self._draft_vocab()
        size = config.hidden_size
        has_biases = variant.has_biases or "blocks.0.layers.0.bias" in files
        blocks = tuple(
            tuple(
                self._linear(f"blocks.{head}.layers.{block}", (size, size), bias=has_biases)
                for block in range(variant.num_blocks)
            )
            for head in range(variant.num_heads)
        )
        outputs = tuple(
            self._output(f"lm_heads.{head}", vocab) for head in range(1 if variant.shares_output else variant.num_heads)
        )
        files.check_all_read()
        device = self._compute.device
        on_device = None if vocab is None else vocab.to(device)
        return MedusaHeads(config, norm, blocks, outputs, on_device, device, self._num_bytes)

    def _output(self, name: str, vocab: torch.Tensor | None) -> Linear:
        """An output layer over the draft's vocabulary. The files may hold the rows of all tokens."""
        config, key = self._config, name + ".weight"
        if vocab is None:
            self._check_size("vocab_size", key, config.vocab_size)
        elif key in self._files and self._files.shape_of(key)[0] == config.vocab_size:
            weight = self._files.read_float(key, (config.vocab_size, config.hidden_size))[vocab]
            return self._make(weight, None)
        return self._linear(name, (config.draft_vocab_size or config.vocab_size, config.hidden_size), bias=False)

    def _linear(self, name: str, shape: tuple[int, int], *, bias: bool) -> Linear:
        vector = self._files.read_float(name + ".bias", shape[:1]) if bias else None
        return self._make(self._files.read_float(name + ".weight", shape), vector)

    def _make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        compute = self._compute
        parts = [weight] if bias is None else [weight, bias]
        self._num_bytes += sum(part.numel() for part in parts) * compute.dtype.itemsize
        placed = [part.to(device=compute.device, dtype=compute.dtype, copy=True).contiguous() for part in parts]
        return make_linear(*placed, kind=compute.layers)

    def _check_size(self, key: str, name: str, expected: int) -> None:
        """Compare the rows of a tensor with the size of the target: a config may not name it.

        Raises:
            ConfigError: they differ.
        """
        if name in self._files and (given := self._files.shape_of(name)[0]) != expected:
            raise ConfigError(
                f"draft: {key}: the heads were made for {given}, the target has {expected}; "
                "use a draft made for this target"
            )

    def _draft_vocab(self) -> torch.Tensor | None:
        config = self._config
        if config.draft_vocab_size is None:
            return None
        return read_draft_vocab(
            self._files, TOKEN_MAP, config.draft_vocab_size, vocab_size=config.vocab_size, are_offsets=False
        )
