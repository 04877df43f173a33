"""Loading a draft: a decoder, and for an `eagle` draft the head that feeds it.

Owns the difference between the two architectures at load. Whether the folder belongs to the target is
`engine.draft_folder`'s question, asked first.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.attention import AttentionKind, make_attention
from engine.collectives import Solo
from engine.draft_folder import check_draft
from engine.linear import LinearKind
from engine.models import Model, load_model
from engine.models.decoder import Decoder
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
) -> LoadedDraft:
    """Load a draft for a target. Arguments as in `load_model`.

    Raises:
        ConfigError: it does not belong to the target, with the field and both values; or any reason of `load_model`.
    """
    config = check_draft(folder, target_folder)
    if config.architecture != "eagle":
        model = load_model(
            folder, dtype=dtype, device=device, target_folder=target_folder, linear=linear, attention=attention
        )
        return LoadedDraft(model, None)
    where = torch.device(device)
    loader = Loader(config, folder, shard=WHOLE, dtype=dtype, device=where, linear=linear)
    with torch.inference_mode():
        head = loader.eagle()
        decoder = Decoder(
            config,
            loader.load(target_folder),
            collectives=Solo(),
            attention=make_attention(
                attention, group_size=config.num_heads // config.num_kv_heads, dtype=dtype, device=where
            ),
            feature_layers=(config.num_layers - 1,),
            dtype=dtype,
            device=where,
        )
    return LoadedDraft(decoder, head)
