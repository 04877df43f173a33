"""Memory that a start has used is given back: the cache of measured forwards, and buffers of loading."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import write_model

from engine.core.step import ForwardInput
from engine.model.load import load_model
from engine.model.runner import ModelRunner

BLOCK = 16


def one_span(num_tokens: int) -> ForwardInput:
    return ForwardInput(
        token_ids=np.ones(num_tokens, dtype=np.int32),
        positions=np.arange(num_tokens, dtype=np.int32),
        slots=np.arange(BLOCK, BLOCK + num_tokens, dtype=np.int32),
        q_lens=np.array([num_tokens], dtype=np.int32),
        kv_lens=np.array([num_tokens], dtype=np.int32),
        block_tables=np.arange(1, 1 + -(-num_tokens // BLOCK), dtype=np.int32)[None],
        logit_rows=np.array([num_tokens - 1], dtype=np.int32),
    )


def resident_bytes(address: int) -> int:
    """Resident bytes of the mapping that holds an address."""
    is_in = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(" ", 1)[0]
        if "-" in head:
            begin, end = (int(part, 16) for part in head.split("-"))
            is_in = begin <= address < end
        elif is_in and head == "Rss:":
            return int(line.split()[1]) << 10
    raise AssertionError("no such mapping")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_cleared_cache_takes_no_memory_and_serves_as_before(tmp_path: Path) -> None:
    runner = ModelRunner(
        load_model(write_model(tmp_path / "llama", "llama"), dtype=torch.float32), num_blocks=5000, block_size=BLOCK
    )
    forward_input = one_span(20)
    first = runner.forward(forward_input).require_logits().clone()
    keys = runner.caches[0].keys
    assert keys.any()
    assert resident_bytes(keys.data_ptr()) > 0
    runner.clear()
    assert resident_bytes(keys.data_ptr()) == 0
    assert not any(cache.keys.any() or cache.values.any() for cache in runner.caches)
    assert torch.equal(runner.forward(forward_input).require_logits(), first)


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc keeps freed memory")
def test_freed_memory_is_given_back_once() -> None:
    code = """
import psutil
from engine.model.device import keep_freed_memory, release_freed_memory
def resident():
    return psutil.Process().memory_info().rss
assert keep_freed_memory()
blocks = [b"x" * (1 << 20) for _ in range(200)]
del blocks
kept = resident()
release_freed_memory()
print(kept - resident())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 150 << 20
