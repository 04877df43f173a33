"""Recorded forwards: padded replay equals the eager forward, on memory that never moves, without a read or an upload.

Values are compared on CPU tensors, through the contract of paged flash attention and a recording that keeps the
function and its static memory. What a recording may not do on a GPU is counted with fake CUDA tensors. No CUDA graph
exists here.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
import varlen_contract
from fake_cuda import CUDA, fake_cuda
from fake_graphs import Guarded, Recording
from fake_models import NUM_BLOCKS, fake_decoder, fake_eagle
from fake_steps import MODES, K, batch_of, fake_shard, verifier_of
from hypothesis import given
from hypothesis import strategies as st
from model_shapes import LLAMA_8B, LLAMA_70B, QWEN3_8B
from tiny_models import VOCAB, write_model

from bench.gpu.lab import SpanAttention
from engine.config import CUDA_PAGE
from engine.core.packing import SpanRows, pack_spans
from engine.core.step import Draft, DraftRow, ForwardInput
from engine.draft.architectures import EagleArchitecture
from engine.graphs.buckets import SIZES, Bucket, find_bucket, make_buckets, row_sizes
from engine.graphs.forward import GraphedForward
from engine.graphs.static_memory import fill_spans
from engine.messages import SamplingParams
from engine.model.attention_varlen import VarlenAttention
from engine.model.decoder import Decoder
from engine.model.eagle_head import EagleHead
from engine.model.layers import PlainLinear, RmsNorm
from engine.model.load import load_model
from engine.model.runner import ModelRunner

CPU = torch.device("cpu")
MAX_KV = 3 * CUDA_PAGE


def spans_of(num: int, max_q: int) -> ForwardInput:
    return pack_spans([SpanRows([1] * max_q, 5, [1 + i], max_q) for i in range(num)], CUDA_PAGE)


@given(st.integers(1, 64), st.integers(0, 8), st.data())
def test_the_smallest_bucket_that_holds_a_step_is_taken(max_requests: int, max_k: int, data: st.DataObject) -> None:
    buckets = make_buckets(max_requests=max_requests, max_k=max_k)
    q_lens = data.draw(st.lists(st.integers(1, max_k + 1), min_size=1, max_size=max_requests))
    spans = [SpanRows([1] * length, 5, [1 + i], length) for i, length in enumerate(q_lens)]
    found = find_bucket(buckets, pack_spans(spans, CUDA_PAGE))
    rows = sum(q_lens)
    if rows > SIZES[-1]:
        assert found is None
        return
    assert found is not None
    assert found.rows >= rows
    assert found.spans >= len(q_lens)
    assert found.max_q >= max(q_lens)
    assert (found.max_q == 1) == (max(q_lens) == 1)
    assert found.rows == min(size for size in row_sizes(buckets) if size >= rows), "the cost model's padding"
    assert found.rows <= max(rows + 1, 1.5 * rows)


def test_prefill_and_scored_prompts_are_not_replayed() -> None:
    buckets = make_buckets(max_requests=8, max_k=3)
    assert find_bucket(buckets, pack_spans([SpanRows([1] * 4, 0, [1], 1)], CUDA_PAGE)) is None
    assert find_bucket(buckets, spans_of(2, 5)) is None
    assert find_bucket(buckets, spans_of(2, 4)) == Bucket(8, 8, 4)


def tiny(folder: Path, family: str) -> tuple[ModelRunner, ModelRunner]:
    """Two runners of one bfloat16 model with paged flash attention, each with a cache of its own."""
    varlen_contract.register()
    model = load_model(write_model(folder / "m", family), dtype=torch.bfloat16, kernel="reference")
    assert isinstance(model, Decoder)
    model._attention = {0: VarlenAttention(device=CPU)}
    model.feature_layers = (0, 2)
    eager, graphed = (ModelRunner(model, num_blocks=40, block_size=CUDA_PAGE) for _ in range(2))
    return eager, graphed


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@torch.inference_mode()
def test_padded_replay_gives_the_eager_result(family: str, tmp_path: Path) -> None:
    eager, runner = tiny(tmp_path, family)
    capture = Recording()
    graphs = GraphedForward(runner, make_buckets(max_requests=6, max_k=3), capture, max_kv=MAX_KV, max_ids=24)
    rng = random.Random(3)
    texts = [[rng.randrange(VOCAB) for _ in range(rng.choice([3, 250, 255, 300, 511]))] for _ in range(6)]
    blocks = [[1 + 3 * i, 2 + 3 * i, 3 + 3 * i] for i in range(6)]
    prefill = pack_spans([SpanRows(text, 0, owned, 1) for text, owned in zip(texts, blocks, strict=True)], CUDA_PAGE)
    for forward in (eager.forward, graphs.forward):
        forward(prefill)
    assert capture.num_replays == 0
    addresses: set[int] = set()
    for step in range(12):
        members = rng.sample(range(6), rng.randint(1, 6))
        longest = 1 if step % 3 == 0 else 4
        news = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))] for _ in members]
        spans = [SpanRows(new, len(texts[i]), blocks[i], len(new)) for i, new in zip(members, news, strict=True)]
        expected, found = eager.forward(pack_spans(spans, CUDA_PAGE)), graphs.forward(pack_spans(spans, CUDA_PAGE))
        assert capture.num_replays == step + 1
        assert found.most_likely is not None
        assert torch.equal(found.most_likely, found.require_logits().argmax(-1))
        for one, other in ((found.require_logits(), expected.require_logits()), (found.hidden, expected.hidden)):
            assert one is not None
            assert other is not None
            assert one.shape == other.shape
            assert torch.isfinite(one).all()
            assert (one.float() - other.float()).abs().max() <= 0.03 * other.float().abs().max()
        addresses |= {found.require_logits().data_ptr()}
        for i, new in zip(members, news, strict=True):
            kept = rng.randint(1, len(new))  # The rest is rejected: the next step writes its slots again.
            texts[i] += new[:kept]
    assert len(addresses) == 1
    for mine, theirs in zip(runner.caches, eager.caches, strict=True):
        for i, text in enumerate(texts):
            for one, other in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
                slots = [cache[blocks[i]].flatten(0, 1)[: len(text)].float() for cache in (one, other)]
                assert (slots[0] - slots[1]).abs().max() <= 0.03 * slots[1].abs().max()


@torch.inference_mode()
def test_ids_on_the_device_are_gathered_by_the_recording(tmp_path: Path) -> None:
    eager, runner = tiny(tmp_path, "llama")
    graphs = GraphedForward(runner, make_buckets(max_requests=2, max_k=3), Recording(), max_kv=MAX_KV, max_ids=8)
    ids = torch.tensor([0, 9, 8, 7, 0, 6])
    known = [SpanRows([5, 9, 8, 7], 0, [1], 4), SpanRows([4, 6], 0, [2], 2)]
    unknown = [
        SpanRows([5, 0, 0, 0], 0, [1], 4, places=(-1, 1, 2, 3)),
        SpanRows([4, 0], 0, [2], 2, places=(-1, 5)),
    ]
    expected = eager.forward(pack_spans(known, CUDA_PAGE)).require_logits()
    for forward in (graphs.forward, eager.forward):
        found = forward(pack_spans(unknown, CUDA_PAGE, ids)).require_logits()
        assert (found - expected).abs().max() <= 0.03 * expected.abs().max()


@torch.inference_mode()
def test_drafted_tokens_of_a_recorded_eagle_draft_are_those_of_the_eager_one(tmp_path: Path) -> None:
    model = load_model(write_model(tmp_path / "m", "llama"), dtype=torch.float32, kernel="reference")
    assert isinstance(model, Decoder)
    model._attention = {0: SpanAttention(device=CPU)}
    model.feature_layers = (2,)
    size, generator = model.config.hidden_size, torch.Generator().manual_seed(1)

    def linear(columns: int) -> PlainLinear:
        return PlainLinear(torch.randn(size, columns, generator=generator) * columns**-0.5)

    norms = [RmsNorm(torch.ones(size), 1e-5) for _ in range(2)]
    head = EagleHead(torch.ones(1, size), linear(size), norms[0], linear(size), norms[1], linear(size), 1e-5)
    runners = [ModelRunner(model, num_blocks=8, block_size=CUDA_PAGE) for _ in range(2)]
    eager, recorded = (EagleArchitecture(head, model, runner.caches) for runner in runners)
    capture = Recording()
    recorded.record(runners[1], make_buckets(max_requests=4, max_k=0), capture, max_kv=MAX_KV)
    hidden = [torch.randn(3, size, generator=generator)] * 2
    for position in range(4):
        chosen = torch.randint(0, VOCAB, (3,), generator=generator)
        spans = [SpanRows((0,), position, [1 + i], 1, (position + 1,), places=(i,)) for i in range(3)]
        plan = pack_spans(spans, CUDA_PAGE, chosen)
        outputs = [
            architecture.compute_drafted(plan, before)
            for architecture, before in zip((eager, recorded), hidden, strict=True)
        ]
        for name in ("logits", "previous_hidden"):
            expected, found = (getattr(each, name) for each in outputs)
            assert (found - expected).abs().max() < 1e-4
        hidden = [each.previous_hidden for each in outputs]
    assert capture.num_replays == 4
    spans = [SpanRows((0,), 0, [1 + i], 1, (1,), places=(i,)) for i in range(5)]
    plan, before = pack_spans(spans, CUDA_PAGE, torch.arange(5)), torch.randn(5, size, generator=generator)
    expected, found = (each.compute_drafted(plan, before).logits for each in (eager, recorded))
    assert torch.equal(found, expected)
    assert capture.num_replays == 4, "no recording holds five rows"


@pytest.mark.parametrize("target", ["llama-8b", "qwen3-8b", "llama-70b tp 4"])
def test_a_step_over_recordings_waits_once_and_uploads_them_once(target: str) -> None:
    shape, tp = {"llama-8b": (LLAMA_8B, 1), "qwen3-8b": (QWEN3_8B, 1), "llama-70b tp 4": (LLAMA_70B, 4)}[target]
    with fake_cuda() as recorder:
        shard = fake_shard(shape, tp=tp, feature_layers=(0, 1, 2))
        object.__setattr__(shard.config, "max_num_requests", 12)
        capture = Guarded(recorder)
        shard.record(capture)
        assert capture.num_recorded == len(make_buckets(max_requests=12, max_k=K))
        assert shard.padded_rows[-1] == 12 * (K + 1)
        rows = [SpanRows([1] * (K + 1), 5, [1], K + 1, places=(-1, *range(i * K, (i + 1) * K))) for i in range(12)]
        known = torch.zeros(12 * K, dtype=torch.int64, device=CUDA)  # every draft token that there can be
        assert len(shard.forward(pack_spans(rows, CUDA_PAGE, known)).require_logits()) == 12 * (K + 1)
        batch = batch_of([SamplingParams(**mode) for mode in MODES.values()], K, vocab_size=shape["vocab_size"])
        draft = Draft(tuple(DraftRow((ord("b"),) * K) for _ in batch.spans))
        verify = verifier_of(shard, recorder).verify
        recorder.reads.clear()
        verdict = verify(batch, draft)
        assert verdict.features is not None
        assert recorder.reads == {"event": 1}


def test_a_recorded_eagle_draft_neither_reads_nor_uploads_inside() -> None:
    with fake_cuda() as recorder:
        head, decoder, _ = fake_eagle(LLAMA_8B)
        runner = ModelRunner(decoder, num_blocks=NUM_BLOCKS, block_size=CUDA_PAGE)
        eagle = EagleArchitecture(head, decoder, runner.caches)
        eagle.record(runner, make_buckets(max_requests=4, max_k=0), Guarded(recorder), max_kv=MAX_KV)
        hidden = torch.zeros(3, LLAMA_8B["hidden_size"], dtype=torch.bfloat16, device=CUDA)
        recorder.uploads = 0
        plan = pack_spans(
            [SpanRows((0,), 5, [1 + i], 1, places=(i,)) for i in range(3)],
            CUDA_PAGE,
            torch.zeros(3, dtype=torch.int64, device=CUDA),
        )
        assert len(eagle.compute_drafted(plan, hidden).logits) == 3
        assert recorder.uploads == 1
        assert recorder.num_reads == 0


@pytest.mark.parametrize("fused", [False, True], ids=["torch", "triton"])
def test_a_replay_uploads_once(fused: bool) -> None:
    with fake_cuda() as recorder:
        decoder, _ = fake_decoder(LLAMA_8B, num_layers=2, fused=fused)
        runner = ModelRunner(decoder, num_blocks=NUM_BLOCKS, block_size=CUDA_PAGE)
        graphs = GraphedForward(
            runner, make_buckets(max_requests=4, max_k=3), Guarded(recorder), max_kv=MAX_KV, max_ids=16
        )
        recorder.uploads = 0
        recorder.reads.clear()
        ids = torch.zeros(12, dtype=torch.int64, device=CUDA)
        spans = [SpanRows([1, 0], 600, [1, 2, 3], 2, places=(-1, 0)), SpanRows([5], 10, [4], 1)]
        result = graphs.forward(pack_spans(spans, CUDA_PAGE, ids))
        assert tuple(result.require_logits().shape) == (3, LLAMA_8B["vocab_size"])
        assert recorder.uploads == 1
        assert recorder.num_reads == 0


def test_padding_is_in_the_scratch_block_and_each_padding_span_has_one_row() -> None:
    shapes = dict.fromkeys(("token_ids", "positions", "slots", "places", "cu_q", "cu_kv"), (4,))
    arrays = {name: np.full(shape, 99) for name, shape in (shapes | {"kv_lens": (3,), "block_tables": (3, 2)}).items()}
    forward_input = pack_spans([SpanRows([7, 8], CUDA_PAGE + 3, [5, 2], 2)], CUDA_PAGE)
    fill_spans(arrays, forward_input, Bucket(4, 3, 2))
    first = 2 * CUDA_PAGE + 3
    assert {name: array.tolist() for name, array in arrays.items()} == {
        "token_ids": [7, 8, 0, 0],
        "positions": [CUDA_PAGE + 3, CUDA_PAGE + 4, 0, 0],
        "slots": [first, first + 1, 0, 0],
        "places": [-1] * 4,
        "kv_lens": [CUDA_PAGE + 5, 1, 1],
        "cu_q": [0, 2, 3, 4],
        "cu_kv": [0, CUDA_PAGE + 5, CUDA_PAGE + 6, CUDA_PAGE + 7],
        "block_tables": [[5, 2], [0, 0], [0, 0]],
    }


def test_padding_is_never_dear() -> None:
    sizes = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]
    assert list(row_sizes(make_buckets(max_requests=512, max_k=0))) == sizes
    assert np.max(np.array(SIZES[2:]) / np.array(SIZES[1:-1])) <= 1.5
