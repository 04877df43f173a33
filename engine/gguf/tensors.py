"""The tensors of a GGUF file under the names and in the layout of Hugging Face, dequantised when they are read.

Owns the mapping of names, and the order of rows of q and k. It has the methods of an open safetensors file, so that
`engine.checkpoint.weights` reads either. Architectures: llama (Llama, Mistral), qwen2, qwen3.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import ConfigError
from engine.gguf.codes import Codes
from engine.gguf.file import GGUFFile

ARCHITECTURES = ("llama", "qwen2", "qwen3")
ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies, which become part of the config."""
_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d{1,5})\.([a-z_]{1,20})\.(weight|bias)")
_PERMUTED = re.compile(r"blk\.\d+\.attn_[qk]\.(weight|bias)")


class GGUFTensors:
    """An open GGUF file as a set of Hugging Face tensors. Closed when it is collected.

    Args:
        path: of the file.

    Raises:
        ConfigError: it is damaged, or of another architecture.
    """

    def __init__(self, path: Path) -> None:
        self._file = GGUFFile(path)
        self._file.check_size()
        architecture = check_architecture(self._file)
        self._head_dim = head_dim(self._file) if architecture == "llama" else None
        self._sources = {_huggingface_name(name): name for name in self._file.names if name != ROPE_FACTORS}

    def keys(self) -> list[str]:
        """Names of all tensors. One without a counterpart keeps its own name."""
        return list(self._sources)

    def types(self) -> tuple[str, ...]:
        """Names of the quantised types that occur, sorted."""
        return self._file.quantised_types()

    def stored_bytes(self, name: str, num_elements: int) -> int:
        """Bytes in the file of elements of a tensor."""
        return round(num_elements * self._file.bytes_per_element(self._sources[name]))

    def get_slice(self, name: str) -> GGUFSlice:
        """A tensor that is read when it is indexed."""
        source = self._sources[name]
        return GGUFSlice(self._file, source, self._head_dim if _PERMUTED.fullmatch(source) else None)

    def is_quantised(self, name: str) -> bool:
        """Whether a tensor is a matrix of quantised blocks."""
        return self._file.is_quantised(self._sources[name])

    def get_tensor(self, name: str) -> torch.Tensor:
        """A whole tensor, float32."""
        return self.get_slice(name)[()]


@dataclass(frozen=True, slots=True)
class _Places:
    """Rows of a tensor in another order."""

    rows: slice
    """Whole heads to read."""
    order: npt.NDArray[np.int64]
    """Of the rows that were read."""


class GGUFSlice:
    """A tensor of a GGUF file.

    Args:
        file: open.
        name: in the file.
        head_dim: rows per head of a q or k tensor whose rows are in GGUF's order; None for others.
    """

    def __init__(self, file: GGUFFile, name: str, head_dim: int | None) -> None:
        self._file, self._name, self._head_dim = file, name, head_dim

    def get_shape(self) -> tuple[int, ...]:
        """Shape, rows first."""
        return self._file.shape(self._name)

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        """The part [rows, cols], float32. Only its rows are dequantised.

        Raises:
            ConfigError: the file is damaged, or the rows of q or k are not whole heads.
        """
        parts: list[Any] = [*index, slice(None), slice(None)]
        start, stop, _ = parts[0].indices(self.get_shape()[0])
        places = self._places(start, stop)
        if places is None:
            values = self._file.read(self._name, slice(start, stop))
        else:
            values = self._file.read(self._name, places.rows)[places.order]
        part = values[:, parts[1]] if values.ndim > 1 else values
        return torch.from_numpy(np.array(part))

    def codes(self, rows: slice) -> Codes:
        """Rows of a quantised matrix, as they are.

        Args:
            rows: with start and stop.

        Raises:
            ConfigError: the file is damaged, or the rows of q or k are not whole heads.
        """
        places = self._places(rows.start, rows.stop)
        if places is None:
            return self._file.read_codes(self._name, rows)
        return self._file.read_codes(self._name, places.rows).rows(places.order)

    def _places(self, start: int, stop: int) -> _Places | None:
        """Where rows [start, stop) in Hugging Face's order [half, pair] of each head are in GGUF's [pair, half]; None
        where the order is the same."""
        dim, num_rows = self._head_dim, self.get_shape()[0]
        if dim is None:
            return None
        if num_rows % dim:
            raise ConfigError(f"model: tensor {self._name} has {num_rows} rows; expected whole heads of {dim} rows")
        first, last = start // dim, -(-stop // dim)
        order = np.arange((last - first) * dim).reshape(last - first, dim // 2, 2).swapaxes(1, 2).reshape(-1)
        return _Places(slice(first * dim, last * dim), order[start - first * dim : stop - first * dim])


def check_architecture(file: GGUFFile) -> str:
    """The architecture of a file.

    Raises:
        ConfigError: it is not supported, or the file is one of several.
    """
    given: str = file.get("general.architecture", str)
    if given not in ARCHITECTURES:
        raise ConfigError(
            f"model: {file.path} has general.architecture = {given!r}; allowed: {', '.join(ARCHITECTURES)}; use the "
            "Hugging Face folder of this model"
        )
    parts = file.metadata.get("split.count", 1)
    if parts not in (0, 1):
        raise ConfigError(f"model: {file.path} is one of {parts!r} parts; join them with `llama-gguf-split --merge`")
    return given


def head_dim(file: GGUFFile) -> int:
    """Rows of one head of q or k.

    Raises:
        ConfigError: the sizes do not fit.
    """
    name = file.get("general.architecture", str)
    heads, hidden = file.get(f"{name}.attention.head_count", int), file.get(f"{name}.embedding_length", int)
    key = f"{name}.attention.key_length"
    if key in file.metadata:
        given: int = file.get(key, int)
        if given < 2 or given % 2:
            raise ConfigError(f"model: {file.path} has {key} = {given}; allowed: even numbers above 0")
        return given
    if heads < 1 or hidden < 1 or hidden % heads or hidden // heads % 2:
        raise ConfigError(f"model: {file.path} has {heads} heads for a hidden size of {hidden}")
    return int(hidden // heads)


def _huggingface_name(name: str) -> str:
    match = _LAYER_NAME.fullmatch(name)
    if match is not None and match[2] in _LAYER:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"
    return _WHOLE.get(name, name)
