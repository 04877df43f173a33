"""An untrained draft: a few layers of the target. Its acceptance is low, but it takes no training."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file


def cut_draft(target: Path, where: Path, layers: tuple[int, ...] = (0, 1, 29)) -> Path:
    """Write the draft's folder. Embedding, head and final norm are the target's."""
    new_index = {layer: index for index, layer in enumerate(layers)}
    tensors = {}
    for name, tensor in load_file(target / "model.safetensors").items():
        if not name.startswith("model.layers."):
            tensors[name] = tensor
            continue
        _, _, layer, rest = name.split(".", 3)
        if int(layer) in new_index:
            tensors[f"model.layers.{new_index[int(layer)]}.{rest}"] = tensor
    where.mkdir(parents=True, exist_ok=True)
    save_file(tensors, where / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    (where / "config.json").write_text(json.dumps(config | {"num_hidden_layers": len(layers)}))
    return where
