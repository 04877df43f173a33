"""The memory plan's arithmetic, part by part, for the shape of Llama-3-8B."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_shapes import LLAMA_8B

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weights import ShardSpec
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.workers.memory_plan import GIB, MemoryPlan, Part, plan_memory, weight_bytes

VOCAB, MIB = 128_256, 1 << 20
SETTINGS = {"model": "m", "device": "cuda", "max_num_requests": 8, "max_step_tokens": 100}


def plan(*, rank: int = 0, device_bytes: int = 80 * GIB, **settings: Any) -> MemoryPlan:
    engine = EngineConfig.parse(SETTINGS | settings)
    return plan_memory(engine, ModelConfig.parse(LLAMA_8B), rank=rank, device_bytes=device_bytes)


def parts(**options: Any) -> dict[str, int]:
    return {part.name: part.num_bytes for part in plan(**options).parts}


LAYERS = 100 * 2 * (6 * 4096 + 5 * 48 * 128 + 3 * 14_336)
"""Of a step of 100 rows: six times the hidden size, five times q, k and v, three times the inner size; bfloat16."""


def test_a_shard_with_a_draft() -> None:
    """8 requests of 1 + 3 rows that are sampled at 48 bytes per logit; the other 68 rows are scored at 20."""
    found = plan(speculative={"draft": "d", "k": 3, "memory_fraction": 0.25})
    assert {part.name: part.num_bytes for part in found.parts} == {
        "weights": 2 * 8_030_261_248,
        "activations": LAYERS + (48 * 32 + 20 * 68) * VOCAB,
        "CUDA contexts": 2 * 768 * MIB,
        "reserve": int(1.6 * GIB),
        "draft (25% of the device)": 20 * GIB,
        "draft buffer": 4 * 8 * 3 * VOCAB,
    }
    assert found.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2
    assert found.kv_bytes == 80 * GIB - sum(part.num_bytes for part in found.parts)
    assert found.kv_tokens == found.kv_bytes // found.kv_bytes_per_token


def test_a_tied_head_is_the_embedding_unless_it_is_split() -> None:
    tied = ModelConfig.parse(LLAMA_8B | {"tie_word_embeddings": True})
    table = VOCAB * 4096
    assert weight_bytes(tied, ShardSpec(0, 1), torch.bfloat16) == 2 * (8_030_261_248 - table)
    two = ShardSpec(0, 2)
    assert weight_bytes(tied, two, torch.bfloat16) == weight_bytes(ModelConfig.parse(LLAMA_8B), two, torch.bfloat16)


@pytest.mark.parametrize(("method", "num_bytes"), [("draft_model", 0), ("eagle", 128 * MIB), ("medusa", 128 * MIB)])
def test_features_of_the_target_are_in_the_buffer_where_the_draft_reads_them(method: str, num_bytes: int) -> None:
    found = parts(speculative={"draft": "d", "method": method, "k": 3})
    assert found["draft buffer"] == 4 * 8 * 3 * VOCAB + num_bytes
    assert parts(speculative={"draft": "d", "method": method, "k": 0})["draft buffer"] == 4 * 8 * VOCAB + num_bytes


def test_without_a_draft_model_there_is_one_process() -> None:
    for speculative in ({"method": "none"}, {"method": "ngram"}):
        found = parts(speculative=speculative)
        assert list(found) == ["weights", "activations", "CUDA contexts", "reserve"]
        assert found["CUDA contexts"] == 768 * MIB
    assert parts(speculative={"method": "none", "k": 0})["activations"] == LAYERS + (48 * 16 + 20 * 84) * VOCAB
    assert parts(max_step_tokens=20, speculative={"k": 3})["activations"] == LAYERS // 5 + 48 * 20 * VOCAB


def test_a_further_shard_has_its_part_of_each_layer_and_of_the_logits_and_no_draft() -> None:
    found = parts(rank=1, tensor_parallel_size=2, speculative={"draft": "d", "k": 3})
    assert found["activations"] == 100 * 2 * (6 * 4096 + 5 * 24 * 128 + 3 * 7168) + 100 * 2 * 2 * (VOCAB // 2)
    assert (found["CUDA contexts"], found["NCCL"]) == (768 * MIB, GIB)
    assert not [name for name in found if name.startswith("draft")]
    assert plan(rank=1, tensor_parallel_size=2).kv_bytes_per_token == 2 * 32 * 4 * 128 * 2


def test_recorded_forwards_hold_the_largest_one_and_a_little_for_each() -> None:
    """Plain 1, 2, 3, 4, 6 and 8 rows; with K up to 3 the same, and 12, 16, 24 and 32."""
    layers, results = LAYERS * 32 // 100, 32 * (4 * VOCAB + 2 * 3 * 4096)
    graphs = layers + 2 * results + (6 + 10) * 16 * MIB
    assert parts(cuda_graphs="on", speculative={"k": 3})["CUDA graphs"] == graphs
    with_draft = parts(cuda_graphs="on", speculative={"draft": "d", "k": 3})
    assert with_draft["CUDA graphs"] == graphs
    # Up to 8 rows are chosen from, and up to 32 committed ones have logits. Of each of six sizes: one head or first
    # forward, and for three kinds of choice one position and the whole chain of three.
    values = 8 * (4 * 3 + 32) * VOCAB + 4 * 32 * VOCAB
    assert with_draft["CUDA graphs of the draft"] == values + (6 * (1 + 3 * (1 + 3)) + 16) * 8 * MIB
    assert "CUDA graphs" not in parts(cuda_graphs="off")
    second = parts(rank=1, tensor_parallel_size=2, cuda_graphs="on", speculative={"k": 3})["CUDA graphs"]
    assert second == 32 * 2 * (6 * 4096 + 5 * 24 * 128 + 3 * 7168) + 16 * 16 * MIB


def test_adapters_have_room_for_as_many_as_may_be_loaded() -> None:
    """Inputs and outputs of q, k, v, o, gate, up and down, times rank, number, layers and two bytes."""
    sizes = (4096 + 4096) + 2 * (4096 + 1024) + (4096 + 4096) + 3 * (4096 + 14_336)
    found = parts(lora={"max_loras": 3, "max_lora_rank": 16})
    assert found["adapters (up to 3)"] == 32 * sizes * 16 * 3 * 2


SMALL = MemoryPlan(10 * GIB, (Part("weights", 4 * GIB), Part("reserve", GIB // 2)), GIB // 1024)


def test_the_table_and_the_refusal_of_a_cache_that_is_too_small() -> None:
    assert (SMALL.kv_bytes, SMALL.kv_tokens) == (11 * GIB // 2, 5632)
    assert SMALL.table().splitlines() == [
        f"{'weights':<40}    4.00 GiB",
        f"{'reserve':<40}    0.50 GiB",
        f"{'KV cache (5632 tokens)':<40}    5.50 GiB",
        f"{'device':<40}   10.00 GiB",
    ]
    SMALL.check(5632)
    with pytest.raises(ConfigError, match="needs 5633 tokens, this plan has room for 5632") as caught:
        SMALL.check(5633)
    assert SMALL.table() in str(caught.value)


def test_parts_that_do_not_fit_leave_no_token() -> None:
    full = MemoryPlan(GIB, SMALL.parts, 1)
    assert (full.kv_bytes, full.kv_tokens) == (-7 * GIB // 2, 0)
    assert f"{'KV cache (0 tokens)':<40}    0.00 GiB" in full.table()


def test_what_was_measured_takes_the_place_of_the_estimate() -> None:
    """NCCL has its memory by then, so that it is no longer free."""
    found = plan(rank=1, tensor_parallel_size=2).measured(weights=5 * GIB, activations=GIB // 4)
    assert {part.name: part.num_bytes for part in found.parts} == {
        "weights": 5 * GIB,
        "activations": GIB // 4,
        "CUDA contexts": 768 * MIB,
        "reserve": int(1.6 * GIB),
    }
    assert found.kv_bytes == 80 * GIB - sum(part.num_bytes for part in found.parts)
    assert (found.part("weights"), found.part("NCCL")) == (5 * GIB, 0)
