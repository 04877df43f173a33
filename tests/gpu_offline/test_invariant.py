"""The batch-invariant kernels of a GPU: whole steps, and what they do not take. `test_kernels.py` checks the bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import CUDA, fake_cuda
from fake_graphs import Guarded
from fake_steps import MODES, K, batch_of, fake_shard, tree_draft, verifier_of
from model_shapes import LLAMA_8B, QWEN3_8B
from tiny_models import write_model

from engine.config import EngineConfig
from engine.core.step import Draft, DraftRow
from engine.errors import ConfigError
from engine.messages import SamplingParams
from engine.model.attention import make_attention
from engine.model.fused_decoder import InvariantDecoder
from engine.model.load import load_model

SETTINGS: dict[str, Any] = {"model": "m", "device": "cuda", "kernel": "invariant"}


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("shape", [LLAMA_8B, QWEN3_8B], ids=["llama-8b", "qwen3-8b"])
def test_a_step_waits_once(shape: dict[str, Any], kv_cache_dtype: str) -> None:
    """Every mode in one step."""
    with fake_cuda() as recorder:
        shard = fake_shard(shape, feature_layers=(0, 1, 2), kernel="invariant", kv_cache_dtype=kv_cache_dtype)
        assert isinstance(shard.runner.model, InvariantDecoder)
        batch = batch_of([SamplingParams(**mode) for mode in MODES.values()], K, vocab_size=shape["vocab_size"])
        drafts = Draft(tuple(DraftRow((ord("b"),) * (K if index % 2 else 0)) for index in range(len(MODES))))
        verify = verifier_of(shard, recorder).verify
        recorder.launches.clear()
        recorder.reads.clear()
        assert len(verify(batch, drafts).rows) == len(MODES)
        assert recorder.reads == {"event": 1}
        assert recorder.launches["linear"] == 3 * 5 + 1


def test_recorded_trees_wait_once() -> None:
    with fake_cuda() as recorder:
        shard = fake_shard(LLAMA_8B, tree="auto", kernel="invariant")
        object.__setattr__(shard.config, "max_num_requests", 12)
        shard.record(Guarded(recorder))
        batch = batch_of([SamplingParams(**mode) for mode in MODES.values()], K, vocab_size=LLAMA_8B["vocab_size"])
        verify = verifier_of(shard, recorder).verify
        recorder.reads.clear()
        assert len(verify(batch, tree_draft(len(MODES))).rows) == len(MODES)
        assert recorder.reads == {"event": 1}


def test_settings_and_what_they_refuse(tmp_path: Path) -> None:
    config = EngineConfig.parse(SETTINGS)
    assert (config.forward_kernel, config.draft_kernel) == ("invariant", "triton")
    for wrong, message in (
        ({"device": "cpu"}, "kernel: invariant given, but device is cpu; allowed there are auto, native and torch"),
        ({"tensor_parallel_size": 2}, "the sums over shards are those of NCCL; allowed is tensor_parallel_size 1"),
        ({"lora": {}}, "kernel: invariant does not compute adapters"),
    ):
        with pytest.raises(ConfigError, match=message):
            EngineConfig.parse(SETTINGS | wrong)
    with pytest.raises(ConfigError, match="kernel: invariant given, but layers of this model have a window"):
        make_attention("invariant", group_size=4, dtype=torch.bfloat16, device=CUDA, window=9)
    with pytest.raises(ConfigError, match="kernel: invariant does not compute"):
        load_model(write_model(tmp_path, "mixtral"), kernel="invariant")
