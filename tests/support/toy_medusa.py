"""Toy Medusa heads of a toy target, behind the real architecture.

The distribution of a head depends on the target's feature before the last token, and on the head: not on that token,
nor on what is drafted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from fakes import LoopbackEndpoint, ToyModel
from toy_eagle import FeaturedToy

from engine.core.block_pool import BlockPool
from engine.draft.proposer import Proposer
from engine.draft.remote import RemoteDrafter
from engine.medusa.architecture import MedusaArchitecture

MASK = 0
"""Token that the distributions see in place of those after the hidden state."""


class ToyHeads:
    """Heads with the distribution of a toy model; `num_forwards` counts the calls."""

    def __init__(self, distribution: ToyModel, num_heads: int) -> None:
        self._distribution = distribution
        self.blocks = ((),) * num_heads
        self.num_forwards = 0

    def logits(self, features: torch.Tensor, num_heads: npt.NDArray[np.int64]) -> torch.Tensor:
        assert not features.isnan().any(), "features that were never written"
        self.num_forwards += 1
        rows = [
            self._distribution.logits_after([*[int(token) for token in feature[1:]], *[MASK] * (1 + head)])
            for feature, count in zip(features.tolist(), num_heads.tolist(), strict=True)
            for head in range(count)
        ]
        return torch.from_numpy(np.array(rows, dtype=np.float32).reshape(-1, self._distribution.columns))


def toy_medusa(
    target: FeaturedToy,
    distribution: ToyModel,
    *,
    num_heads: int,
    vocab: torch.Tensor | None = None,
    on_device: bool = False,
    num_blocks: int = 400,
) -> tuple[RemoteDrafter, LoopbackEndpoint, ToyHeads]:
    """A drafter of a toy target, the endpoint it is attached to, and the heads."""
    heads: Any = ToyHeads(distribution, num_heads)
    pool = BlockPool(num_blocks, 10_001, prefix_cache=False)
    proposer = Proposer(MedusaArchitecture(heads), pool, vocab=vocab, max_model_len=10_000)
    drafter = RemoteDrafter(max_request_tokens=64, max_released=64, deadline_s=1.0, on_down=print)
    drafter.set_vocab(vocab)
    features = torch.full((256, len(target.features_after([]))), float("nan"))
    endpoint = LoopbackEndpoint(
        proposer, max_rows=64, max_k=16, draft_vocab=distribution.columns, features=features, on_device=on_device
    )
    drafter.attach(endpoint)
    return drafter, endpoint, heads
