"""Folders of random Medusa heads for a small target, in both public layouts."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from distill_fakes import VOCAB
from safetensors.torch import save_file

HEADS, HIDDEN = 3, 32
DRAFT_VOCAB = torch.arange(3, 96, 2)


def authors_tensors(num_blocks: int, *, hidden: int = HIDDEN, vocab: int = VOCAB) -> dict[str, torch.Tensor]:
    """Random heads under the names of the authors' layout."""
    torch.manual_seed(num_blocks)
    tensors = {}
    for head in range(HEADS):
        for block in range(num_blocks):
            tensors[f"{head}.{block}.linear.weight"] = torch.randn(hidden, hidden) * 0.3
            tensors[f"{head}.{block}.linear.bias"] = torch.randn(hidden) * 0.3
        tensors[f"{head}.{num_blocks}.weight"] = torch.randn(vocab, hidden) * 0.3
    return tensors


def write_authors(folder: Path, tensors: dict[str, torch.Tensor], num_blocks: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {"medusa_num_heads": HEADS, "medusa_num_layers": num_blocks, "base_model_name_or_path": "some/target"}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    return folder


def vllm_tensors(
    *, has_biases: bool = False, shares_output: bool = False, reduced: str = "no"
) -> dict[str, torch.Tensor]:
    """Random heads of one block under the names of vLLM's layout; `reduced`: no, map, or rows of all tokens."""
    torch.manual_seed(7)
    tensors = {f"blocks.{head}.layers.0.weight": torch.randn(HIDDEN, HIDDEN) * 0.3 for head in range(HEADS)}
    if has_biases:
        tensors |= {f"blocks.{head}.layers.0.bias": torch.randn(HIDDEN) * 0.3 for head in range(HEADS)}
    rows = len(DRAFT_VOCAB) if reduced == "map" else VOCAB
    outputs = 1 if shares_output else HEADS
    tensors |= {f"lm_heads.{head}.weight": torch.randn(rows, HIDDEN) * 0.3 for head in range(outputs)}
    return tensors if reduced == "no" else tensors | {"token_map": DRAFT_VOCAB}


def write_vllm(folder: Path, tensors: dict[str, torch.Tensor], *, shares_output: bool, reduced: bool) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "medusa_num_heads": HEADS,
        "medusa_num_layers": 1,
        "original_lm_head": shares_output,
    }
    (folder / "config.json").write_text(json.dumps(config | ({"truncated_vocab_size": 47} if reduced else {})))
    save_file(tensors, folder / "model.safetensors")
    return folder
