"""A shard of a GPU measures its largest step at start, and its KV cache takes what that leaves.

Checked with fake CUDA tensors: the real shard runs the real step, and the fake memory counts the tensors that live.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from fake_cuda import CUDA, PeakMemory, fake_cuda
from fake_memory import FakeMemory
from fake_steps import fake_shard
from model_shapes import LLAMA_8B, LLAMA_70B

from engine.checkpoint.model_config import ModelConfig
from engine.config import CUDA_PAGE, EngineConfig
from engine.core.packing import pack_step
from engine.errors import ConfigError
from engine.model.attention import make_attention
from engine.model.runner import kv_bytes_per_token
from engine.workers.largest_step import LargestStep
from engine.workers.memory_plan import (
    CONTEXT_BYTES,
    GIB,
    RESERVE_FRACTION,
    activation_bytes,
    draft_graph_bytes,
    draft_process_bytes,
    weight_bytes,
)
from engine.workers.target_shard import TargetShard

DRAFT = {"speculative": {"draft": "d", "k": 4}}
CASES: dict[str, dict[str, Any]] = {
    "plain": {"speculative": {"method": "none"}},
    "lookup": {"speculative": {"k": 4}},
    "draft": DRAFT,
    "full of decodes": {"max_num_requests": 100, "max_step_tokens": 500, **DRAFT},
    "one request": {"max_num_requests": 1, **DRAFT},
    "short context": {"max_model_len": 64, **DRAFT},
}
SMALL = {"model": "m", "device": "cuda", "max_num_requests": 16, "max_step_tokens": 300}


def settings(**changes: Any) -> EngineConfig:
    return EngineConfig.parse(SMALL | changes)


@pytest.mark.parametrize("case", CASES)
def test_the_largest_step_takes_every_row_that_the_scheduler_may_give(case: str) -> None:
    engine = settings(**CASES[case])
    config = ModelConfig.parse(LLAMA_8B)
    with fake_cuda():
        step = LargestStep(engine, config, CUDA, rank=0)
    spans = step.batch.spans
    rows = sum(span.num_tokens + span.k for span in spans)
    assert rows == engine.max_step_tokens or len(spans) == engine.max_num_requests
    assert len(spans) <= engine.max_num_requests
    assert len({len(row.token_ids) for row in step.draft.rows}) <= 2
    with_probs = [row for row in step.draft.rows if row.probs is not None]
    assert bool(with_probs) == (case in ("draft", "full of decodes", "short context"))
    forward = pack_step(step.batch, step.draft, engine.kv_block_size)
    assert len(forward.logit_rows) == len(forward.token_ids) == rows
    longest = min(engine.max_model_len or config.max_model_len, config.max_model_len)
    assert longest - 1 <= forward.kv_lens.max() <= longest
    assert set(forward.slots // engine.kv_block_size) == {1}


def test_the_largest_step_of_a_model_of_few_tokens() -> None:
    config = ModelConfig.parse(LLAMA_8B | {"vocab_size": 9})
    step = LargestStep(settings(), config, torch.device("cpu"), rank=0)
    assert {span.request.submit.sampling.num_prompt_logprobs for span in step.batch.spans} == {9}


def measured(
    shape: dict[str, Any], engine: dict[str, Any], *, device_bytes: int, rank: int = 0, of_others: int = 0
) -> tuple[int, TargetShard, FakeMemory]:
    """Blocks that a shard finds; the shard; and the memory, in which nothing but the weights is left."""
    with fake_cuda() as recorder, PeakMemory() as tensors:
        shard = fake_shard(shape, rank=rank, **SMALL | engine | {"cuda_graphs": "off"})
        object.__setattr__(shard.config, "cuda_graphs", engine.get("cuda_graphs", "off"))  # Nothing is recorded here.
        del shard.runner
        memory = FakeMemory(tensors, device_bytes=device_bytes, taken_bytes=CONTEXT_BYTES + of_others)
        memory.give_back()
        weights = memory.allocated()
        blocks = shard.measure(memory, recorder.event)
        assert memory.allocated() == weights
        model = shard._model
        assert 0 <= weights - weight_bytes(model.config, model.shard, model.dtype) < 1024, "frequencies of the rotation"
        return blocks, shard, memory


@pytest.mark.parametrize("case", CASES)
def test_the_cache_takes_what_the_largest_step_leaves(case: str) -> None:
    """The share and the context of a draft, its buffer and the reserve are still estimates."""
    device = 24 * GIB
    blocks, shard, memory = measured(LLAMA_8B, CASES[case], device_bytes=device)
    engine, config, weights = shard.config, shard._model.config, memory.allocated()
    peak = memory.last_peak - weights - step_bytes(engine, config)
    of_draft = 0
    if engine.speculative.method == "draft_model":
        of_draft = CONTEXT_BYTES + int(device * 0.1) + 4 * engine.max_num_requests * 4 * config.vocab_size
    left = device - CONTEXT_BYTES - weights - peak - of_draft - int(device * RESERVE_FRACTION)
    assert blocks == 1 + left // (CUDA_PAGE * kv_bytes_per_token(config))
    bound = activation_bytes(engine, config, shard._model.shard, torch.bfloat16)
    assert bound / 5 < peak < bound, "the estimate adds what is not held at once"


def step_bytes(engine: EngineConfig, config: ModelConfig) -> int:
    """What the step is measured with: two KV blocks, and distributions of drafts, which have a part of their own."""
    with fake_cuda():
        probs = next(
            (row.probs for row in LargestStep(engine, config, CUDA, rank=0).draft.rows if row.probs is not None), None
        )
        distributions = 0 if probs is None else probs.untyped_storage().nbytes()
    return distributions + 2 * CUDA_PAGE * kv_bytes_per_token(config)


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_what_the_draft_holds_already_is_taken_off_once(graphs: str) -> None:
    """It loads at the same time. What others hold beyond the most that a draft can is not there for the cache."""
    engine = {**DRAFT, "max_num_requests": 8, "cuda_graphs": graphs}
    device = 24 * GIB
    config = ModelConfig.parse(LLAMA_8B)
    most = draft_process_bytes(settings(**engine), config, rank=0, device_bytes=device)
    of_graphs = draft_graph_bytes(settings(**engine), config) if graphs == "on" else 0
    assert most == CONTEXT_BYTES + int(device * 0.1) + of_graphs
    found = [measured(LLAMA_8B, engine, device_bytes=device, of_others=held)[0] for held in (0, GIB, most, most + GIB)]
    assert found[0] == found[1] == found[2]
    per_block = CUDA_PAGE * kv_bytes_per_token(config) * 3 // 32
    assert found[2] - found[3] == pytest.approx(GIB * (1 - 0.1 - RESERVE_FRACTION) / per_block, abs=2)
    assert draft_process_bytes(settings(), config, rank=0, device_bytes=device) == 0
    assert draft_process_bytes(settings(**engine), config, rank=1, device_bytes=device) == 0


def test_a_further_rank_measures_its_own_part() -> None:
    """It does not sample. NCCL has its memory by then and is not taken off again."""
    settings = {"tp": 4, "max_model_len": 8192, **DRAFT}
    blocks, shard, memory = measured(LLAMA_70B, settings, device_bytes=24 * GIB, rank=3)
    bound = activation_bytes(shard.config, shard._model.config, shard._model.shard, torch.bfloat16)
    own = 2 * CUDA_PAGE * kv_bytes_per_token(shard._model.config, shard._model.shard)
    peak = memory.last_peak - memory.allocated() - own
    assert peak < bound < 2**28
    left = 24 * GIB - CONTEXT_BYTES - memory.allocated() - peak - int(24 * GIB * RESERVE_FRACTION)
    assert blocks == 1 + left // (own // 2)


def test_a_peak_above_the_estimate_is_logged_with_both_numbers(caplog: pytest.LogCaptureFixture) -> None:
    """Attention in float32 gathers the KV cache, which no estimate of activations knows."""
    caplog.set_level(logging.INFO)
    with fake_cuda() as recorder, PeakMemory() as tensors:
        shard = fake_shard(LLAMA_8B, **SMALL | {"max_num_requests": 2, "max_step_tokens": 16})
        shard._model._attention = {0: make_attention("padded", group_size=4, dtype=torch.bfloat16, device=CUDA)}
        memory = FakeMemory(tensors, device_bytes=40 * GIB)
        shard.measure(memory, recorder.event)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    bound = activation_bytes(shard.config, shard._model.config, shard._model.shard, torch.bfloat16)
    assert f"more than the {bound / GIB:.3f} GiB of the estimate" in warning
    assert any("measured" in record.getMessage() and "KV cache (" in record.getMessage() for record in caplog.records)


def test_a_device_without_room_for_the_cache_is_refused_with_the_measured_plan() -> None:
    with pytest.raises(ConfigError, match=r"the KV cache needs 4096 tokens(?s:.*)activations +0\.\d\d GiB"):
        measured(LLAMA_8B, {}, device_bytes=9 * GIB // 2)


def test_a_step_that_does_not_fit_is_refused_with_what_to_change() -> None:
    class Full:
        """An event for which the device has no memory."""

        def record(self) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        def query(self) -> bool:
            return True

        def elapsed_time(self, end: Any) -> float:
            return 1.0

    with fake_cuda(), PeakMemory() as tensors:
        shard = fake_shard(LLAMA_8B, **SMALL)
        with pytest.raises(ConfigError, match=r"largest step does not fit(?s:.*)Lower max_step_tokens"):
            shard.measure(FakeMemory(tensors, device_bytes=9 * GIB), Full)
