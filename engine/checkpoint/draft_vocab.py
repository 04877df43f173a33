"""The reduced vocabulary of a draft: the target token id of each column of its logits."""

from __future__ import annotations

import torch

from engine.checkpoint.weights import WeightFiles
from engine.errors import ConfigError


def read_draft_vocab(files: WeightFiles, name: str, size: int, *, vocab_size: int, are_offsets: bool) -> torch.Tensor:
    """Read the target ids of a draft's tokens.

    Args:
        files: of the draft.
        name: of the tensor.
        size: number of tokens that the draft knows.
        vocab_size: of the target.
        are_offsets: whether the tensor has the distance from each draft id to its target id, as in EAGLE-3 heads.

    Returns:
        [size] int64 on the CPU.

    Raises:
        ConfigError: it is missing, of another shape or type, or its ids are not distinct ids of the target.
    """
    ids = files.read(name, (size,))
    if ids.dtype not in (torch.int64, torch.int32):
        raise ConfigError(f"model: tensor {name} is of type {ids.dtype}; allowed: int64, int32")
    ids = ids.long() + torch.arange(size) if are_offsets else ids.long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(set(ids.tolist())) != size:
        raise ConfigError(
            f"model: {name} must hold distinct token ids within [0, {vocab_size}), "
            f"given are {size} from {int(ids.min())} to {int(ids.max())}"
        )
    return ids
