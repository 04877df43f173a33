"""What the draft's process needs of a loaded draft: the architecture over a new cache, and what of it is recorded.

Owns the pool of a draft without a KV cache, and the recordings. Weights are loaded by `engine.workers.draft_worker`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.checkpoint.model_config import ModelConfig
from engine.config import EngineConfig
from engine.core.block_pool import BlockPool
from engine.core.step import ForwardInput, ForwardResult
from engine.dflash.architecture import DFlashArchitecture
from engine.dflash.decoder import DFlashDecoder
from engine.draft.architectures import Architecture, EagleArchitecture, PlainArchitecture
from engine.draft.parallel import ParallelEagleArchitecture
from engine.graphs.buckets import Bucket, make_buckets, row_sizes
from engine.graphs.chain import ChainModel, RecordedChain
from engine.graphs.forward import Capture, CudaCapture, GraphedForward
from engine.medusa.architecture import MedusaArchitecture
from engine.medusa.heads import MedusaHeads
from engine.model.load import LoadedDraft
from engine.model.runner import ModelRunner
from engine.workers.draft_connection import MAX_REQUEST_TOKENS

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
    recorded: RecordedChain | None = None
    """Its chains as CUDA graphs; None where none are recorded."""


def heads_parts(engine: EngineConfig, heads: MedusaHeads, capture: Capture | None = None) -> LoadedParts:
    """Medusa heads as a draft. A block of their pool is room for a whole sequence, and takes no memory.

    Args:
        engine: the settings.
        heads: loaded weights.
        capture: records; None takes CUDA graphs if the settings ask for them.
    """
    config = heads.config.for_context(engine.max_model_len)
    num_blocks = 1 + _SEQUENCES_PER_REQUEST * engine.max_num_requests
    pool = BlockPool(num_blocks, config.max_model_len + 1, prefix_cache=False)
    architecture = MedusaArchitecture(heads)
    capture = capture or _capture(engine, heads.device)
    recorded = None
    if capture is not None:
        architecture.record(_sizes(engine), capture)
        recorded = _chain(engine, capture, heads.device, None, width=heads.num_columns, vocab=heads.draft_vocab)
    columns, width = heads.num_columns, config.hidden_size
    return LoadedParts(config, architecture, pool, heads.draft_vocab, columns, width, recorded)


def make_architecture(
    config: EngineConfig, draft: LoadedDraft, width: int, *, num_blocks: int, capture: Capture | None = None
) -> tuple[Architecture, RecordedChain | None]:
    """The draft's model over a new KV cache, and its recorded chains.

    Args:
        config: settings of the engine.
        draft: loaded weights.
        width: columns of the logits that are tokens; columns from `width` on are padding and are never drafted.
        num_blocks: blocks of the cache.
        capture: records; None takes CUDA graphs if the settings ask for them.
    """
    runner = ModelRunner(draft.decoder, num_blocks=num_blocks, block_size=config.kv_block_size)
    decoder, head, device = draft.decoder, draft.head, draft.decoder.device
    capture = capture or _capture(config, device)
    k, max_requests = max(1, config.speculative.k), config.max_num_requests
    drafted = make_buckets(max_requests=max_requests, max_k=0)
    max_kv = min(config.max_model_len or decoder.config.max_model_len, decoder.config.max_model_len)
    positions = decoder.config.positions_per_pass
    recorded = None
    one_forward: Architecture | None = None  # It has no forward over drafted tokens to record.
    if isinstance(decoder, DFlashDecoder):
        one_forward = DFlashArchitecture(decoder, runner.caches)
    elif head is not None and positions > 1:
        one_forward = parallel = ParallelEagleArchitecture(head, decoder, runner.caches, positions_per_pass=positions)
        if capture is not None:  # At most k + 1 committed rows, then k - 1 masked ones.
            committed = make_buckets(max_requests=max_requests, max_k=2 * k - 1)
            parallel.record_committed(runner, committed, capture, max_kv=max_kv, max_ids=MAX_REQUEST_TOKENS)
    if one_forward is not None:
        if capture is not None:
            recorded = _chain(config, capture, device, None, width=width, vocab=decoder.draft_vocab)
        return one_forward, recorded
    if head is not None:
        eagle = EagleArchitecture(head, decoder, runner.caches)
        if capture is not None:
            eagle.record(runner, drafted, capture, max_kv=max_kv)
            eagle.record_committed(runner, _committed(config), capture, max_kv=max_kv, max_ids=MAX_REQUEST_TOKENS)
            model = ChainModel(runner, max_kv, eagle.embedding)
            recorded = _chain(config, capture, device, model, width=width, vocab=decoder.draft_vocab)
        return eagle, recorded
    compute = runner.forward
    if capture is not None:
        compute = GraphedForward(
            *(runner, _committed(config), capture), max_kv=max_kv, max_ids=MAX_REQUEST_TOKENS, some_logits=True
        ).forward
        model = ChainModel(runner, max_kv)
        recorded = _chain(config, capture, device, model, width=width, vocab=decoder.draft_vocab)

    def forward(forward_input: ForwardInput) -> ForwardResult:
        return ForwardResult(compute(forward_input).require_logits()[:, :width])

    return PlainArchitecture(forward), recorded


def _capture(config: EngineConfig, device: torch.device) -> Capture | None:
    """What records, if the settings ask for it."""
    return CudaCapture(device) if config.cuda_graphs == "on" and device.type == "cuda" else None


def _committed(config: EngineConfig) -> tuple[Bucket, ...]:
    """Sizes of forwards over committed tokens: those of a step, at most k accepted ones and one more per request."""
    return make_buckets(max_requests=config.max_num_requests, max_k=max(1, config.speculative.k))


def _sizes(config: EngineConfig) -> tuple[int, ...]:
    return row_sizes(make_buckets(max_requests=config.max_num_requests, max_k=0))


def _chain(
    config: EngineConfig,
    capture: Capture,
    device: torch.device,
    model: ChainModel | None,
    *,
    width: int,
    vocab: torch.Tensor | None,
) -> RecordedChain:
    return RecordedChain(
        _sizes(config),
        capture,
        max_k=max(1, config.speculative.k),
        columns=width,
        vocab=vocab,
        device=device,
        model=model,
        fused=config.draft_kernel == "triton",
    )
