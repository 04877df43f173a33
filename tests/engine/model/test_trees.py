"""Draft trees in every attention and model: a node's row is the row of the chain that leads to it.

Promise: within rounding for PyTorch's operators, bit for bit for the native kernel, for any tree, any rows before it,
any mix with chains and prompts in one forward, also after the accepted path has been moved to consecutive KV slots.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_library import needs_library
from shard_children import logits_of_models, run_ranks
from tiny_models import VOCAB, scattered_blocks, write_model
from trees import TreeSpan, path_to, random_parents

from engine.core.packing import SpanRows, pack_spans
from engine.core.step import ForwardInput
from engine.model.attention import ReferenceAttention, make_attention
from engine.model.load import load_model
from engine.model.runner import ModelRunner

CPU = torch.device("cpu")
NUM_BLOCKS = 120
NATIVE = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 64, "num_attention_heads": 6}


def tree_spans(rng: random.Random, sizes: list[tuple[int, int, int]], block_size: int) -> list[TreeSpan]:
    """One span per (committed tokens, rows among them, nodes)."""
    lengths = [committed + nodes + 1 for committed, _, nodes in sizes]  # room for a token after the longest path
    blocks = scattered_blocks(lengths, num_blocks=NUM_BLOCKS, block_size=block_size, seed=rng.randrange(99))
    return [
        TreeSpan(
            [rng.randrange(VOCAB) for _ in range(committed)],
            rows,
            [rng.randrange(VOCAB) for _ in range(nodes)],
            random_parents(rng, nodes),
            owned,
        )
        for (committed, rows, nodes), owned in zip(sizes, blocks, strict=True)
    ]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(
        st.integers(1, 200).flatmap(
            lambda committed: st.tuples(
                st.just(committed), st.integers(1, min(committed, 40)), st.sampled_from([0, 1, 3, 6, 20, 64])
            )
        ),
        min_size=1,
        max_size=4,
    ),
    block_size=st.sampled_from([1, 3, 16]),
    num_kv_heads=st.integers(1, 2),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    window=st.sampled_from([0, 0, 1, 3, 7, 40]),
    seed=st.integers(0, 2**20),
)
def test_padded_attention_equals_the_reference(
    sizes: list[tuple[int, int, int]], block_size: int, num_kv_heads: int, dtype: torch.dtype, window: int, seed: int
) -> None:
    rng = random.Random(seed)
    num_blocks = sum(-(-(committed + nodes) // block_size) for committed, _, nodes in sizes)
    lengths = [committed + nodes for committed, _, nodes in sizes]
    blocks = scattered_blocks(lengths, num_blocks=num_blocks, block_size=block_size)
    spans = [
        TreeSpan([0] * committed, rows, [0] * nodes, random_parents(rng, nodes), owned).rows()
        for (committed, rows, nodes), owned in zip(sizes, blocks, strict=True)
    ]
    forward_input = pack_spans(spans, block_size)
    generator = torch.Generator().manual_seed(seed)
    cache_shape = (num_blocks, block_size, num_kv_heads, 16)
    keys, values = (torch.randn(cache_shape, generator=generator).to(dtype) for _ in range(2))
    query = torch.randn(len(forward_input.token_ids), num_kv_heads * 3, 16, generator=generator).to(dtype)
    fast = make_attention("padded", group_size=3, dtype=dtype, device=CPU, window=window)
    slow = ReferenceAttention(window=window)
    found, expected = (
        attention.attend(query, keys, values, attention.prepare(forward_input, block_size=block_size))
        for attention in (fast, slow)
    )
    assert (found.float() - expected.float()).abs().max().item() < (1e-5 if dtype is torch.float32 else 0.03)


def logits_by_path(runner: ModelRunner, span: TreeSpan) -> dict[int, torch.Tensor]:
    """The logits of the last committed token (-1) and of each node, each from its own text as one prompt."""
    found = {}
    for node in range(-1, len(span.tokens)):
        text = span.path_tokens(node)
        blocks = list(range(-(-len(text) // runner.block_size)))
        result = runner.forward(pack_spans([SpanRows(text, 0, blocks, 1)], runner.block_size))
        found[node] = result.require_logits()[0].clone()
    return found


def fill(runner: ModelRunner, spans: list[TreeSpan]) -> None:
    """Compute the committed tokens that are no rows of the trees' forward."""
    before = [(span, span.committed[: len(span.committed) - span.num_rows]) for span in spans]
    filled = [SpanRows(tokens, 0, span.blocks, 0) for span, tokens in before if tokens]
    if filled:
        runner.forward(pack_spans(filled, runner.block_size))


def make_runner(folder: Path, kind: str, block_size: int) -> ModelRunner:
    """A model with a kernel; `kind` ends with int8 for an int8 KV cache."""
    kernel, _, cache = kind.partition(" ")
    options: dict[str, Any] = {"kernel": kernel} if kernel == "native" else {"dtype": torch.float32, "kernel": kernel}
    kv_dtype = torch.int8 if cache else None
    return ModelRunner(load_model(folder, **options), num_blocks=NUM_BLOCKS, block_size=block_size, kv_dtype=kv_dtype)


NATIVES = [pytest.param(kind, marks=needs_library) for kind in ("native", "native int8")]


SIZES = [(1, 1, 8), (15, 1, 5), (16, 1, 0), (33, 33, 7), (40, 3, 64), (70, 1, 20), (90, 1, 1)]
"""Committed tokens, rows among them, nodes: decodes, chunks and trees in one forward."""


@pytest.mark.parametrize("kind", ["torch", "reference", *NATIVES])
def test_a_node_has_the_logits_of_its_own_chain(tmp_path: Path, kind: str) -> None:
    folder = write_model(tmp_path, "qwen3", **NATIVE)
    runner, of_chains = make_runner(folder, kind, 16), make_runner(folder, kind, 16)
    for seed in range(3):
        spans = tree_spans(random.Random(seed), SIZES, 16)
        fill(runner, spans)
        logits = runner.forward(pack_spans([span.rows() for span in spans], 16)).require_logits()
        row = 0
        for span in spans:
            expected = logits_by_path(of_chains, span)
            for node in range(-1, len(span.tokens)):
                if kind.startswith("native"):
                    assert torch.equal(logits[row], expected[node]), (seed, span.parents, node)
                else:
                    torch.testing.assert_close(logits[row], expected[node], atol=2e-5, rtol=1e-4)
                row += 1


@pytest.mark.parametrize("family", ["gemma3_text", "mistral-window"])
def test_a_window_counts_along_the_path(tmp_path: Path, family: str) -> None:
    folder = write_model(tmp_path, family)
    spans = tree_spans(random.Random(1), [(19, 1, 12), (50, 2, 30)], 4)
    runner = make_runner(folder, "torch", 4)
    fill(runner, spans)
    logits = runner.forward(pack_spans([span.rows() for span in spans], 4)).require_logits()
    row = 0
    for span in spans:
        expected = logits_by_path(make_runner(folder, "torch", 4), span)
        for node in range(-1, len(span.tokens)):
            torch.testing.assert_close(logits[row], expected[node], atol=2e-5, rtol=1e-4)
            row += 1


def step_after(span: TreeSpan, node: int, token: int) -> tuple[SpanRows, list[tuple[int, int]]]:
    """The decode that follows the acceptance of the path to a node, and the moves before it."""
    path, first, size = path_to(span.parents, node), len(span.committed), 16
    slots = [block * size + offset for block in span.blocks for offset in range(size)]
    moves = [(slots[first + each], slots[first + depth]) for depth, each in enumerate(path) if each != depth]
    return SpanRows([token], first + len(path), span.blocks, 1), moves


@pytest.mark.parametrize("kind", ["torch", *NATIVES])
def test_after_the_moves_the_cache_is_that_of_the_accepted_chain(tmp_path: Path, kind: str) -> None:
    folder = write_model(tmp_path, "llama", **NATIVE)
    for seed in range(4):
        rng = random.Random(seed)
        spans = tree_spans(rng, SIZES, 16)
        runner = make_runner(folder, kind, 16)
        fill(runner, spans)
        runner.forward(pack_spans([span.rows() for span in spans], 16))
        nodes = [rng.randrange(len(span.tokens)) if span.tokens else -1 for span in spans]
        steps = [step_after(span, node, 7) for span, node in zip(spans, nodes, strict=True)]
        moves = [move for _, moves in steps for move in moves]
        assert moves, "some path is not the first nodes"
        after = runner.forward(pack_spans([rows for rows, _ in steps], 16, moves=moves)).require_logits()
        for row, span, node in zip(after, spans, nodes, strict=True):
            text = [*span.path_tokens(node), 7]
            fresh = make_runner(folder, kind, 16)
            expected = fresh.forward(pack_spans([SpanRows(text, 0, list(range(9)), 1)], 16)).require_logits()[0]
            if kind.startswith("native"):
                assert torch.equal(row, expected)
            else:
                torch.testing.assert_close(row, expected, atol=2e-5, rtol=1e-4)


def test_shards_compute_trees_and_moves(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "llama")
    spans = tree_spans(random.Random(3), [(30, 30, 9), (12, 12, 20)], 16)
    steps = [step_after(span, len(span.tokens) - 1, 5) for span in spans]
    moves = [move for _, moves in steps for move in moves]
    inputs: list[ForwardInput] = [
        pack_spans([span.rows() for span in spans], 16),
        pack_spans([rows for rows, _ in steps], 16, moves=moves),
    ]
    whole = make_runner(folder, "torch", 16)
    expected = [whole.forward(part).require_logits().numpy() for part in inputs]
    (found, _) = run_ranks(logits_of_models, 2, [(folder, inputs, 16)])
    for mine, right in zip(found[0], expected, strict=True):
        np.testing.assert_allclose(mine, right, atol=3e-5, rtol=1e-4)
