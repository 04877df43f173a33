"""A KV cache in FP8 (e4m3) on a GPU: one scale per token and KV head.

Promise: a value is off by at most half a step of its code. A whole step waits once, in every sampling mode, with chains
and trees, prompts included, with both decoders. The kernels themselves are checked by `test_kernels.py`.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import CUDA, fake_cuda
from fake_graphs import Guarded
from fake_models import fake_decoder
from fake_steps import MODES, K, batch_of, fake_shard, tree_draft, verifier_of
from model_shapes import LLAMA_8B, LLAMA_70B, QWEN3_8B
from tiny_models import VOCAB, random_cuts, run_cuts, write_model
from trees import random_parents

from engine.checkpoint.model_config import ModelConfig
from engine.config import CUDA_PAGE, EngineConfig
from engine.core.packing import SpanRows, cut_spans, pack_spans
from engine.core.step import Draft, DraftRow
from engine.errors import ConfigError
from engine.graphs.buckets import make_buckets
from engine.kernels import CUT_PACKED
from engine.messages import SamplingParams
from engine.model.attention import ReferenceAttention, make_attention
from engine.model.device import pick_kv_dtype
from engine.model.load import load_model
from engine.model.runner import ModelRunner, kv_bytes_per_token
from engine.quantization.kv_cache import FP8, INT8, SCALE_BYTES, dequantised, quantised
from engine.tree import ancestor_masks
from engine.workers.memory_plan import GIB, plan_memory

SETTINGS: dict[str, Any] = {"model": "m", "device": "cuda", "kv_cache_dtype": "fp8"}
TARGETS = {"llama-8b": (LLAMA_8B, 1), "qwen3-8b": (QWEN3_8B, 1), "llama-70b tp 4": (LLAMA_70B, 4)}
CLOSE = 0.15
"""Bound of the relative error of logits, in the 2-norm over all rows, of tiny random models."""


def test_a_value_is_off_by_half_a_step_at_most() -> None:
    """A code has four bits of a number at or above 1/64 of the scale, and steps of 1/512 of it below."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(50, 3, 64, generator=generator) * torch.logspace(-6, 6, 50)[:, None, None]
    values[7] = 0
    records = quantised(values, FP8)
    assert records.shape == (50, 3, 64 + SCALE_BYTES)
    assert records.dtype is FP8
    scale = values.abs().amax(-1, keepdim=True) / 448
    bound = torch.maximum(values.abs() / 16, scale / 1024) * 1.0001
    assert ((dequantised(records, torch.float32) - values).abs() <= bound).all()
    assert not dequantised(records, torch.float32)[7].any()
    assert torch.equal(records[11], quantised(values[11:12], FP8)[0]), "a record depends on its own row only"


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "mixtral"])
def test_logits_are_close_to_those_of_a_float_cache(tmp_path: Path, family: str) -> None:
    """The slow twin, with PyTorch's operators on a CPU. Less exact than int8, which has seven bits for each value."""
    model = load_model(write_model(tmp_path, family), dtype=torch.float32, kernel="torch")
    rng = random.Random(4)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (1, 16, 40, 90)]
    cuts = [random_cuts(rng, len(prompt), 30) for prompt in prompts]
    float_logits, int8_logits, fp8_logits = (
        torch.cat(run_cuts(ModelRunner(model, num_blocks=20, block_size=16, kv_dtype=dtype), prompts, cuts))
        for dtype in (None, INT8, FP8)
    )
    off = [float((found - float_logits).norm() / float_logits.norm()) for found in (int8_logits, fp8_logits)]
    assert 0 < off[0] < off[1] < CLOSE


@pytest.mark.parametrize("max_q", [1, 3, 8, 40])
def test_cut_spans_attend_to_what_whole_ones_do(max_q: int) -> None:
    """Prompts, decodes and trees of 1 to 17 nodes, some of which begin before the rows of their span."""
    rng = random.Random(max_q)
    block, generator = 16, torch.Generator().manual_seed(max_q)
    caches = [torch.randn(40, block, 2, 8, generator=generator) for _ in range(2)]
    for _ in range(5):
        spans = []
        for first in range(1, 37, 6):
            num_rows, nodes = rng.randint(1, 30), rng.choice((0, 0, 1, 5, 17))
            start = rng.randint(nodes, 50)
            masks = ancestor_masks(random_parents(rng, nodes))[-num_rows:] if nodes else []
            rows = SpanRows([1] * num_rows, start, list(range(first, first + 6)), 0, num_tree_slots=nodes)
            spans.append(SpanRows(*(rows.token_ids, start, rows.block_ids, 0), num_tree_slots=nodes, ancestors=masks))
        plan = pack_spans(spans, block)
        pieces = cut_spans(plan, max_q)
        assert pieces.q_lens.max() <= max_q
        assert pieces.q_lens.sum() == plan.q_lens.sum()
        query = torch.randn(len(plan.token_ids), 4, 8, generator=generator)
        whole, cut = (ReferenceAttention().attend(query, *caches, each) for each in (plan, pieces))
        assert torch.equal(whole, cut)


@pytest.mark.parametrize("kernel", ["torch", "triton"])
@pytest.mark.parametrize("target", TARGETS)
def test_a_step_waits_once(target: str, kernel: str) -> None:
    """Every mode in one step."""
    shape, tp = TARGETS[target]
    with fake_cuda() as recorder:
        shard = fake_shard(shape, tp=tp, feature_layers=(0, 1, 2), kernel=kernel, kv_cache_dtype="fp8")
        assert shard.runner.caches[0].keys.dtype is FP8
        assert shard.runner.caches[0].keys.shape[-1] == 128 + SCALE_BYTES
        batch = batch_of([SamplingParams(**mode) for mode in MODES.values()], K, vocab_size=shape["vocab_size"])
        drafts = Draft(tuple(DraftRow((ord("b"),) * (K if index % 2 else 0)) for index in range(len(MODES))))
        verify = verifier_of(shard, recorder).verify
        recorder.reads.clear()
        assert len(verify(batch, drafts).rows) == len(MODES)
        assert recorder.reads == {"event": 1}


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "recorded"])
def test_a_step_over_trees_waits_once(graphs: bool) -> None:
    with fake_cuda() as recorder:
        shard = fake_shard(LLAMA_8B, tree="auto", kernel="triton", kv_cache_dtype="fp8")
        if graphs:
            object.__setattr__(shard.config, "max_num_requests", 12)
            capture = Guarded(recorder)
            shard.record(capture)
            assert capture.num_recorded == len(make_buckets(max_requests=12, max_k=K, trees=True))
        batch = batch_of([SamplingParams(**mode) for mode in MODES.values()], K, vocab_size=LLAMA_8B["vocab_size"])
        verify = verifier_of(shard, recorder).verify
        recorder.reads.clear()
        assert len(verify(batch, tree_draft(len(MODES))).rows) == len(MODES)
        assert recorder.reads == {"event": 1}


@pytest.mark.parametrize(("fused", "most"), [(True, 11), (False, 34)])
def test_launches_per_layer(fused: bool, most: int) -> None:
    """A prompt, a decode and a verification in one forward; with PyTorch's operators records take launches of their
    own."""
    plan = pack_spans(
        [SpanRows([1] * 300, 0, [1, 2], 1), SpanRows([1], 600, [3, 4, 5], 1), SpanRows([5] * 6, 10, [6], 6)], CUDA_PAGE
    )
    counts = []
    for num_layers in (1, 2):
        with fake_cuda() as recorder:
            decoder, caches = fake_decoder(LLAMA_8B, num_layers=num_layers, fused=fused, fp8_cache=True)
            recorder.launches.clear()
            recorder.uploads = 0
            assert decoder.forward(plan, caches).require_logits().shape[0] == 8
            counts.append(recorder.num_launches)
            assert recorder.num_reads == 0
            assert recorder.uploads <= 2
    assert counts[1] - counts[0] <= most


def test_recorded_spans_that_no_program_takes_are_refused_at_start() -> None:
    """70B has 8 query heads per KV head, so that a program takes 8 rows."""
    with fake_cuda() as recorder:
        shard = fake_shard(LLAMA_70B, tp=4, kv_cache_dtype="fp8", speculative={"k": CUT_PACKED // 8})
        with pytest.raises(ConfigError, match=r"takes 8 rows per request of this model, and speculative\.k makes 9"):
            shard.record(Guarded(recorder))


def test_the_memory_plan_knows_the_records() -> None:
    shape = ModelConfig.parse(LLAMA_8B)
    plans = {
        dtype: plan_memory(
            EngineConfig.parse(SETTINGS | {"kv_cache_dtype": dtype}), shape, rank=0, device_bytes=80 * GIB
        )
        for dtype in ("auto", "fp8")
    }
    per_token = {dtype: plan.kv_bytes_per_token for dtype, plan in plans.items()}
    assert per_token == {"auto": 2 * 32 * 8 * 256, "fp8": 2 * 32 * 8 * 132}
    assert kv_bytes_per_token(shape, dtype=FP8) == per_token["fp8"]
    assert 1.9 < plans["fp8"].kv_tokens / plans["auto"].kv_tokens < 256 / 132


def test_settings_and_what_they_refuse(tmp_path: Path) -> None:
    assert pick_kv_dtype(EngineConfig.parse(SETTINGS), torch.bfloat16) is FP8
    for wrong, message in (
        ({"device": "cpu"}, "kv_cache_dtype: fp8 given, but device is cpu; allowed there are auto and int8"),
        ({"dtype": "float32"}, "kv_cache_dtype: fp8 given, but dtype is float32"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype: int8 given, but device is cuda; allowed there are auto and fp8"),
    ):
        with pytest.raises(ConfigError, match=message):
            EngineConfig.parse(SETTINGS | wrong)
    with pytest.raises(ConfigError, match="layers of this model have a window"):
        make_attention("auto", group_size=4, dtype=torch.bfloat16, device=CUDA, window=9, fp8_cache=True)
    folder = write_model(tmp_path, "llama", head_dim=12)
    with pytest.raises(ConfigError, match="heads of a power of two, not 12"):
        load_model(folder, kernel="torch", fp8_cache=True)
