"""Medusa heads in their public layouts, read as a config of this package.

Owns the keys of their `config.json`, the names of their tensors and the file that holds them. What a config leaves out
is the target's; `engine.checkpoint.draft_check` fills it in. Knows nothing of shapes: those are checked when tensors
are read.

    authors   `medusa_lm_head.safetensors`   j.i.linear.weight, j.i.linear.bias, j.L.weight        head j, block i of L
    vLLM      `model.safetensors`            blocks.j.layers.i.weight, lm_heads.j.weight, token_map

`paceline distill` writes the second one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.config_keys import Keys
from engine.errors import ConfigError

MEDUSA_FILE = "medusa_lm_head.safetensors"
"""Weights of heads in the authors' layout."""
TOKEN_MAP = "token_map"
"""Tensor with the target token of each row of the output layers, where the vocabulary is reduced."""
_PICKLES = (".pt", ".bin", ".pth")


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaVariant:
    """What differs between sets of Medusa heads, beside the sizes of the target."""

    num_heads: int
    num_blocks: int
    """Residual blocks of each head."""
    has_biases: bool
    """Whether the config says that the blocks have biases. Those of the authors' layout have them without saying so."""
    shares_output: bool
    """Whether all heads have one output layer."""

    def num_weights(self, hidden_size: int, num_columns: int) -> int:
        """Number of weights of all heads, without biases."""
        outputs = 1 if self.shares_output else self.num_heads
        return self.num_heads * self.num_blocks * hidden_size**2 + outputs * num_columns * hidden_size


def is_medusa(values: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is of Medusa heads."""
    return "medusa_num_heads" in values or values.get("model_type") == "medusa"


def medusa_fields(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a `ModelConfig` for Medusa heads. Sizes that the config leaves out, and those of layers, are 0.

    Raises:
        ConfigError: a key is missing or malformed.
    """
    keys = Keys(values)
    own = "medusa_num_heads" in values
    num_heads = keys.positive("medusa_num_heads" if own else "num_heads")
    if num_heads < 2:
        raise ConfigError(f"medusa_num_heads: {num_heads} given; allowed are whole numbers from 2")
    named = "medusa_num_layers" if "medusa_num_layers" in values or own else "num_hidden_layers"
    sizes = {key: keys.positive(key) if values.get(key) is not None else 0 for key in ("vocab_size", "hidden_size")}
    reduced = keys.positive("truncated_vocab_size", sizes["vocab_size"] or 1)
    variant = MedusaVariant(
        num_heads=num_heads,
        num_blocks=keys.positive(named, 1),
        has_biases=keys.flag("medusa_fc_bias", default=False),
        shares_output=keys.flag("original_lm_head", default=False),
    )
    nothing = dict.fromkeys(("intermediate_size", "num_layers", "head_dim", "max_model_len"), 0)
    return sizes | {
        **nothing,
        "family": "llama",
        "num_heads": 1,
        "num_kv_heads": 1,
        "rms_norm_eps": 0.0,
        "rope_theta": 0.0,
        "rope_scaling": None,
        **dict.fromkeys(("tie_word_embeddings", "qkv_bias", "o_bias", "mlp_bias", "qk_norm"), False),
        "draft_vocab_size": reduced if reduced < sizes["vocab_size"] else None,
        "architecture": "medusa",
        "positions_per_pass": num_heads,
        "medusa": variant,
    }


def tensor_name(num_blocks: int) -> Callable[[str], str]:
    """Gives the name in vLLM's layout of a tensor of either one, of heads of `num_blocks` blocks."""

    def rename(name: str) -> str:
        name = re.sub(r"^medusa_heads?\.", "", name)
        name = re.sub(r"^(\d+)\.(\d+)\.linear\.(weight|bias)$", r"blocks.\1.layers.\2.\3", name)
        return re.sub(rf"^(\d+)\.{num_blocks}\.weight$", r"lm_heads.\1.weight", name)

    return rename


def file_names(folder: Path) -> list[str] | None:
    """The weight files of a folder of Medusa heads; None for those of any model.

    Raises:
        ConfigError: the heads would have to be unpickled; has the remedy.
    """
    if (folder / MEDUSA_FILE).is_file():
        return [MEDUSA_FILE]
    found = {path.suffix for path in folder.iterdir()}
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
    if pickled and ".safetensors" not in found:
        raise ConfigError(
            f"draft: the Medusa heads in {folder} are in {pickled[0]}, which would have to be unpickled. Write "
            f"{MEDUSA_FILE} once, with the tensors of torch.load({pickled[0]!r}, weights_only=True), each cloned"
        )
    return None
