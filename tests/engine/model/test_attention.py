"""Padded attention against the reference in plain loops, over random mixes of spans.

Promise: equal within rounding for any spans of at least one row, any context, block order, head grouping and dtype,
whatever is in blocks and slots that a span does not own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import TokenRange, forward_input_of, scattered_blocks

from engine.errors import ConfigError
from engine.model.attention import ReferenceAttention, make_attention
from engine.model.attention_padded import PaddedAttention

CPU = torch.device("cpu")
LONG = PaddedAttention.SHORT_SPAN
SPANS = st.lists(
    st.tuples(st.one_of(st.integers(1, 8), st.integers(LONG - 1, LONG + 9)), st.sampled_from([0, 1, 5, 37, 150, 400])),
    min_size=1,
    max_size=6,
)


def both(
    spans: list[tuple[int, int]],
    *,
    block_size: int,
    num_kv_heads: int,
    group_size: int,
    dtype: torch.dtype,
    fast: Any = None,
    window: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Results of the fast path and of the reference for spans of (rows, context)."""
    totals = [rows + context for rows, context in spans]
    num_blocks = sum(-(-total // block_size) for total in totals) + 3
    blocks = scattered_blocks(totals, num_blocks=num_blocks, block_size=block_size)
    ranges = [
        TokenRange(range(total), context, total, owned)
        for (_, context), total, owned in zip(spans, totals, blocks, strict=True)
    ]
    forward_input = forward_input_of(ranges, block_size=block_size)
    generator = torch.Generator().manual_seed(len(spans) + sum(totals))
    cache_shape = (num_blocks, block_size, num_kv_heads, 16)
    keys, values = (torch.randn(cache_shape, generator=generator).to(dtype) for _ in range(2))
    query = torch.randn(len(forward_input.token_ids), num_kv_heads * group_size, 16, generator=generator).to(dtype)
    fast = fast or make_attention("auto", group_size=group_size, dtype=dtype, device=CPU, window=window)
    slow = ReferenceAttention(window=window)
    found = fast.attend(query, keys, values, fast.prepare(forward_input, block_size=block_size))
    return found, slow.attend(query, keys, values, slow.prepare(forward_input, block_size=block_size))


@settings(max_examples=40)
@given(
    spans=SPANS,
    block_size=st.sampled_from([1, 3, 16, 64]),
    num_kv_heads=st.integers(1, 3),
    group_size=st.sampled_from([1, 3, 4]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    window=st.sampled_from([0, 0, 1, 7, 40, 200]),
)
def test_fast_equals_reference(
    spans: list[tuple[int, int]], block_size: int, num_kv_heads: int, group_size: int, dtype: torch.dtype, window: int
) -> None:
    sizes = {"block_size": block_size, "num_kv_heads": num_kv_heads, "group_size": group_size}
    found, expected = both(spans, dtype=dtype, window=window, **sizes)
    assert found.dtype == dtype
    bound = 1e-5 if dtype is torch.float32 else 0.03
    assert (found.float() - expected.float()).abs().max().item() < bound


@pytest.mark.parametrize("rows", [1, 2, 6, LONG, LONG + 1, 3 * LONG])
@pytest.mark.parametrize("context", [0, 1, 300])
def test_equal_spans_take_the_same_path_without_padding(rows: int, context: int) -> None:
    found, expected = both([(rows, context)] * 3, block_size=16, num_kv_heads=3, group_size=3, dtype=torch.float32)
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("contexts", [[300] * 5, [200, 300, 350, 390, 260], [1500]])
def test_batched_products_in_bf16(rows: int, contexts: list[int]) -> None:
    assert len(contexts) * max(contexts) >= PaddedAttention.MIN_BATCHED
    spans = [(rows, context) for context in contexts]
    found, expected = both(spans, block_size=16, num_kv_heads=3, group_size=3, dtype=torch.bfloat16)
    assert (found.float() - expected.float()).abs().max().item() < 0.03


def test_a_long_context_does_not_pad_the_short_ones() -> None:
    attention = PaddedAttention(group_size=3, dtype=torch.float32, device=CPU)
    lengths = [20, 5000, 30, 25, 4000]
    blocks = scattered_blocks(lengths, num_blocks=600, block_size=16)
    ranges = [TokenRange(range(n), n - 1, n, owned) for n, owned in zip(lengths, blocks, strict=True)]
    groups = attention.prepare(forward_input_of(ranges, block_size=16), block_size=16)
    assert sorted(group.kv_len for group in groups) == [30, 5000]
    gathered = sum(group.blocks.numel() * 16 for group in groups)
    assert gathered < 1.5 * sum(lengths)


def test_blocks_before_the_window_are_not_gathered() -> None:
    attention = PaddedAttention(group_size=3, dtype=torch.float32, device=CPU, window=64)
    blocks = scattered_blocks([5000], num_blocks=400, block_size=16)[0]
    groups = attention.prepare(
        forward_input_of([TokenRange(range(5000), 4998, 5000, blocks)], block_size=16), block_size=16
    )
    assert groups[0].blocks.tolist() == blocks[-5:]


def test_a_window_of_one_token_is_the_token_itself() -> None:
    """The reference is right: a row that sees only itself gives its own value."""
    reference = ReferenceAttention(window=1)
    values = torch.randn(1, 8, 1, 16)
    forward_input = forward_input_of([TokenRange(range(8), 3, 8, [0])], block_size=8)
    found = reference.attend(
        torch.randn(5, 1, 16), torch.randn(1, 8, 1, 16), values, reference.prepare(forward_input, block_size=8)
    )
    torch.testing.assert_close(found, values[0, 3:, 0])


def test_varlen_is_refused_where_it_cannot_run() -> None:
    with pytest.raises(ConfigError, match="varlen needs cuda"):
        make_attention("varlen", group_size=1, dtype=torch.bfloat16, device=CPU)


def test_forward_inputs_of_numpy_views_are_accepted() -> None:
    """Block tables may be views into a wider array."""
    from msgspec.structs import replace

    attention = PaddedAttention(group_size=1, dtype=torch.float32, device=CPU)
    forward_input = forward_input_of([TokenRange(range(9), 8, 9, [2, 0, 1])], block_size=4)
    wide = np.zeros((1, 50), dtype=np.int32)
    wide[:, :3] = forward_input.block_tables
    groups = attention.prepare(replace(forward_input, block_tables=wide[:, :20]), block_size=4)
    assert groups[0].blocks.tolist() == [2, 0, 1]
