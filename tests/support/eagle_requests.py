"""Draft requests for an EAGLE draft without an engine: the target's features, a proposer and request rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.draft_check import check_draft
from engine.core.block_pool import BlockPool
from engine.core.packing import SpanRows, pack_spans
from engine.dflash.architecture import DFlashArchitecture
from engine.dflash.load import load_dflash
from engine.draft.architectures import EagleArchitecture
from engine.draft.messages import DraftRequestRow
from engine.draft.parallel import ParallelEagleArchitecture
from engine.draft.proposer import Proposer
from engine.model.load import load_draft, load_model
from engine.model.runner import ModelRunner
from engine.sampling.row_sampling import RowSampling

BLOCK = 16
NUM_DRAFTED = 5


def features_of(target_folder: Path, draft_folder: Path, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), width] of the layers that the draft reads."""
    layers = check_draft(draft_folder, target_folder).feature_layers
    model = load_model(target_folder, dtype=torch.float32, feature_layers=layers)
    runner = ModelRunner(model, num_blocks=8, block_size=BLOCK)
    blocks = list(range(1, 2 + len(tokens) // BLOCK))
    features = runner.forward(pack_spans([SpanRows(tokens, 0, blocks, 1)], BLOCK)).hidden
    assert features is not None
    return features


def make_proposer(folder: Path, target_folder: Path) -> Proposer:
    if check_draft(folder, target_folder).dflash is not None:
        return _dflash_proposer(folder, target_folder)
    loaded = load_draft(folder, target_folder, dtype=torch.float32)
    assert loaded.head is not None
    caches = ModelRunner(loaded.decoder, num_blocks=32, block_size=BLOCK).caches
    pool = BlockPool(32, BLOCK, prefix_cache=True, ahead=1)
    vocab, positions = loaded.decoder.draft_vocab, loaded.decoder.config.positions_per_pass
    architecture = EagleArchitecture(loaded.head, loaded.decoder, caches)
    if positions > 1:
        architecture = ParallelEagleArchitecture(loaded.head, loaded.decoder, caches, positions_per_pass=positions)
    return Proposer(architecture, pool, vocab=vocab, max_model_len=512)


def _dflash_proposer(folder: Path, target_folder: Path) -> Proposer:
    decoder = load_dflash(folder, target_folder, dtype=torch.float32)
    caches = ModelRunner(decoder, num_blocks=32, block_size=BLOCK).caches
    pool = BlockPool(32, BLOCK, prefix_cache=True, ahead=1)
    return Proposer(DFlashArchitecture(decoder, caches), pool, vocab=decoder.draft_vocab, max_model_len=512)


def request_row(
    key: int, start: int, new_tokens: list[int], feature_rows: list[int], **sampling: Any
) -> DraftRequestRow:
    given = {"temperature": 0.0, "top_p": 1.0, "stream_key": 3, "attempt": 1, "coupled": False} | sampling
    return DraftRequestRow(
        key, start, tuple(new_tokens), NUM_DRAFTED, RowSampling(**given), feature_rows=tuple(feature_rows)
    )
