"""A folder with an adapter: its modules with rank and scale, checked against the target before a tensor is read.

Owns the names of the tensors in `adapter_model.safetensors` and the comparison with the target's shapes. Imports no
torch, so that the replica and the command check an adapter too. `engine.lora.adapter_set` reads the tensors.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from engine.checkpoint.model_config import ModelConfig
from engine.config import LoraConfig
from engine.errors import ConfigError
from engine.lora.adapter_config import AdapterConfig, scales

WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Start of every tensor's name."""
A_SUFFIX, B_SUFFIX = ".lora_A.weight", ".lora_B.weight"
FLOAT_TYPES = ("F32", "BF16", "F16")


@dataclass(frozen=True, slots=True)
class AdaptedModule:
    """One adapted linear layer: W x becomes W x + scale * B A x."""

    rank: int
    """Rows of A [rank, in] and columns of B [out, rank]."""
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """One adapter whose files fit the target."""

    folder: Path
    modules: dict[str, AdaptedModule]
    """By full name, such as `model.layers.0.self_attn.q_proj`."""

    @property
    def rank(self) -> int:
        """The largest rank."""
        return max(module.rank for module in self.modules.values())


def module_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of every module of the target that can be adapted, by full name. Experts are left out."""
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    if config.fused_projections:
        attention = {"qkv_proj": (heads + 2 * kv_heads, hidden)}
        mlp = {"gate_up_proj": (2 * inner, hidden)}
    else:
        attention = {"q_proj": (heads, hidden), "k_proj": (kv_heads, hidden), "v_proj": (kv_heads, hidden)}
        mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden)}
    attention["o_proj"] = (hidden, heads)
    mlp["down_proj"] = (hidden, inner)
    shapes: dict[str, tuple[int, int]] = {}
    for index in range(config.num_layers):
        layer = f"model.layers.{index}."
        shapes |= {f"{layer}self_attn.{name}": shape for name, shape in attention.items()}
        if config.experts is None or index in config.experts.dense_layers:
            shapes |= {f"{layer}mlp.{name}": shape for name, shape in mlp.items()}
    return shapes


def num_adapter_values(lora: LoraConfig, config: ModelConfig, *, num_shards: int = 1) -> int:
    """Elements of all adapters that one shard may hold: `max_loras` of rank `max_lora_rank` in every module."""
    count = 0
    for name, (num_out, num_in) in module_shapes(config).items():
        # A is cut where the layer is cut by inputs, B elsewhere.
        if name.endswith(("o_proj", "down_proj")):
            count += num_out - (-num_in // num_shards)
        else:
            count += num_in - (-num_out // num_shards)
    return count * lora.max_lora_rank * lora.max_loras


def read_adapter(folder: Path, config: ModelConfig, *, max_rank: int) -> AdapterSpec:
    """Check an adapter against its target.

    Args:
        folder: has `adapter_config.json` and `adapter_model.safetensors`.
        config: of the target.
        max_rank: largest rank that is accepted.

    Raises:
        ConfigError: a file is missing or damaged, the adapter asks for what is not computed, or it does not fit the
            target. Names the key or the tensor.
    """
    if not os.path.isdir(folder):  # unlike Path.is_dir, false for every path that cannot be looked up
        raise ConfigError(f"lora: {folder} is no folder")
    made = AdapterConfig.load(folder)
    stored = _stored(folder / WEIGHTS_FILE)
    shapes = module_shapes(config)
    targeted = scales(made, list(shapes))
    modules = {}
    for name, (num_out, num_in) in shapes.items():
        pair = stored.pop(name + A_SUFFIX, None), stored.pop(name + B_SUFFIX, None)
        if (name in targeted) != all(pair) or any(pair) != all(pair):
            verb = "names" if name in targeted else "does not name"
            present = [letter for letter, shape in zip("AB", pair, strict=True) if shape]
            raise ConfigError(
                f"lora: target_modules {verb} {name}, of whose matrices A and B the file has "
                f"{' and '.join(present) or 'none'}"
            )
        if name not in targeted:
            continue
        rank = targeted[name].rank
        if rank > max_rank:
            raise ConfigError(f"lora: {name} has rank {rank}; engine.lora.max_lora_rank allows up to {max_rank}")
        for suffix, given, expected in zip((A_SUFFIX, B_SUFFIX), pair, ([rank, num_in], [num_out, rank]), strict=True):
            if given != expected:
                raise ConfigError(
                    f"lora: tensor {PREFIX}{name}{suffix} has shape {given}, but rank and target imply {expected}"
                )
        modules[name] = AdaptedModule(rank, targeted[name].scale)
    if stored:
        raise ConfigError(_unexpected(sorted(stored)))
    if not modules:
        raise ConfigError(f"lora: {folder} adapts no module of the target")
    return AdapterSpec(folder, modules)


def _stored(path: Path) -> dict[str, list[int]]:
    """Shape of every tensor in the file, by its name without the prefix."""
    if not os.path.isfile(path):
        raise ConfigError(f"lora: {path.parent} has no {WEIGHTS_FILE}; only safetensors are loaded")
    found: dict[str, list[int]] = {}
    try:
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118
                view: Any = file.get_slice(name)
                if view.get_dtype() not in FLOAT_TYPES:
                    raise ConfigError(
                        f"lora: tensor {name} is of type {view.get_dtype()}; allowed: {', '.join(FLOAT_TYPES)}"
                    )
                found[name.removeprefix(PREFIX) if name.startswith(PREFIX) else f"?{name}"] = list(view.get_shape())
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"lora: cannot read {path}: {error}") from None
    return found


def _unexpected(names: list[str]) -> str:
    """The message about tensors that belong to no module that can be adapted."""
    kinds = {
        "embed_tokens": "adapters of the embedding are not supported",
        "lm_head": "adapters of the head are not supported",
        "experts": "adapters of experts are not supported",
        "lora_magnitude_vector": "DoRA is not supported",
    }
    name = names[0]
    why = next((text for part, text in kinds.items() if part in name), "the target has no such module")
    return f"lora: {len(names)} tensors cannot be used, such as {name[:200].lstrip('?')}: {why}"
