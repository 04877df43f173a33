"""An EAGLE draft of a small random target, written by the exporter of `distill`. It is not trained."""

from __future__ import annotations

from pathlib import Path

import torch
from distill_fakes import open_target

from distill.models.decoder import FrozenTarget
from distill.models.eagle import EagleDraft
from distill.models.export import export_draft
from distill.models.parallel import ParallelDraft

DRAFT_VOCAB = torch.arange(3, 96, 2)


def make_eagle(target: FrozenTarget, *, num_layers: int = 1, seed: int = 0) -> EagleDraft:
    """A draft initialised from the target's last layer, with noise so that every weight matters."""
    draft = EagleDraft(target.config, target.feature_layers, DRAFT_VOCAB, target.embed, num_layers=num_layers)
    torch.manual_seed(seed)
    draft.initialise(target, residual_size=1.0)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return draft


def make_parallel(target: FrozenTarget, *, positions: int, num_layers: int = 1, seed: int = 0) -> ParallelDraft:
    """A parallel draft made like `make_eagle`."""
    draft = ParallelDraft(
        target.config, target.feature_layers, DRAFT_VOCAB, target.embed, num_layers=num_layers, positions=positions
    )
    torch.manual_seed(seed)
    draft.initialise(target, residual_size=1.0)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return draft


def write_eagle(target_folder: Path, where: Path, *, int8: bool = False, num_layers: int = 1) -> Path:
    export_draft(
        make_eagle(open_target(target_folder), num_layers=num_layers), target_folder, where, card="", int8=int8
    )
    return where
