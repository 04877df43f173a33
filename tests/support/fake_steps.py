"""Steps of a GPU engine on a fake CUDA device: a shard of a target, batches in every sampling mode, and their drafts.

Use them inside `fake_cuda.fake_cuda()`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import xgrammar
from byte_grammar import BYTE_VOCAB, END
from fake_cuda import CUDA, Recorder
from fake_models import NUM_BLOCKS, fake_decoder, fake_eagle, fake_medusa
from model_shapes import LLAMA_1B
from torch._C._distributed_c10d import FakeProcessGroup

from engine.config import CUDA_PAGE, EngineConfig
from engine.core.block_pool import BlockPool
from engine.core.request import Request
from engine.core.step import Batch, Draft, DraftRow, ForwardResult, Span
from engine.core.verifier import Verifier
from engine.draft.architectures import EagleArchitecture, PlainArchitecture
from engine.draft.messages import DraftRequestRow
from engine.draft.parallel import ParallelEagleArchitecture
from engine.draft.proposer import Proposer
from engine.medusa.architecture import MedusaArchitecture
from engine.messages import GrammarSpec, SamplingParams, Submit
from engine.model.collectives import Group
from engine.sampling.grammar import Grammars
from engine.sampling.logits_processor import LogitsProcessor
from engine.sampling.penalties import TokenOptions
from engine.sampling.row_sampling import RowSampling
from engine.workers.target_shard import TargetShard

K = 5
EAGLES = ("eagle", "parallel")
"""Kinds of drafts that read features."""
UNMASKED_MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "top_p": {"temperature": 0.7, "top_p": 0.9},
    "top_k and min_p": {"temperature": 0.7, "top_k": 40, "min_p": 0.05},
    "seeded": {"temperature": 1.0, "top_p": 0.9, "seed": 1},
    "penalties and bias": {"presence_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": ((7, 2.0),)},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": (2, 3)},
    "logprobs": {"temperature": 0.0, "num_logprobs": 5},
    "sampled logprobs": {"temperature": 1.0, "num_logprobs": 5, "num_prompt_logprobs": 3},
}
"""Sampling parameters of every mode without a grammar."""
MODES: dict[str, dict[str, Any]] = UNMASKED_MODES | {
    "grammar": {"temperature": 0.0, "grammar": GrammarSpec(kind="regex", text="[ab]+")},
    "sampled grammar": {"temperature": 0.8, "grammar": GrammarSpec(kind="regex", text="[ab]+"), "min_tokens": 3},
}
"""Sampling parameters of every mode."""


def fake_shard(
    shape: dict[str, Any],
    *,
    tp: int = 1,
    rank: int = 0,
    feature_layers: tuple[int, ...] = (),
    tree: str = "off",
    **settings: Any,
) -> TargetShard:
    """A shard of a target of this shape with three layers, as after `allocate`. Settings are those of the engine."""
    config = EngineConfig.parse(
        {"model": "m", "device": "cuda", "tensor_parallel_size": tp, "kernel": "torch"}
        | {"speculative": {"tree": tree}}
        | settings
    )
    shard = TargetShard(config, Path("m"), rank=rank, node_id="n", feature_layers=feature_layers, device=CUDA)
    if tp > 1:
        backend = FakeProcessGroup._create_internal(rank, tp)
        shard._collectives = Group(backend, rank=rank, size=tp, device=CUDA, timeout_s=5.0)
    shard._model, _ = fake_decoder(
        shape,
        num_layers=3,
        collectives=shard._collectives,
        feature_layers=shard.feature_layers,
        fused=config.kernel == "triton",
        invariant=config.kernel == "invariant",
        fp8_cache=config.kv_cache_dtype == "fp8",
    )
    shard.allocate(NUM_BLOCKS, 4096)
    return shard


def verifier_of(shard: TargetShard, recorder: Recorder) -> Verifier:
    """The verify phase of a leader of this shard."""
    return Verifier(shard.forward, block_size=CUDA_PAGE, clock=shard.step_clock(recorder.event))


def batch_of(samplings: list[SamplingParams], k: int, *, vocab_size: int | None = None, samples: bool = True) -> Batch:
    """One decoding span per request, each in a block of its own. Grammars need `vocab_size`."""
    grammars = Grammars(lambda: xgrammar.TokenizerInfo(BYTE_VOCAB, vocab_size=vocab_size, stop_token_ids=[END]))
    spans = []
    for key, sampling in enumerate(samplings):
        request = Request(
            submit=Submit(request_id=str(key), prompt=(1, 2, 3), sampling=sampling),
            key=key,
            stream_key=key,
            tokens=[1, 2, 3, ord("a")],
            num_computed=3,
            block_ids=[1 + key],
        )
        options = TokenOptions.of(sampling, 3)
        request.logits_processor = LogitsProcessor.make(options, grammars) if options is not None else None
        spans.append(Span(request, 3, 1, k, samples, "plan"))
    return Batch(1, tuple(spans), 0)


def tree_draft(num: int) -> Draft:
    """Drafts of two paths, as prompt lookup makes them; every third one is a chain."""
    return Draft(
        tuple(DraftRow((ord("b"),) * K, parents=() if index % 3 == 2 else (-1, 0, 1, -1, 3)) for index in range(num))
    )


def fake_proposer(kind: str, shape: dict[str, Any], **options: Any) -> tuple[Proposer, torch.Tensor | None]:
    """A draft of a target of this shape, and the target's features that it reads."""
    pool = BlockPool(NUM_BLOCKS, CUDA_PAGE, prefix_cache=False, ahead=1 if kind in EAGLES else 0)
    if kind == "medusa":
        features = torch.empty(100, shape["hidden_size"], dtype=torch.bfloat16, device=CUDA)
        heads = MedusaArchitecture(fake_medusa(shape, num_heads=K))
        return Proposer(heads, pool, vocab=None, max_model_len=4096, **options), features
    if kind in EAGLES:
        head, decoder, caches = fake_eagle(shape, is_parallel=kind == "parallel")
        features = torch.empty(100, head.feature_width, dtype=torch.bfloat16, device=CUDA)
        eagle = EagleArchitecture(head, decoder, caches)
        if kind == "parallel":
            eagle = ParallelEagleArchitecture(head, decoder, caches, positions_per_pass=K)
        return Proposer(eagle, pool, vocab=None, max_model_len=4096, **options), features
    plain, plain_caches = fake_decoder(LLAMA_1B | {"vocab_size": shape["vocab_size"]}, num_layers=2)

    def forward(plan: Any) -> ForwardResult:
        return plain.forward(plan, plain_caches)

    return Proposer(PlainArchitecture(forward), pool, vocab=None, max_model_len=4096, **options), None


def request_rows(kind: str, batch: Batch, k: int = K) -> list[DraftRequestRow]:
    """The first draft request of a batch."""
    return [
        DraftRequestRow(
            span.request.key,
            0,
            (1, 2, 3),
            k,
            RowSampling(s.temperature, s.top_p, 1, 1, s.seed is not None, s.top_k, s.min_p),
            feature_rows=(-1, 0, 1) if kind in (*EAGLES, "medusa") else (),
        )
        for span in batch.spans
        for s in [span.request.submit.sampling]
    ]
