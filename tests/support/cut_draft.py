"""A draft without training: a few layers of the target. Weak, but real, and made in a second."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file


def cut_draft(target: Path, where: Path, layers: tuple[int, ...] = (0, 1, 29)) -> Path:
    """Write the draft's folder; embedding, head and norm are the target's."""
    place = {layer: index for index, layer in enumerate(layers)}
    kept = {}
    for name, tensor in load_file(target / "model.safetensors").items():
        if not name.startswith("model.layers."):
            kept[name] = tensor
            continue
        _, _, layer, rest = name.split(".", 3)
        if int(layer) in place:
            kept[f"model.layers.{place[int(layer)]}.{rest}"] = tensor
    where.mkdir(parents=True, exist_ok=True)
    save_file(kept, where / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    (where / "config.json").write_text(json.dumps(config | {"num_hidden_layers": len(layers)}))
    return where
