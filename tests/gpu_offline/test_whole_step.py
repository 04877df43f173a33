"""A whole step of a GPU engine with the shapes of published models: draft, target forward, verification.

Checked with fake CUDA tensors: mixing of devices or element types raises, launches and blocking reads are counted.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_cuda import CUDA, PeakMemory, Recorder, fake_cuda
from fake_models import NUM_BLOCKS, fake_decoder, fake_eagle
from model_shapes import LLAMA_1B, LLAMA_8B, LLAMA_70B, QWEN3_8B
from torch._C._distributed_c10d import FakeProcessGroup

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weights import ShardSpec
from engine.config import CUDA_PAGE, EngineConfig
from engine.core.block_pool import BlockPool
from engine.core.packing import SpanRows, pack_spans
from engine.core.request import Request
from engine.core.step import Batch, Draft, DraftRow, ForwardResult, Span
from engine.core.verifier import Verifier
from engine.draft.architectures import EagleArchitecture, PlainArchitecture
from engine.draft.messages import DraftRequestRow, DraftResponseRow
from engine.draft.proposer import Proposer
from engine.messages import SamplingParams, Submit
from engine.model.collectives import Group
from engine.sampling.row_sampling import RowSampling
from engine.workers.memory_plan import activation_bytes

K = 5
LAYERS = {
    "llama": (LLAMA_8B, False, 17),
    "qwen3": (QWEN3_8B, False, 22),
    "llama fused": (LLAMA_8B, True, 11),
    "qwen3 fused": (QWEN3_8B, True, 11),
}
"""Launches per layer that may not grow."""
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=40, seed=3),
    SamplingParams(temperature=0.7, min_p=0.1, presence_penalty=0.5, num_logprobs=2),
]


class Event:
    """A CUDA event that has always happened."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True


@pytest.mark.parametrize("family", LAYERS)
def test_launches_per_layer(family: str) -> None:
    shape, fused, most = LAYERS[family]
    plan = pack_spans([SpanRows([1], 600, [1, 2, 3], 1), SpanRows([5], 10, [4], 1)], CUDA_PAGE)
    counts = []
    for num_layers in (1, 2):
        with fake_cuda() as recorder:
            decoder, caches = fake_decoder(shape, num_layers=num_layers, fused=fused)
            recorder.launches.clear()
            recorder.uploads = 0
            result = decoder.forward(plan, caches)
            assert result.logits is not None
            assert result.logits.device == CUDA
            counts.append(recorder.num_launches)
            assert recorder.num_reads == 0
            assert recorder.uploads <= 2
    assert counts[1] - counts[0] <= most


def batch_of(samplings: list[SamplingParams], k: int) -> Batch:
    """One decoding span per request, each in a block of its own."""
    spans = []
    for key, sampling in enumerate(samplings):
        request = Request(
            submit=Submit(request_id=str(key), prompt=(1, 2, 3), sampling=sampling),
            key=key,
            stream_key=key,
            tokens=[1, 2, 3, 4],
            num_computed=3,
            block_ids=[1 + key],
        )
        spans.append(Span(request, 3, 1, k, True, "plan"))
    return Batch(1, tuple(spans), 0)


@pytest.mark.parametrize("shape", [LLAMA_8B, QWEN3_8B], ids=["llama-8b", "qwen3-8b"])
@pytest.mark.parametrize("draft", ["none", "llama-1b", "eagle"])
def test_a_whole_step_waits_for_the_target_once(shape: dict[str, Any], draft: str) -> None:
    batch = batch_of(SAMPLINGS * 4, 0 if draft == "none" else K)
    with fake_cuda() as recorder:
        decoder, caches = fake_decoder(shape, num_layers=3, feature_layers=(0, 1, 2))
        drafted = Draft(tuple(DraftRow() for _ in batch.spans))
        if draft != "none":
            rows, probs = respond(draft, shape, batch, recorder)
            drafted = Draft(
                tuple(
                    DraftRow(row.token_ids, probs[place, : len(row.token_ids)] if row.has_probs else None)
                    for place, row in enumerate(rows)
                )
            )
            assert all(len(row.token_ids) == K for row in drafted.rows)
        recorder.reads.clear()

        def forward(plan: Any) -> ForwardResult:
            return decoder.forward(plan, caches)

        verdict = Verifier(forward, block_size=CUDA_PAGE).verify(batch, drafted)
        assert len(verdict.rows) == len(batch.spans)
        assert recorder.num_reads == 1, recorder.reads


def respond(
    kind: str, shape: dict[str, Any], batch: Batch, recorder: Recorder
) -> tuple[tuple[DraftResponseRow, ...], torch.Tensor]:
    """What a fake draft drafts for the batch; the host waits once per drafted position."""
    pool = BlockPool(NUM_BLOCKS, CUDA_PAGE, prefix_cache=False, ahead=1 if kind == "eagle" else 0)
    features = None
    if kind == "eagle":
        head, decoder, caches = fake_eagle(shape)
        model = Proposer(EagleArchitecture(head, decoder, caches), pool, vocab=None, max_model_len=4096)
        features = torch.empty(100, head.feature_width, dtype=torch.bfloat16, device=CUDA)
    else:
        draft_shape = LLAMA_1B | {"vocab_size": shape["vocab_size"]}
        plain, plain_caches = fake_decoder(draft_shape, num_layers=2)

        def forward(plan: Any) -> ForwardResult:
            return plain.forward(plan, plain_caches)

        model = Proposer(PlainArchitecture(forward), pool, vocab=None, max_model_len=4096)
    probs = torch.empty(len(batch.spans), K, shape["vocab_size"], device=CUDA)
    rows = [
        DraftRequestRow(
            span.request.key,
            0,
            (1, 2, 3),
            K,
            RowSampling(s.temperature, s.top_p, 1, 1, s.seed is not None, s.top_k, s.min_p),
            feature_rows=(-1, 0, 1) if kind == "eagle" else (),
        )
        for span in batch.spans
        for s in [span.request.submit.sampling]
    ]
    recorder.reads.clear()
    found = model.propose(rows, [], probs, features)
    assert recorder.num_reads == K, recorder.reads
    return found, probs


@pytest.mark.parametrize("fused", [False, True], ids=["torch", "triton"])
@pytest.mark.parametrize("rank", range(4))
def test_every_rank_of_70b_at_tp_4_computes_its_part(rank: int, fused: bool) -> None:
    group = Group(FakeProcessGroup._create_internal(rank, 4), rank=rank, size=4, device=CUDA, timeout_s=5.0)
    group._await_device = lambda: None  # type: ignore[method-assign]
    plan = pack_spans([SpanRows([1, 2], 600, [1, 2, 3], 1), SpanRows([5], 10, [4], 1)], CUDA_PAGE)
    with fake_cuda() as recorder:
        decoder, caches = fake_decoder(
            LLAMA_70B, num_layers=2, collectives=group, feature_layers=(0, 1) if rank == 0 else (), fused=fused
        )
        result = decoder.forward(plan, caches)
        assert decoder.num_kv_heads == 2
        assert recorder.num_reads == 0
        if rank > 0:
            assert result.logits is None
            return
        assert result.logits is not None
        assert result.hidden is not None
        assert tuple(result.logits.shape) == (2, LLAMA_70B["vocab_size"])
        assert tuple(result.hidden.shape) == (3, 2 * LLAMA_70B["hidden_size"])


@pytest.mark.parametrize("case", ["sampled", "scored"])
def test_the_plan_bounds_the_memory_of_a_step(case: str) -> None:
    """Peak of live tensors of a full step: all requests verify K drafts with top-p, or one long prompt is scored."""
    engine = EngineConfig.parse({"model": "m", "device": "cuda", "max_num_requests": 32, "max_step_tokens": 512})
    bound = activation_bytes(engine, ModelConfig.parse(LLAMA_8B), ShardSpec(0, 1), torch.bfloat16)
    with fake_cuda():
        decoder, caches = fake_decoder(LLAMA_8B, num_layers=2)
        if case == "sampled":
            batch = batch_of([SamplingParams(temperature=0.7, top_p=0.9, top_k=40, num_logprobs=2)] * 32, K)
            probs = torch.empty(32, K, LLAMA_8B["vocab_size"], device=CUDA)
            drafts = Draft(tuple(DraftRow((1,) * K, probs[row]) for row in range(32)))
        else:
            sampling = SamplingParams(temperature=0.0, num_prompt_logprobs=3, num_logprobs=3)
            request = Request(
                submit=Submit(request_id="r", prompt=(1,) * 512, sampling=sampling),
                key=1,
                stream_key=1,
                tokens=[1] * 512,
                block_ids=[1, 2],
            )
            batch = Batch(1, (Span(request, 0, 512, 0, True, "plan"),), 0)
            drafts = Draft((DraftRow(),))

        def forward(plan: Any) -> ForwardResult:
            return decoder.forward(plan, caches)

        with PeakMemory() as memory:
            Verifier(forward, block_size=CUDA_PAGE).verify(batch, drafts)
    assert bound / 6 < memory.peak < bound
