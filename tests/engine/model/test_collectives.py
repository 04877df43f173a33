"""Tensor parallelism with real processes over gloo: shards together equal the whole model, a lost peer is an error.

Promise: logits of 1, 2 and 3 shards agree within 1e-4 in float32, also where heads, intermediate units and vocabulary
are not divisible.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from shard_children import collective_values, logits_of_models, lose_a_peer, run_ranks
from tiny_models import VOCAB, TokenRange, forward_input_of, write_model

from engine.checkpoint.store import resolve_model
from engine.checkpoint.weights import ShardSpec
from engine.core.step import ForwardInput
from engine.errors import ConfigError, ShardDown
from engine.model.collectives import Group, Solo, open_store
from engine.model.load import load_model
from engine.model.runner import ModelRunner

BLOCK_SIZE = 8


def forward_inputs_for(vocab: int) -> list[ForwardInput]:
    """A prefill of two requests, then a decode span and a verify span."""
    rng = random.Random(vocab)
    first, second = ([rng.randrange(vocab) for _ in range(40)] for _ in range(2))
    blocks = [[7, 3, 9, 1, 5], [0, 2, 4, 6, 8]]
    steps = [
        [TokenRange(first, 0, 30, blocks[0]), TokenRange(second, 0, 12, blocks[1])],
        [TokenRange(first, 30, 31, blocks[0]), TokenRange(second, 12, 18, blocks[1])],
    ]
    return [forward_input_of(step, block_size=BLOCK_SIZE) for step in steps]


@pytest.mark.parametrize("size", [2, 3])
def test_shards_together_are_the_whole_model(tmp_path: Path, size: int) -> None:
    folders = [
        write_model(tmp_path / "llama", "llama", intermediate_size=83),
        write_model(tmp_path / "biased", "llama-biased", intermediate_size=79),
        write_model(tmp_path / "qwen2", "qwen2"),
        write_model(tmp_path / "qwen3", "qwen3"),
    ]
    models = [(folder, forward_inputs_for(VOCAB), BLOCK_SIZE) for folder in folders]
    models.append((resolve_model("smollm2", progress=False), forward_inputs_for(49152), BLOCK_SIZE))
    assert_shards_equal_the_whole(size, models)


def assert_shards_equal_the_whole(size: int, models: list[tuple[Path, list[ForwardInput], int]]) -> None:
    results = run_ranks(logits_of_models, size, models)
    assert all(logits is None for rank in results[1:] for model in rank for logits in model)
    for (folder, forward_inputs, _), found in zip(models, results[0], strict=True):
        runner = ModelRunner(load_model(folder, dtype=torch.float32), num_blocks=128, block_size=BLOCK_SIZE)
        for forward_input, logits in zip(forward_inputs, found, strict=True):
            whole = runner.forward(forward_input).require_logits()
            assert np.abs(whole.numpy() - logits).max() < 1e-4, folder


def test_shards_of_windows_fused_projections_and_experts(tmp_path: Path) -> None:
    folders = [
        write_model(tmp_path / "gemma", "gemma3_text"),
        write_model(tmp_path / "phi3", "phi3", intermediate_size=83),
        write_model(tmp_path / "moe", "qwen3_moe", moe_intermediate_size=37),
    ]
    assert_shards_equal_the_whole(2, [(folder, forward_inputs_for(VOCAB), BLOCK_SIZE) for folder in folders])


def test_shards_beyond_the_kv_heads_have_copies_of_them(tmp_path: Path) -> None:
    """Four ranks: two KV heads are on two ranks each, and one KV head is on all."""
    folders = [
        write_model(tmp_path / "two", "qwen3", num_attention_heads=8, num_key_value_heads=2),
        write_model(tmp_path / "one", "phi3", num_attention_heads=4, num_key_value_heads=1),
    ]
    for folder in folders:
        runner = ModelRunner(load_model(folder, dtype=torch.float32), num_blocks=128, block_size=BLOCK_SIZE)
        found = logits_of_threads(4, folder, forward_inputs_for(VOCAB))
        for forward_input, logits in zip(forward_inputs_for(VOCAB), found, strict=True):
            whole = runner.forward(forward_input).require_logits()
            assert (whole - logits).abs().max().item() < 1e-4, folder


def logits_of_threads(size: int, folder: Path, forward_inputs: list[ForwardInput]) -> list[torch.Tensor]:
    """Logits of rank 0 of shards that are threads of this process."""
    store = open_store(size=size, master=True)

    def run(rank: int) -> list[torch.Tensor | None]:
        own = store if rank == 0 else open_store(port=store.port, size=size, master=False)
        group = Group.connect(rank=rank, size=size, store=own, device=torch.device("cpu"), timeout_s=60)
        model = load_model(folder, dtype=torch.float32, collectives=group)
        runner = ModelRunner(model, num_blocks=128, block_size=BLOCK_SIZE)
        return [runner.forward(forward_input).logits for forward_input in forward_inputs]

    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(run, range(size)))
    return [logits for logits in results[0] if logits is not None]


@pytest.mark.parametrize("size", [4, 9, 12])
def test_shards_that_do_not_fit_the_heads_are_refused(tmp_path: Path, size: int) -> None:
    class LastRank(Solo):
        rank = size - 1

    LastRank.size = size
    folder = write_model(tmp_path, "llama")
    with pytest.raises(
        ConfigError, match=rf"tensor_parallel_size: {size} is above the model's 3 KV heads; a size above"
    ):
        load_model(folder, collectives=LastRank())


@pytest.mark.parametrize("total", [1, 2, 3, 7, 576, 49152])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_parts_cover_everything_once(total: int, size: int) -> None:
    shards = [ShardSpec(rank, size) for rank in range(size)]
    covered = [unit for shard in shards for unit in range(total)[shard.part(total)]]
    assert covered == list(range(total))
    lengths = [len(range(total)[shard.part(total)]) for shard in shards]
    assert tuple(lengths) == shards[0].parts(total)
    assert max(lengths) - min(lengths) <= 1


def test_sum_and_gather_in_two_groups_of_one_process() -> None:
    results = run_ranks(collective_values, 3)
    for rank, sent in enumerate(results):
        for dtype in ("fp32", "bf16"):
            total, gathered = sent[dtype]
            assert total == [[6.0] * 5] * 3
            assert gathered == ([[0.0, 0.0, 1.0, 1.0, 2.0]] * 2 if rank == 0 else None)


def test_a_dead_peer_is_noticed_at_once() -> None:
    seen, waited_s = run_ranks(lose_a_peer, 2, "dies", 20.0)[0]
    assert seen == "ShardDown"
    assert waited_s < 10


def test_a_hung_peer_is_noticed_at_the_deadline() -> None:
    seen, waited_s = run_ranks(lose_a_peer, 2, "hangs", 2.0, timeout_s=20.0)[0]
    assert seen == "ShardDown"
    assert waited_s < 10


def test_a_peer_that_never_comes_is_an_error() -> None:
    store = open_store(size=2, master=True)
    with pytest.raises(ShardDown, match="shard 0 of 2"):
        Group.connect(rank=0, size=2, store=store, device=torch.device("cpu"), timeout_s=0.5)


def test_no_store_is_an_error() -> None:
    with pytest.raises(ShardDown, match="no store at"):
        open_store("127.0.0.1", 1, size=2, master=False, timeout_s=0.5)
