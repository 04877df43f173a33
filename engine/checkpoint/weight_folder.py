"""The files with the weights of a model folder: which they are, and opening them. Knows no tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from engine.checkpoint.model_config import INDEX_FILE, SINGLE_FILE
from engine.errors import ConfigError
from engine.gguf import GGUF_FILE
from engine.gguf.tensors import GGUFTensors


def file_names(folder: Path, *, as_stored: bool) -> list[str]:
    """Names of the files with the weights of a model.

    Args:
        folder: of the model.
        as_stored: prefer a GGUF file to a dequantised copy beside it.

    Raises:
        ConfigError: there are none, or the index of several is damaged.
    """
    if as_stored and (folder / GGUF_FILE).exists():
        return [GGUF_FILE]
    if (folder / SINGLE_FILE).is_file():
        return [SINGLE_FILE]
    index = folder / INDEX_FILE
    if not index.is_file() and (folder / GGUF_FILE).is_symlink():
        return [GGUF_FILE]
    if not index.is_file():
        raise ConfigError(
            f"model: {folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors weights are loaded"
        )
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"model: {index} is not a safetensors index: {error!r}") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ConfigError(f"model: {index} names {name!r}; allowed: names of .safetensors files in the same folder")
    return names


def open_weights(path: Path) -> Any:
    """An open file of weights, with the methods of safetensors.

    Raises:
        ConfigError: it cannot be read.
    """
    if path.name == GGUF_FILE:
        return GGUFTensors(path)
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"model: cannot read {path}: {error}") from None
