"""What the draft's process needs of a loaded draft, and how Medusa heads become one.

Owns the pool of a draft without a KV cache. Drafts with layers are loaded by `engine.workers.draft_worker`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.checkpoint.model_config import ModelConfig
from engine.config import EngineConfig
from engine.core.block_pool import BlockPool
from engine.draft.architectures import Architecture
from engine.medusa.architecture import MedusaArchitecture
from engine.medusa.heads import MedusaHeads

_SEQUENCES_PER_REQUEST = 4
"""Sequences of the pool per request of a batch; preempted requests keep theirs."""


@dataclass(frozen=True, slots=True)
class LoadedParts:
    """A loaded draft."""

    config: ModelConfig
    architecture: Architecture
    pool: BlockPool
    vocab: torch.Tensor | None
    """[width] int64 target token id of each logit column; None when column i is token i."""
    width: int
    """Logit columns."""
    feature_width: int
    """Numbers per row that it reads of the target; 0 for none."""


def heads_parts(engine: EngineConfig, heads: MedusaHeads) -> LoadedParts:
    """Medusa heads as a draft. A block of their pool is room for a whole sequence, and takes no memory."""
    config = heads.config.for_context(engine.max_model_len)
    num_blocks = 1 + _SEQUENCES_PER_REQUEST * engine.max_num_requests
    pool = BlockPool(num_blocks, config.max_model_len + 1, prefix_cache=False)
    architecture = MedusaArchitecture(heads)
    return LoadedParts(config, architecture, pool, heads.draft_vocab, heads.num_columns, config.hidden_size)
