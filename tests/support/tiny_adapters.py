"""Random LoRA adapters in the layout of `peft`, and targets with an adapter merged into their weights.

The merged weights are computed here from the definition W + scale * B A, without the code under test.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj")
SIZE = 0.15
"""Standard deviation of the entries of A and B: large enough to change most tokens, and small enough that float32
computes the merged model within 1e-4 of float64. At 0.3 it is off by 1e-3."""


def write_adapter(
    folder: Path,
    model: Path,
    *,
    rank: int = 3,
    alpha: float = 6.0,
    targets: Sequence[str] = LINEAR,
    ranks: dict[str, int] | None = None,
    alphas: dict[str, float] | None = None,
    seed: int = 0,
    size: float = SIZE,
    **changes: Any,
) -> Path:
    """Write an adapter of a model.

    Args:
        folder: created here.
        model: folder of the target, with one safetensors file.
        targets: last names of the adapted modules; those that the model lacks are left out.
        ranks, alphas: rank_pattern and alpha_pattern, by last names of modules.
        seed: of the matrices.
        size: standard deviation of their entries.
        changes: further keys of adapter_config.json.
    """
    ranks, alphas = ranks or {}, alphas or {}
    generator = torch.Generator().manual_seed(seed)
    tensors, found = {}, set()
    for name, weight in sorted(load_file(model / "model.safetensors").items()):
        module, last = name.removesuffix(".weight"), name.split(".")[-2]
        if not name.endswith(".weight") or last not in targets or "experts" in name:
            continue
        found.add(last)
        r = ranks.get(last, rank)
        shapes = {"lora_A": (r, weight.shape[1]), "lora_B": (weight.shape[0], r)}
        for part, shape in shapes.items():
            tensors[f"base_model.model.{module}.{part}.weight"] = size * torch.randn(shape, generator=generator)
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(found),
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def write_merged(folder: Path, model: Path, adapter: Path) -> Path:
    """Write the model with the adapter merged into its weights."""
    shutil.copytree(model, folder)
    weights = load_file(model / "model.safetensors")
    low_rank = load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    for name in [name for name in low_rank if ".lora_A." in name]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        last = module.split(".")[-1]
        rank = config["rank_pattern"].get(last, config["r"])
        alpha = config["alpha_pattern"].get(last, config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        delta = low_rank[name.replace("lora_A", "lora_B")].double() @ low_rank[name].double()
        weights[f"{module}.weight"] = (weights[f"{module}.weight"].double() + scale * delta).float()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
