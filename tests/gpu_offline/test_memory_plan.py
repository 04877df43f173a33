"""The memory plans of common setups fit, by the same arithmetic that a shard uses at start.

Weights are compared with the published parameter counts, which are exact.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from model_shapes import LLAMA_8B, LLAMA_70B, QWEN3_8B
from tiny_models import write_model

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weights import WHOLE, ShardSpec, WeightFiles
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model.device import Compute
from engine.model.shard_weights import Loader
from engine.workers.memory_plan import GIB, LEAST_CONTEXT, MemoryPlan, plan_memory, weight_bytes

DRAFT_1B = {"draft": "llama-1b"}
EAGLE = {"draft": "eagle", "method": "eagle"}
MIB = 1 << 20


def plan(shape: dict[str, Any], *, rank: int = 0, device_mib: int, **settings: Any) -> MemoryPlan:
    engine = EngineConfig.parse({"model": "m", "device": "cuda", **settings})
    return plan_memory(engine, ModelConfig.parse(shape), rank=rank, device_bytes=device_mib * MIB)


@pytest.mark.parametrize(
    ("shape", "num_parameters"), [(LLAMA_8B, 8_030_261_248), (LLAMA_70B, 70_553_706_496), (QWEN3_8B, 8_190_735_360)]
)
def test_weights_are_those_of_the_published_models(shape: dict[str, Any], num_parameters: int) -> None:
    assert weight_bytes(ModelConfig.parse(shape), WHOLE, torch.bfloat16) == 2 * num_parameters


@pytest.mark.parametrize("rank", range(4))
def test_70b_with_a_1b_draft_fits_four_80_gb_gpus(rank: int) -> None:
    """The settings of deployments/llama3-70b.yaml; an H100 with 80 GB has 81,559 MiB."""
    settings = {"tensor_parallel_size": 4, "max_model_len": 16384, "max_num_requests": 128, "max_step_tokens": 2048}
    found = plan(LLAMA_70B, rank=rank, device_mib=81_559, speculative=DRAFT_1B, **settings)
    found.check(128 * 1024)
    draft = sum(part.num_bytes for part in found.parts if part.name.startswith("draft"))
    assert (draft > 8 * GIB) == (rank == 0)
    assert sum(part.num_bytes for part in found.parts) + found.kv_bytes == found.device_bytes


def test_recorded_forwards_have_their_part_and_leave_room() -> None:
    settings = {"tensor_parallel_size": 4, "max_model_len": 16384, "max_num_requests": 128, "max_step_tokens": 2048}
    parts = {}
    for graphs in ("off", "on"):
        found = plan(LLAMA_70B, device_mib=81_559, speculative=DRAFT_1B, cuda_graphs=graphs, **settings)
        found.check(128 * 1024)
        parts[graphs] = {part.name: part.num_bytes for part in found.parts}
    assert "CUDA graphs" not in parts["off"]
    assert 4 * 512 * LLAMA_70B["vocab_size"] < parts["on"]["CUDA graphs"] < 3 * GIB
    results = 4 * 128 * 5 * LLAMA_70B["vocab_size"]
    assert results < parts["on"]["CUDA graphs of the draft"] < 6 * GIB
    eagle = plan(
        LLAMA_8B, device_mib=24_564, max_model_len=8192, max_num_requests=16, speculative=EAGLE, cuda_graphs="on"
    )
    eagle.check(8192)
    with pytest.raises(ConfigError, match="cuda_graphs: on given, but device is cpu"):
        EngineConfig.parse({"model": "m", "device": "cpu", "cuda_graphs": "on"})


def test_8b_with_an_eagle_draft_fits_24_gb() -> None:
    """24,564 MiB is what a 24 GB card of this class has."""
    found = plan(LLAMA_8B, device_mib=24_564, max_model_len=8192, max_num_requests=16, speculative=EAGLE)
    found.check(2 * 8192)


def test_8b_fits_141_gb_with_room_for_a_large_batch() -> None:
    found = plan(LLAMA_8B, device_mib=143_771, max_num_requests=256, max_step_tokens=4096)
    found.check(256 * 2048)


def test_a_plan_without_room_is_refused_with_the_numbers_and_what_to_change() -> None:
    found = plan(LLAMA_70B, device_mib=81_559, tensor_parallel_size=1)
    with pytest.raises(ConfigError) as error:
        found.check(LEAST_CONTEXT)
    for expected in ("131.4", "weights", "KV cache (0 tokens)", "79.65 GiB", "tensor_parallel_size", "4096 tokens"):
        assert expected in str(error.value), expected


def test_the_table_adds_up() -> None:
    found = plan(LLAMA_8B, device_mib=81_559, speculative=DRAFT_1B)
    numbers = [float(line.split()[-2]) for line in found.table().splitlines()]
    assert abs(sum(numbers[:-1]) - numbers[-1]) < 0.1
    assert "draft (10% of the device)" in found.table()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text", "phi3", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize("size", [1, 2])
def test_weights_of_every_family_are_those_that_are_loaded(tmp_path: Path, family: str, size: int) -> None:
    folder = write_model(tmp_path, family, tie_word_embeddings=False)
    config = ModelConfig.load(folder)
    compute = Compute(torch.float32, torch.device("cpu"), "reference")
    for rank in range(size):
        shard = ShardSpec(rank, size)
        loader = Loader(config, WeightFiles(folder), compute, shard=shard, linear="reference")
        assert weight_bytes(config, shard, torch.float32) == loaded_bytes(loader.decoder(None))


def loaded_bytes(weights: object) -> int:
    """Bytes of all tensors in a tree of weights. Tensors that share memory count once."""
    storages: dict[int, int] = {}
    pending = [weights]
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        elif isinstance(item, list | tuple):
            pending += item
        elif dataclasses.is_dataclass(item):
            pending += [getattr(item, field.name) for field in dataclasses.fields(item)]
        elif hasattr(item, "__dict__"):
            pending += vars(item).values()
    return sum(storages.values())


def test_adapters_have_their_part() -> None:
    """Rank 16 in every linear layer of Llama-3.1-8B is 41,943,040 weights, as its published adapters have."""
    lora = {"max_loras": 2, "max_lora_rank": 16}
    found = {
        shards: {
            part.name: part.num_bytes
            for part in plan(LLAMA_8B, device_mib=81_559, tensor_parallel_size=shards, lora=lora).parts
        }["adapters (up to 2)"]
        for shards in (1, 2)
    }
    assert found[1] == 2 * 2 * 41_943_040
    assert found[1] / 2 < found[2] < found[1]
    assert all(part.name[:8] != "adapters" for part in plan(LLAMA_8B, device_mib=81_559).parts)
    with pytest.raises(ConfigError, match="kernel: triton does not compute adapters"):
        EngineConfig.parse({"model": "m", "device": "cuda", "kernel": "triton", "lora": {}})
    with pytest.raises(ConfigError, match="recorded forwards have no adapters"):
        EngineConfig.parse({"model": "m", "device": "cuda", "cuda_graphs": "on", "lora": {}})
    with pytest.raises(ConfigError, match="adapters: 2 given, max_loras allows 1"):
        EngineConfig.parse({"model": "m", "lora": {"adapters": {"a": "x", "b": "y"}, "max_loras": 1}})
