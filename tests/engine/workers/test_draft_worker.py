"""The draft's process: what it loads under its memory cap, and what it reports of itself."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tiny_models import VOCAB, write_model

from engine.config import EngineConfig
from engine.draft.messages import DraftInfo
from engine.draft_buffer.layout import BufferSpec
from engine.draft_buffer.target_endpoint import create_draft_buffer
from engine.errors import ConfigError
from engine.workers.draft_worker import DraftWorker

KV = 2 * 3 * 3 * 8 * 4
"""Bytes of a token: keys and values of three layers with three heads of eight numbers in float32."""
BLOCK = 16


class SizedWorker(DraftWorker):
    """A draft on a device with a given memory."""

    total = 0

    def _total_memory(self) -> int:
        return self.total


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture(scope="module")
def weights(folder: Path) -> int:
    """Bytes of the weights in float32."""
    return 4 * sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())


def worker(folder: Path, total: int, **settings: Any) -> SizedWorker:
    values = {
        "model": str(folder),
        "device": "cpu",
        "dtype": "float32",
        "block_size": BLOCK,
        "max_num_requests": 2,
        "max_model_len": 31,
        "speculative": {"draft": str(folder), "memory_fraction": 0.5},
    }
    made = SizedWorker(EngineConfig.parse(values | settings), folder, folder, node_id="n")
    made.total = total
    return made


def test_the_smallest_device_holds_the_weights_and_one_sequence(folder: Path, weights: int) -> None:
    """A sequence is the longest one and the token after it: 32 tokens, two blocks. One block more is scratch."""
    made = worker(folder, 2 * (weights + 32 * KV))
    assert made.load() == DraftInfo(VOCAB, None, 0, 1)
    assert made._pool.usage().num_free == 2
    assert (made._memory_bytes, made._cap_bytes) == (weights + 3 * BLOCK * KV, weights + 32 * KV)
    with pytest.raises(
        ConfigError, match=r"^speculative\.memory_fraction: draft weights .* exceed 50% of the device's"
    ):
        worker(folder, 2 * (weights + 32 * KV) - 2).load()


def test_a_large_device_has_room_for_all_requests_twice(folder: Path, weights: int) -> None:
    made = worker(folder, 1 << 40)
    made.load()
    assert made._pool.usage().num_free == 2 * 2 * 32 // BLOCK
    assert made._cap_bytes == 1 << 39


def test_without_a_length_the_model_s_own_counts(folder: Path, weights: int) -> None:
    """512 positions and one token more, rounded down to whole blocks."""
    made = worker(folder, 2 * (weights + 513 * KV), max_model_len=None)
    made.load()
    assert made._pool.usage().num_free == 32
    with pytest.raises(ConfigError, match="raise the fraction or take a smaller draft"):
        worker(folder, 2 * (weights + 513 * KV) - 2, max_model_len=None).load()


def test_memory_and_blocks_are_reported(folder: Path, weights: int) -> None:
    made = worker(folder, 1 << 40)
    made.load()
    found = made.metrics()
    assert found.number("paceline_draft_memory_bytes") == weights + 9 * BLOCK * KV
    assert found.number("paceline_draft_memory_cap_bytes") == 1 << 39
    assert found.number("paceline_kv_free_blocks", "draft") == 8
    assert found.number("paceline_kv_used_blocks", "draft") == 0
    assert "paceline_kv_evictions_total" in found.numbers


def test_a_draft_that_is_stopped_ends_though_its_target_lives(folder: Path) -> None:
    made = worker(folder, 1 << 40)
    info = made.load()
    spec = BufferSpec(
        max_rows=2,
        max_k=3,
        max_request_tokens=8,
        max_released=2,
        draft_vocab=info.draft_vocab,
        target_vocab=VOCAB,
    )
    with contextlib.closing(create_draft_buffer(spec, device="cpu", node_id="n", epoch=1)) as target:
        made.connect(target.handle())
        thread = threading.Thread(target=made.run, daemon=True)
        thread.start()
        made.stop()
        made.stop()
        thread.join(30)
        assert not thread.is_alive()
