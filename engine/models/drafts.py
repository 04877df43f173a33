"""Loading a draft: a decoder, and for an `eagle` draft the head that feeds it.

Owns the difference between the two architectures at load. Whether the folder belongs to the target is
`engine.draft_folder`'s question, asked first.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.collectives import Solo
from engine.draft_folder import check_draft
from engine.models import Model, load_decoder
from engine.models.compute import Compute, KernelKind
from engine.models.eagle import EagleHead
from engine.models.loading import Loader
from engine.weights import WHOLE, WeightFiles


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft, of either architecture."""

    decoder: Model
    head: EagleHead | None
    """Of an `eagle` draft, whose decoder then also yields the output of its last layer."""


def load_draft(
    folder: Path,
    target_folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    kernel: KernelKind = "auto",
) -> LoadedDraft:
    """Load a draft for a target. Arguments as in `load_model`.

    Raises:
        ConfigError: it does not belong to the target, with the field and both values; or any reason of `load_model`.
    """
    config = check_draft(folder, target_folder)
    files = WeightFiles(folder)
    compute = Compute(dtype, torch.device(device), kernel)
    head = None
    if config.architecture == "eagle":
        with torch.inference_mode():
            head = Loader(config, files, compute, shard=WHOLE, linear=compute.layers).eagle_head()
    decoder = load_decoder(
        config,
        files,
        compute,
        collectives=Solo(),
        target_folder=target_folder,
        feature_layers=() if head is None else (config.num_layers - 1,),
    )
    return LoadedDraft(decoder, head)
