"""The forward of a GPU engine with the shapes of published models, on every rank, and the memory of a step.

Checked with fake CUDA tensors: mixing of devices or element types raises, launches and blocking reads are counted.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_cuda import CUDA, PeakMemory, fake_cuda
from fake_models import fake_decoder
from fake_steps import K, batch_of
from model_shapes import LLAMA_8B, LLAMA_70B, QWEN3_8B
from torch._C._distributed_c10d import FakeProcessGroup

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weights import WHOLE, ShardSpec
from engine.config import CUDA_PAGE, EngineConfig
from engine.core.packing import SpanRows, pack_spans
from engine.core.request import Request
from engine.core.step import Batch, Draft, DraftRow, ForwardResult, Span
from engine.core.verifier import Verifier
from engine.lora.adapter_set import AdapterSet
from engine.lora.layers import LowRank, OutputPart
from engine.messages import SamplingParams, Submit
from engine.model.collectives import Group
from engine.workers.memory_plan import activation_bytes

LAYERS: dict[str, tuple[dict[str, Any], dict[str, bool], int]] = {
    "llama": (LLAMA_8B, {}, 17),
    "qwen3": (QWEN3_8B, {}, 22),
    "llama fused": (LLAMA_8B, {"fused": True}, 11),
    "qwen3 fused": (QWEN3_8B, {"fused": True}, 11),
    "llama invariant": (LLAMA_8B, {"invariant": True}, 11),
    "qwen3 invariant": (QWEN3_8B, {"invariant": True}, 11),
}
"""Launches per layer that may not grow."""


@pytest.mark.parametrize("family", LAYERS)
def test_launches_per_layer(family: str) -> None:
    shape, kind, most = LAYERS[family]
    plan = pack_spans([SpanRows([1], 600, [1, 2, 3], 1), SpanRows([5], 10, [4], 1)], CUDA_PAGE)
    counts = []
    for num_layers in (1, 2):
        with fake_cuda() as recorder:
            decoder, caches = fake_decoder(shape, num_layers=num_layers, **kind)
            recorder.launches.clear()
            recorder.uploads = 0
            result = decoder.forward(plan, caches)
            assert result.logits is not None
            assert result.logits.device == CUDA
            counts.append(recorder.num_launches)
            assert recorder.num_reads == 0
            assert recorder.uploads <= 2
    assert counts[1] - counts[0] <= most


@pytest.mark.parametrize("fused", [False, True], ids=["torch", "triton"])
@pytest.mark.parametrize("rank", range(4))
def test_every_rank_of_70b_at_tp_4_computes_its_part(rank: int, fused: bool) -> None:
    group = Group(FakeProcessGroup._create_internal(rank, 4), rank=rank, size=4, device=CUDA, timeout_s=5.0)
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


def test_a_forward_with_adapters_reads_nothing() -> None:
    """Two adapters and the base model in one forward; the groups of rows are one more upload."""
    rank = 8
    spans = [SpanRows([1, 2], 600, [1, 2, 3], 2, adapter=1), SpanRows([5], 10, [4], 1, adapter=2)]
    plan = pack_spans([*spans, SpanRows([6], 3, [5], 1)], CUDA_PAGE)
    with fake_cuda() as recorder:
        decoder, caches = fake_decoder(LLAMA_8B, num_layers=2)
        adapters = AdapterSet(dtype=torch.bfloat16, device=CUDA)
        decoder._weights = adapters.wrap(decoder.config, WHOLE, decoder._weights)
        for linear, _ in adapters._layers:
            base: Any = linear.base
            outputs, inputs = base.weight.shape
            a, b = (torch.empty(*size, dtype=torch.bfloat16, device=CUDA) for size in ((rank, inputs), (outputs, rank)))
            part = OutputPart(b, slice(0, outputs), slice(0, rank))
            linear.adapters |= {number: LowRank(a, (part,)) for number in (1, 2)}
        adapters._loaded |= {1, 2}
        recorder.uploads = 0
        recorder.reads.clear()
        adapters.choose(plan)
        assert decoder.forward(plan, caches).require_logits().shape == (4, LLAMA_8B["vocab_size"])
        assert recorder.num_reads == 0
        assert recorder.uploads <= 3


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
