"""Loading a draft: a decoder, and for an `eagle` draft the head that feeds it.

Owns the difference between the two architectures at load. Whether the folder belongs to the target is
`engine.draft_folder`'s question, asked first.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.attention import AttentionKind
from engine.collectives import Solo
from engine.draft_folder import check_draft
from engine.linear import LinearKind
from engine.models import KernelKind, Model, load_model, make_decoder
from engine.models.eagle import EagleHead
from engine.models.loading import Loader
from engine.weights import WHOLE


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
    linear: LinearKind = "auto",
    attention: AttentionKind = "auto",
    kernel: KernelKind = "auto",
) -> LoadedDraft:
    """Load a draft for a target. Arguments as in `load_model`.

    Raises:
        ConfigError: it does not belong to the target, with the field and both values; or any reason of `load_model`.
    """
    config = check_draft(folder, target_folder)
    if config.architecture != "eagle":
        model = load_model(
            folder,
            dtype=dtype,
            device=device,
            target_folder=target_folder,
            linear=linear,
            attention=attention,
            kernel=kernel,
        )
        return LoadedDraft(model, None)
    where = torch.device(device)
    loader = Loader(config, folder, shard=WHOLE, dtype=dtype, device=where, linear=linear)
    with torch.inference_mode():
        head = loader.eagle()
    decoder = make_decoder(
        loader,
        config,
        dtype=dtype,
        device=where,
        collectives=Solo(),
        target_folder=target_folder,
        feature_layers=(config.num_layers - 1,),
        linear=linear,
        attention=attention,
        kernel=kernel,
    )
    return LoadedDraft(decoder, head)
