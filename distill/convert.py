"""`paceline distill export`: a draft of this project, written in the layout that other engines load.

Owns the action. The construction is in `distill.models.widened`, keys and names are in `distill.models.public_layout`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from rich.console import Console
from safetensors.torch import save_file

from distill.models.decoder import FrozenTarget, fingerprint
from distill.models.eagle import EagleDraft
from distill.models.export import PUBLIC_K, DraftMismatchError, load_draft, read_config
from distill.models.parallel import ParallelDraft
from distill.models.public_layout import head_config, vocabulary_tensors
from distill.models.widened import widened
from engine.checkpoint.store import resolve_model
from engine.errors import ConfigError

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def run_export(args: argparse.Namespace) -> int:
    """Write the draft; returns the exit status."""
    folder = resolve_model(args.target)
    export_public(args.draft, folder, args.out, dtype=DTYPES[args.dtype])
    Console(stderr=True).print(f"EAGLE-3 head in the speculators layout written to {args.out}")
    return 0


def export_public(draft_folder: Path, target_folder: Path, out: Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write an `eagle` chain as an EAGLE-3 head in the speculators layout, with the same logits.

    Args:
        draft_folder: the chain.
        target_folder: its target.
        out: the folder to write `model.safetensors` and `config.json` to.
        dtype: of the stored tensors. Logits are equal up to rounding in it.

    Raises:
        ConfigError: the draft is no chain of the `eagle` architecture, or does not fit the target.
    """
    config = read_config(draft_folder)
    layers = tuple(config.get("feature_layers") or ())
    if config.get("architecture") != EagleDraft.architecture or not layers:
        raise ConfigError(
            f"draft: {draft_folder} is {config.get('architecture')!r}; export writes 'eagle' drafts; "
            "eagle3 and medusa drafts are in a public layout already"
        )
    try:
        target = FrozenTarget(target_folder, feature_layers=layers, dtype=torch.float32)
        draft = load_draft(draft_folder, target, dtype=torch.float32)
    except (DraftMismatchError, ValueError) as error:
        raise ConfigError(f"{draft_folder}: {error}") from None
    if not isinstance(draft, EagleDraft) or isinstance(draft, ParallelDraft):
        raise ConfigError(f"draft: {draft_folder} is parallel; export writes chains")
    given = json.loads((target_folder / "config.json").read_text())
    max_len = int(given.get("max_position_embeddings", 2048))
    wide = widened(draft, max_len=max_len)
    verifier = {"name_or_path": None, "architectures": given.get("architectures") or []}
    written = head_config(
        wide.config,
        num_columns=len(draft.vocabulary.draft_vocab),
        feature_layers=layers,
        verifier=verifier,
        max_len=max_len,
        k=PUBLIC_K,
        attention_bias=True,
    )
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in wide.tensors.items()}
    save_file(tensors | vocabulary_tensors(draft.vocabulary), out / "model.safetensors", metadata={"format": "pt"})
    name = str(dtype).removeprefix("torch.")
    written |= {**wide.options, "torch_dtype": name, "target": fingerprint(target_folder)}
    (out / "config.json").write_text(json.dumps(written, indent=1) + "\n")
